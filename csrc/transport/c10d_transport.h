// Transports over c10d backends: whatever the user's process group runs on.
#pragma once

#include <ATen/ATen.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "transport/exchange.h"

namespace fusedcomm {

// What both have: a backend for each channel, and collectives on whole tensors, for buckets that the codec does not
// carry.
class C10dTransport : public Transport {
 public:
  // Of all ranks.
  C10dTransport(BackendPtr scatter, BackendPtr gather);

  // The same channels, and those of sums on two levels: backends for kLocalScatter, kLocalGather, kCrossScatter,
  // kCrossGather.
  std::shared_ptr<C10dTransport> with_hosts(const Place& place, const std::array<BackendPtr, 4>& backends) const;

  int rank() const override { return backend(Channel::kScatter).getRank(); }
  int world_size() const override { return backend(Channel::kScatter).getSize(); }
  Place place() const override { return place_; }

  // The sum, in place, of a dense tensor of any dtype that the backend can reduce.
  virtual void all_reduce_tensor(Channel channel, const at::Tensor& tensor, Lane::Completion done) = 0;

  // Every rank's `input` (1-D, as long everywhere), one after the other in `output` (1-D).
  virtual void all_gather_tensor(Channel channel, const at::Tensor& output, const at::Tensor& input,
                                 Lane::Completion done) = 0;

  // A collective has failed, or the process is exiting: nothing that is under way will be waited for, where that can be
  // aborted.
  void give_up() { *given_up_ = true; }

 protected:
  virtual std::shared_ptr<C10dTransport> copy() const = 0;
  c10d::Backend& backend(Channel channel) const { return *backends_[static_cast<size_t>(channel)]; }
  const std::array<BackendPtr, kNumChannels>& backends() const { return backends_; }
  // Backends have been added.
  virtual void connect() {}
  bool given_up() const { return *given_up_; }
  // Of sums on two levels, which nobody else uses; each once.
  std::vector<BackendPtr> own_backends() const;
  // This transport's hold on its backends, in the order of the channels.
  std::array<BackendPtr, kNumChannels> take_backends() { return std::move(backends_); }

 private:
  // By channel. Every rank lets go of them in the same order: a backend's end waits for its collectives under way, and
  // these for a peer that may be gone.
  std::array<BackendPtr, kNumChannels> backends_;
  Place place_;
  std::shared_ptr<std::atomic<bool>> given_up_ = std::make_shared<std::atomic<bool>>(false);
};

// For backends whose sends, receives and all-reduces complete by themselves (gloo), over backends of our own, one for
// each channel: collectives are started by our lanes, later than the hook call, and must not interleave with the
// model's own.
class HostTransport : public C10dTransport {
 public:
  // `max_sending`: as of an Exchange, on the channels that lead to other hosts, too.
  HostTransport(BackendPtr scatter, BackendPtr gather, int max_sending);
  HostTransport(const HostTransport&) = default;
  ~HostTransport() override;

  void all_to_all(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) override;
  // Not gloo's all-gather, which allocates and copies at every call.
  void all_gather(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) override;
  void all_gather_in_place(Channel channel, WireSpan all, Lane::Completion done) override;
  void all_reduce(Channel channel, WireSpan data, Wire dtype, Lane::Completion done) override;
  void all_reduce_tensor(Channel channel, const at::Tensor& tensor, Lane::Completion done) override;
  void all_gather_tensor(Channel channel, const at::Tensor& output, const at::Tensor& input,
                         Lane::Completion done) override;

 private:
  std::shared_ptr<C10dTransport> copy() const override { return std::make_shared<HostTransport>(*this); }
  void connect() override;
  Exchange& exchange(Channel channel) const { return *exchanges_[static_cast<size_t>(channel)]; }

  const int max_sending_;
  std::array<std::shared_ptr<Exchange>, kNumChannels> exchanges_;
  const pid_t process_ = getpid();
};

// For backends that enqueue on the current stream (NCCL): the group DDP uses, with its watchdog and timeout. Everything
// is enqueued within the hook call, in bucket order, so all ranks agree with the model's own collectives about the
// order.
class StreamTransport : public C10dTransport {
 public:
  StreamTransport(const BackendPtr& backend, c10::Device device) : C10dTransport(backend, backend), device_(device) {}
  StreamTransport(const StreamTransport&) = default;
  ~StreamTransport() override;

  void all_to_all(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) override;
  void all_gather(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) override;
  void all_gather_in_place(Channel channel, WireSpan all, Lane::Completion done) override;
  void all_reduce(Channel channel, WireSpan data, Wire dtype, Lane::Completion done) override;
  void all_reduce_tensor(Channel channel, const at::Tensor& tensor, Lane::Completion done) override;
  void all_gather_tensor(Channel channel, const at::Tensor& output, const at::Tensor& input,
                         Lane::Completion done) override;

 private:
  std::shared_ptr<C10dTransport> copy() const override { return std::make_shared<StreamTransport>(*this); }

  const c10::Device device_;
};

}  // namespace fusedcomm
