// What gradients/ asks of a transport beside the engine's collectives.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string>

#include "transport/transport.h"

namespace fusedcomm {

class TensorTransport : public Transport {
 public:
  // The backend's name, "gloo" for example.
  virtual std::string name() const = 0;
  // Where collectives can do without torch: why they go through it; empty if they do not. None where they cannot.
  virtual std::optional<std::string> why_through_torch() const { return std::nullopt; }

  // Sums a dense tensor over the ranks of the channel, in place. Any dtype that the backend can reduce.
  virtual void all_reduce_tensor(Channel channel, const at::Tensor& tensor, Lane::Completion done) = 0;

  // Concatenates every rank's `input` (1-D, the same length on every rank) in `output` (1-D), in rank order.
  virtual void all_gather_tensor(Channel channel, const at::Tensor& output, const at::Tensor& input,
                                 Lane::Completion done) = 0;

  // Call when a collective has failed or the process is exiting. The destructor then does not wait for collectives that
  // the backend can abort.
  virtual void give_up() = 0;

  // Collectives on a device: ends those under way, on this rank alone, and all that follow. They end as if they had
  // succeeded, with undefined bytes, so the caller makes sure that no result of theirs is used. Returns at once. On the
  // CPU does nothing: give_up() and the engine's end suffice.
  virtual void abort() {}
};

}  // namespace fusedcomm
