#include "transport/c10d_transport.h"

#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "transport/end_soon.h"
#include "transport/wire_tensor.h"
#include "transport/without_gil.h"

namespace fusedcomm {
namespace {

at::ScalarType scalar_type(Wire wire) {
  switch (wire) {
    case Wire::kFp32:
      return at::kFloat;
    case Wire::kBf16:
      return at::kBFloat16;
    case Wire::kFp16:
      return at::kHalf;
    default:
      TORCH_CHECK(false, "fusedcomm: a wire with scales cannot be all-reduced");
  }
}

void on_end(const c10::intrusive_ptr<c10d::Work>& work, Lane::Completion done) {
  work->getFuture()->addCallback([done = std::move(done)](c10::ivalue::Future& future) {
    done(future.hasError() ? future.exception_ptr() : nullptr);
  });
}

// Hides a collective from the calling thread's profiler, which sees buckets instead (gradients/decorators.h).
// Lanes start collectives on various threads, so the profiler would see some of them.
class Unseen {
 public:
  Unseen() {
    if (at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) disabled_.emplace();
  }

 private:
  std::optional<at::DisableRecordFunctionGuard> disabled_;
};

// Makes the device the current one of a thread of our own. Otherwise NCCL's calls would make a context on the first.
c10::OptionalDeviceGuard on(c10::Device device) {
  return device.is_cpu() ? c10::OptionalDeviceGuard() : c10::OptionalDeviceGuard(device);
}

// A channel in errors: one of its ranks, whose number on the channel follows, and all of them.
struct Words {
  const char* peer;
  const char* ranks;
};

Words words_for(Channel channel) {
  if (is_local(channel)) return {"this host's local rank ", "the ranks of this host"};
  if (is_cross(channel)) {
    return {"the rank with the same local rank on host ", "the ranks with the same local rank on other hosts"};
  }
  return {"rank ", "all ranks"};
}

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

WorkPtr all_reduced(c10d::Backend& backend, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors = {tensor};
  c10d::AllreduceOptions options;
  options.asyncOp = false;
  return backend.allreduce(tensors, options);
}

WorkPtr all_gathered(c10d::Backend& backend, at::Tensor output, at::Tensor input) {
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  return backend._allgather_base(output, input, options);
}

WireSpan span_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), static_cast<int64_t>(tensor.nbytes()),
          std::make_shared<at::Tensor>(tensor)};
}

}  // namespace

C10dTransport::C10dTransport(BackendPtr scatter, BackendPtr gather) {
  TORCH_CHECK(scatter && gather, "fusedcomm: a transport needs two backends, for its scatter and its gather channel");
  TORCH_CHECK(scatter->getRank() == gather->getRank() && scatter->getSize() == gather->getSize(),
              "fusedcomm: the two backends disagree about rank or world size");
  place_ = {0, 1, scatter->getRank(), scatter->getSize()};
  backends_[static_cast<size_t>(Channel::kScatter)] = std::move(scatter);
  backends_[static_cast<size_t>(Channel::kGather)] = std::move(gather);
}

std::shared_ptr<C10dTransport> C10dTransport::with_hosts(const Place& place,
                                                         const std::array<BackendPtr, 4>& backends) const {
  TORCH_CHECK(place.ranks_per_host * place.num_hosts == world_size(), "fusedcomm: ", place.num_hosts, " hosts of ",
              place.ranks_per_host, " ranks are not ", world_size(), " ranks");
  const auto connected = copy();
  constexpr auto kFirst = static_cast<size_t>(Channel::kLocalScatter);
  for (size_t i = 0; i < backends.size(); ++i) {
    const bool local = i + kFirst < static_cast<size_t>(Channel::kCrossScatter);
    const int64_t rank = local ? place.local_rank : place.host;
    const int64_t size = local ? place.ranks_per_host : place.num_hosts;
    TORCH_CHECK(backends[i] && backends[i]->getRank() == rank && backends[i]->getSize() == size,
                "fusedcomm: the backend of channel ", i + kFirst, " must have rank ", rank, " of ", size);
    connected->backends_[i + kFirst] = backends[i];
  }
  connected->connect();
  connected->place_ = place;
  return connected;
}

std::vector<BackendPtr> C10dTransport::distinct_backends() const {
  std::vector<BackendPtr> found;
  for (const BackendPtr& backend : backends_) {
    if (backend && std::find(found.begin(), found.end(), backend) == found.end()) found.push_back(backend);
  }
  return found;
}

HostTransport::HostTransport(BackendPtr scatter, BackendPtr gather, int max_sending)
    : C10dTransport(std::move(scatter), std::move(gather)), max_sending_(max_sending) {
  connect();
}

void HostTransport::connect() {
  for (size_t i = 0; i < exchanges_.size(); ++i) {
    if (!backends()[i] || exchanges_[i]) continue;
    const auto channel = static_cast<Channel>(i);
    const int max_sending = is_local(channel) ? 0 : max_sending_;
    exchanges_[i] = std::make_shared<Exchange>(backends()[i], max_sending, words_for(channel).peer);
  }
}

// The end of a gloo backend waits for its all-reduces under way. These wait for a peer that may be stopped, until the
// group's timeout, which is half an hour by default.
HostTransport::~HostTransport() {
  struct Channels {
    std::array<BackendPtr, kNumChannels> backends;
    std::array<std::shared_ptr<Exchange>, kNumChannels> exchanges;  // declared last, so they end first
  };
  auto channels = std::make_unique<Channels>(Channels{take_backends(), std::move(exchanges_)});
  if (getpid() != process_) {
    channels.release();  // a child of fork() does not have the threads that would be joined
    return;
  }
  const int rank = channels->backends[0]->getRank(), size = channels->backends[0]->getSize();
  const WithoutGil no_gil;
  const bool ended = end_soon([channels = std::move(channels)] {
    for (auto& exchange : channels->exchanges) exchange.reset();
    for (BackendPtr& backend : channels->backends) backend.reset();
  });
  if (!ended) {
    std::fprintf(
        stderr,
        "fusedcomm: rank %d of %d closes its channels, but a collective still waits for a peer after %d s: the "
        "channels end when the peer answers or at the process group's timeout\n",
        rank, size, static_cast<int>(kEndTimeout.count()));
  }
}

void HostTransport::all_to_all(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) {
  exchange(channel).start(send, receive, std::move(done));
}

void HostTransport::all_gather(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) {
  exchange(channel).start(send, receive, std::move(done));
}

void HostTransport::all_reduce(Channel channel, WireSpan data, Wire dtype, Lane::Completion done) {
  all_reduce_tensor(channel, as_tensor(data, scalar_type(dtype)), std::move(done));
}

void HostTransport::all_reduce_tensor(Channel channel, const at::Tensor& tensor, Lane::Completion done) {
  const Unseen unseen;
  std::vector<at::Tensor> tensors = {tensor};
  on_end(backend(channel).allreduce(tensors), std::move(done));
}

// Messages of an exchange, unlike gloo's own collectives, end when the exchange is given up.
void HostTransport::all_gather_tensor(Channel channel, const at::Tensor& output, const at::Tensor& input,
                                      Lane::Completion done) {
  exchange(channel).start(span_of(input), span_of(output), std::move(done));
}

// The streams of fusedcomm's own that have carried collectives. Waiting for the device instead would spoil a CUDA graph
// that somebody captures there.
class StreamTransport::Streams {
 public:
  void add(const c10::Stream& stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
  }
  void synchronize() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const c10::Stream& stream : streams_) stream.synchronize();
  }

 private:
  std::mutex mutex_;
  std::vector<c10::Stream> streams_;
};

// A communicator of fusedcomm's own. Its end waits for its collectives. Otherwise NCCL's destructor would abort those
// that the device has not run yet: the unpack kernels behind them would read garbage, or a peer would miss its bytes.
class StreamTransport::Own {
 public:
  Own(BackendPtr backend, c10::Device device, std::shared_ptr<Streams> streams, Flag given_up)
      : backend_(std::move(backend)), device_(device), streams_(std::move(streams)), given_up_(std::move(given_up)) {}
  ~Own() {
    if (*given_up_) return;
    try {
      const c10::OptionalDeviceGuard guard = on(device_);
      streams_->synchronize();
      backend_->shutdown();
    } catch (...) {  // the backend's destructor then aborts the collectives
    }
  }

 private:
  const BackendPtr backend_;
  const c10::Device device_;
  const std::shared_ptr<Streams> streams_;
  const Flag given_up_;
};

StreamTransport::StreamTransport(const BackendPtr& backend, c10::Device device, std::shared_ptr<const Nccl> nccl)
    : C10dTransport(backend, backend), device_(device), streams_(std::make_shared<Streams>()), nccl_(std::move(nccl)) {}

// The wait is bounded, because a communicator's end may wait for ranks on the same host.
StreamTransport::~StreamTransport() {
  const WithoutGil no_gil;
  auto own = std::move(own_);
  const auto all = take_backends();  // they may end here, before the GIL is taken again
  if (own.empty() || *given_up()) return;
  end_soon([own = std::move(own), nccl = nccl_]() mutable {
    nccl->relax_capture_mode();
    own.clear();
  });
}

void StreamTransport::own_backend() {
  own_.push_back(std::make_shared<Own>(backends().front(), device_, streams_, given_up()));
}

void StreamTransport::connect() {
  for (const BackendPtr& each : distinct_backends()) {
    if (each != backends().front()) own_.push_back(std::make_shared<Own>(each, device_, streams_, given_up()));
  }
}

void StreamTransport::abort() {
  give_up();
  // NCCL's may wait for the device while it frees memory.
  std::thread([backends = distinct_backends(), device = device_] {
    const c10::OptionalDeviceGuard guard = on(device);
    for (const BackendPtr& backend : backends) {
      try {
        backend->abort();
      } catch (const std::exception& error) {  // whoever waits for the device then does so in vain, and says so
        std::fprintf(stderr, "fusedcomm: rank %d of %d cannot abort its collectives: %s\n", backend->getRank(),
                     backend->getSize(), error.what());
      }
    }
  }).detach();
}

void StreamTransport::warm_up(const StreamOf& stream_of) {
  // NCCL sends few bytes by another protocol, with buffers of its own.
  constexpr std::array<int64_t, 2> kNbytes = {4 << 10, 1 << 20};
  for (size_t i = 0; i < backends().size(); ++i) {
    if (!backends()[i]) continue;
    const auto channel = static_cast<Channel>(i);
    for (const int64_t nbytes : kNbytes) {
      TORCH_CHECK(!*given_up(), "fusedcomm: attaching was given up");
      warm_up(channel, nbytes, stream_of(channel));
    }
  }
}

void StreamTransport::warm_up(Channel channel, int64_t nbytes, const c10::Stream& stream) {
  const at::NoGradGuard no_grad;
  const c10::StreamGuard on_stream(stream);
  const bool gathers =
      channel == Channel::kGather || channel == Channel::kLocalGather || channel == Channel::kCrossGather;
  const char* what = gathers ? "all-gather" : "all-to-all";
  const int64_t size = backend(channel).getSize(), part_nbytes = round_up(ceil_div(nbytes, size), kAlignNbytes);
  const auto done = [](std::exception_ptr) {};  // these are enqueued
  try {
    const at::Tensor sent = at::zeros({size * part_nbytes}, at::TensorOptions().dtype(at::kByte).device(device_));
    const at::Tensor received = at::empty_like(sent);
    if (gathers) {
      all_gather_tensor(channel, received, sent.narrow(0, 0, part_nbytes), done);
    } else {
      all_to_all(channel, span_of(sent), span_of(received), done);
    }
    if (channel == Channel::kScatter) {
      what = "all-reduce";
      all_reduce(channel, span_of(received), Wire::kFp32, done);
    }
    stream.synchronize();
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "fusedcomm: rank ", rank(), " of ", world_size(), " cannot communicate with ",
                words_for(channel).ranks, ": the first ", what, ", of ", size * part_nbytes,
                " bytes, failed: ", error.what(),
                ". With NCCL_DEBUG=INFO in the environment NCCL says how it connects. The process group may wait for "
                "ever for what was begun: call destroy_process_group() and make it again, or end this process");
  }
}

std::optional<std::string> StreamTransport::why_through_torch() const {
  const c10::OptionalDeviceGuard guard = on(device_);
  std::string why;
  for (const BackendPtr& backend : backends()) {
    if (backend && why.empty()) why = nccl_->why_not(*backend);
  }
  return why;
}

void StreamTransport::enqueue(Channel channel, const Lane::Completion& done, const ByTorch& by_torch,
                              const ByNccl& by_nccl) const {
  if (!own_.empty() && !device_.is_cpu()) streams_->add(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  if (by_nccl && !*is_supervised_) {
    if (*given_up()) throw std::runtime_error("the collectives of this process group have been given up");
    if (const auto nccl = nccl_->communicator(backend(channel), device_)) {
      by_nccl(*nccl);
      return done(nullptr);
    }
  }
  // NCCL returns no Work for a call on the current stream. Another backend may return one; its wait() then makes this
  // stream wait.
  if (const auto work = by_torch(backend(channel))) work->wait();
  done(nullptr);
}

void StreamTransport::all_to_all(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) {
  const auto by_torch = [&](c10d::Backend& backend) {
    at::Tensor input = as_tensor(send, at::kByte, device_);
    at::Tensor output = as_tensor(receive, at::kByte, device_);
    std::vector<int64_t> equal_splits;
    c10d::AllToAllOptions options;
    options.asyncOp = false;
    return backend.alltoall_base(output, input, equal_splits, equal_splits, options);
  };
  enqueue(channel, done, by_torch, [&](const NcclCommunicator& nccl) {
    nccl.all_to_all(send.data, receive.data, send.nbytes / backend(channel).getSize());
  });
}

void StreamTransport::all_gather(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) {
  const auto by_torch = [&](c10d::Backend& backend) {
    return all_gathered(backend, as_tensor(receive, at::kByte, device_), as_tensor(send, at::kByte, device_));
  };
  enqueue(channel, done, by_torch,
          [&](const NcclCommunicator& nccl) { nccl.all_gather(send.data, receive.data, send.nbytes); });
}

void StreamTransport::all_reduce(Channel channel, WireSpan data, Wire dtype, Lane::Completion done) {
  const at::ScalarType type = scalar_type(dtype);
  const auto by_torch = [&](c10d::Backend& backend) { return all_reduced(backend, as_tensor(data, type, device_)); };
  enqueue(channel, done, by_torch,
          [&](const NcclCommunicator& nccl) { nccl.all_reduce(data.data, data.nbytes, type); });
}

void StreamTransport::all_reduce_tensor(Channel channel, const at::Tensor& tensor, Lane::Completion done) {
  enqueue(channel, done, [&](c10d::Backend& backend) { return all_reduced(backend, tensor); });
}

void StreamTransport::all_gather_tensor(Channel channel, const at::Tensor& output, const at::Tensor& input,
                                        Lane::Completion done) {
  enqueue(channel, done, [&](c10d::Backend& backend) { return all_gathered(backend, output, input); });
}

}  // namespace fusedcomm
