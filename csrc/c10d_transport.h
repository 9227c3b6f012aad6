// Transports over c10d backends: whatever the user's process group runs on.
#pragma once

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "transport.h"

namespace fusedcomm {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// What both have: collectives on whole tensors, for buckets that the codec does not carry.
class C10dTransport : public Transport {
 public:
  // The sum, in place, of a dense tensor of any dtype that the backend can reduce.
  virtual void all_reduce_tensor(Channel channel, const at::Tensor& tensor, Lane::Completion done) = 0;

  // Every rank's `input` (1-D, as long everywhere), one after the other in `output` (1-D).
  virtual void all_gather_tensor(Channel channel, const at::Tensor& output, const at::Tensor& input,
                                 Lane::Completion done) = 0;
};

// For backends that answer with a Work which completes by itself (gloo), over backends of our own, one for each
// channel: collectives are started by our lanes, later than the hook call, and must not interleave with the model's
// own.
class WorkTransport : public C10dTransport {
 public:
  WorkTransport(BackendPtr scatter, BackendPtr gather);

  int rank() const override { return scatter_->getRank(); }
  int world_size() const override { return scatter_->getSize(); }
  void all_to_all(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) override;
  // An all-to-all of equal parts: gloo's own all-gather allocates and copies at every call.
  int64_t gather_copies() const override { return world_size(); }
  void all_gather(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) override {
    all_to_all(channel, std::move(send), std::move(receive), std::move(done));
  }
  void all_reduce(Channel channel, WireSpan data, Wire dtype, Lane::Completion done) override;
  void all_reduce_tensor(Channel channel, const at::Tensor& tensor, Lane::Completion done) override;
  void all_gather_tensor(Channel channel, const at::Tensor& output, const at::Tensor& input,
                         Lane::Completion done) override;

 private:
  c10d::Backend& backend(Channel channel) { return channel == Channel::kScatter ? *scatter_ : *gather_; }

  BackendPtr scatter_;
  BackendPtr gather_;
};

// For backends that enqueue on the current stream (NCCL): the group DDP uses, with its watchdog and timeout. Everything
// is enqueued within the hook call, in bucket order, so all ranks agree with the model's own collectives about the
// order.
class StreamTransport : public C10dTransport {
 public:
  StreamTransport(BackendPtr backend, c10::Device device) : backend_(std::move(backend)), device_(device) {}

  int rank() const override { return backend_->getRank(); }
  int world_size() const override { return backend_->getSize(); }
  void all_to_all(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) override;
  int64_t gather_copies() const override { return 1; }
  void all_gather(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) override;
  void all_reduce(Channel channel, WireSpan data, Wire dtype, Lane::Completion done) override;
  void all_reduce_tensor(Channel channel, const at::Tensor& tensor, Lane::Completion done) override;
  void all_gather_tensor(Channel channel, const at::Tensor& output, const at::Tensor& input,
                         Lane::Completion done) override;

 private:
  BackendPtr backend_;
  const c10::Device device_;
};

}  // namespace fusedcomm
