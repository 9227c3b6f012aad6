// The transport over c10d backends: whatever the user's process group runs on.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "transport.h"

namespace fusedcomm {

class C10dTransport : public Transport {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

  // Backends of our own over the ranks of the user's group, one for each channel: collectives are started by our lanes,
  // later than the hook call, and must not interleave with the model's own on a shared one.
  C10dTransport(BackendPtr scatter, BackendPtr gather);

  int rank() const override { return scatter_->getRank(); }
  int world_size() const override { return scatter_->getSize(); }
  void all_to_all(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) override;
  void all_reduce(Channel channel, WireSpan data, Wire dtype, Lane::Completion done) override;

  // The sum, in place, of a dense tensor of any dtype that the backend can reduce.
  void all_reduce_tensor(Channel channel, const at::Tensor& tensor, Lane::Completion done);

  // Every rank's `input` (1-D, as long everywhere), one after the other in `output` (1-D).
  void all_gather_tensor(Channel channel, const at::Tensor& output, const at::Tensor& input, Lane::Completion done);

 private:
  c10d::Backend& backend(Channel channel) { return channel == Channel::kScatter ? *scatter_ : *gather_; }

  BackendPtr scatter_;
  BackendPtr gather_;
};

}  // namespace fusedcomm
