// Transports over c10d backends, which is what the user's process group runs on.
#pragma once

#include <ATen/ATen.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "transport/exchange.h"
#include "transport/nccl.h"
#include "transport/tensor_transport.h"

namespace fusedcomm {

// The common base: a backend for each channel.
class C10dTransport : public TensorTransport {
 public:
  // Backends of all ranks, for kScatter and kGather. Throws c10::Error if they differ in rank or world size.
  C10dTransport(BackendPtr scatter, BackendPtr gather);

  // Returns a transport with the same channels and those of sums on two levels. `backends`: for kLocalScatter,
  // kLocalGather, kCrossScatter and kCrossGather, in this order. Throws c10::Error if they do not fit `place`.
  std::shared_ptr<C10dTransport> with_hosts(const Place& place, const std::array<BackendPtr, 4>& backends) const;

  int rank() const override { return backend(Channel::kScatter).getRank(); }
  int world_size() const override { return backend(Channel::kScatter).getSize(); }
  Place place() const override { return place_; }
  std::string name() const override { return backend(Channel::kScatter).getBackendName(); }
  void give_up() override { *given_up_ = true; }
  // The stream that carries a channel's collectives.
  using StreamOf = std::function<c10::Stream(Channel)>;
  // Runs what each channel carries once with few bytes and once with many, and waits until it has ended. Where streams
  // carry collectives, the first ones connect peers, allocate buffers and load kernels, which would otherwise happen in
  // the first backward pass. A collective call. Throws c10::Error that names the channel's ranks; after give_up(), at
  // the next collective, so that a thread that is left behind enqueues no more.
  virtual void warm_up(const StreamOf&) {}
  // Call it if nobody else uses the backend of kScatter and kGather: it ends with this transport and its copies.
  virtual void own_backend() {}

 protected:
  virtual std::shared_ptr<C10dTransport> copy() const = 0;
  c10d::Backend& backend(Channel channel) const { return *backends_[static_cast<size_t>(channel)]; }
  const std::array<BackendPtr, kNumChannels>& backends() const { return backends_; }
  // Called when backends have been added.
  virtual void connect() {}
  using Flag = std::shared_ptr<std::atomic<bool>>;
  const Flag& given_up() const { return given_up_; }
  // Each backend once.
  std::vector<BackendPtr> distinct_backends() const;
  // Moves the backends out of this transport, in the order of the channels.
  std::array<BackendPtr, kNumChannels> take_backends() { return std::move(backends_); }

 private:
  // One backend for each channel. Every rank releases them in the same order, because a backend's end waits for its
  // collectives under way, and those wait for a peer.
  std::array<BackendPtr, kNumChannels> backends_;
  Place place_;
  Flag given_up_ = std::make_shared<std::atomic<bool>>(false);  // shared by copies
};

// For backends whose sends, receives and all-reduces complete by themselves (gloo). It uses backends of our own, one
// for each channel: our lanes start collectives later than the hook call, and these must not interleave with the
// model's own.
class HostTransport : public C10dTransport {
 public:
  // `max_sending`: see Exchange; for all channels except the local ones, which have no limit.
  HostTransport(BackendPtr scatter, BackendPtr gather, int max_sending);
  HostTransport(const HostTransport&) = default;
  ~HostTransport() override;

  void all_to_all(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) override;
  // Not gloo's all-gather, which allocates and copies at every call.
  void all_gather(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) override;
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
  const pid_t process_ = getpid();  // the process that has the backends' threads
};

// For backends that enqueue on the current stream (NCCL). It uses DDP's own group, with its watchdog and timeout.
// Everything is enqueued within the hook call, in bucket order, so all ranks enqueue our collectives and the model's
// own in the same order.
//
// The threads that call it never do at once: a backward pass's, while the main thread waits for it; the main thread;
// and at attach the one that connects, for which the main thread waits, too. Watches and control threads enqueue
// nothing. Merges, which come beside the model's collectives, have communicators of their own.
//
// The engine's collectives that need not be supervised are NCCL's own functions, where these can be called: the
// watchdog sees a hang in them at the next supervised one, which waits for them on the stream.
class StreamTransport : public C10dTransport {
 public:
  StreamTransport(const BackendPtr& backend, c10::Device device, std::shared_ptr<const Nccl> nccl);
  StreamTransport(const StreamTransport&) = default;
  ~StreamTransport() override;

  void abort() override;
  void warm_up(const StreamOf& stream_of) override;
  void own_backend() override;
  std::optional<std::string> why_through_torch() const override;
  void supervise(bool supervised) override { *is_supervised_ = supervised; }

  void all_to_all(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) override;
  void all_gather(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) override;
  void all_reduce(Channel channel, WireSpan data, Wire dtype, Lane::Completion done) override;
  void all_reduce_tensor(Channel channel, const at::Tensor& tensor, Lane::Completion done) override;
  void all_gather_tensor(Channel channel, const at::Tensor& output, const at::Tensor& input,
                         Lane::Completion done) override;

 private:
  class Own;
  class Streams;

  std::shared_ptr<C10dTransport> copy() const override { return std::make_shared<StreamTransport>(*this); }
  void connect() override;
  // nbytes: of what a rank sends, approximately.
  void warm_up(Channel channel, int64_t nbytes, const c10::Stream& stream);
  using ByTorch = std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)>;
  using ByNccl = std::function<void(const NcclCommunicator&)>;
  // Every collective is enqueued here, on the current stream, which it notes. by_nccl: takes the channel's communicator
  // if that can do without torch and need not be supervised; empty if only torch can enqueue it.
  void enqueue(Channel channel, const Lane::Completion& done, const ByTorch& by_torch,
               const ByNccl& by_nccl = nullptr) const;

  const c10::Device device_;
  const std::shared_ptr<Streams> streams_;  // those with collectives; shared by copies
  std::vector<std::shared_ptr<Own>> own_;   // shared by copies: each backend ends with the last of them
  const std::shared_ptr<const Nccl> nccl_;
  const std::shared_ptr<std::atomic<bool>> is_supervised_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace fusedcomm
