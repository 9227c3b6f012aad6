#include "transport/c10d_transport.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <future>
#include <memory>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "transport/wire_tensor.h"

namespace fusedcomm {
namespace {

constexpr std::chrono::seconds kPatience{10};

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

// NCCL answers a call on the current stream with no Work at all; another backend may give one, which then has to be
// made to wait for on this stream.
void enqueued(const c10::intrusive_ptr<c10d::Work>& work, const Lane::Completion& done) {
  if (work) work->wait();
  done(nullptr);
}

// What a rank with some number on the channel is called.
const char* peer_on(Channel channel) {
  switch (channel) {
    case Channel::kLocalScatter:
    case Channel::kLocalGather:
      return "the rank of this host with the number ";
    case Channel::kCrossScatter:
    case Channel::kCrossGather:
      return "the rank with the same number on host ";
    default:
      return "rank ";
  }
}

// Calls `end` on a thread and waits a while. It may wait for a peer that has gone: then that is left to the thread,
// which keeps what it waits for. Whether it has ended, or there was no thread to be had.
template <typename End>
bool end_soon(End end) {
  auto ended = std::make_shared<std::promise<void>>();
  const std::future<void> has_ended = ended->get_future();
  try {
    std::thread([end = std::move(end), ended]() mutable {
      end();
      ended->set_value();
    }).detach();
  } catch (const std::system_error&) {
    return true;
  }
  return has_ended.wait_for(kPatience) != std::future_status::timeout;
}

}  // namespace

C10dTransport::C10dTransport(BackendPtr scatter, BackendPtr gather) {
  TORCH_CHECK(scatter && gather, "fusedcomm: a transport needs two backends");
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
    TORCH_CHECK(backends[i] && backends[i]->getRank() == rank && backends[i]->getSize() == size, "fusedcomm: channel ",
                i + kFirst, " must be of rank ", rank, " of ", size);
    connected->backends_[i + kFirst] = backends[i];
  }
  connected->connect();
  connected->place_ = place;
  return connected;
}

std::vector<BackendPtr> C10dTransport::own_backends() const {
  std::vector<BackendPtr> own;
  for (auto i = static_cast<size_t>(Channel::kLocalScatter); i < backends_.size(); ++i) {
    if (backends_[i] && std::find(own.begin(), own.end(), backends_[i]) == own.end()) own.push_back(backends_[i]);
  }
  return own;
}

HostTransport::HostTransport(BackendPtr scatter, BackendPtr gather, int max_sending)
    : C10dTransport(std::move(scatter), std::move(gather)), max_sending_(max_sending) {
  connect();
}

void HostTransport::connect() {
  for (size_t i = 0; i < exchanges_.size(); ++i) {
    if (!backends()[i] || exchanges_[i]) continue;
    const auto channel = static_cast<Channel>(i);
    const bool is_local = channel == Channel::kLocalScatter || channel == Channel::kLocalGather;
    exchanges_[i] = std::make_shared<Exchange>(backends()[i], is_local ? 0 : max_sending_, peer_on(channel));
  }
}

// The end of a gloo backend waits for its all-reduces under way, and these for a peer that may be stopped, until the
// group's timeout: half an hour, by default.
HostTransport::~HostTransport() {
  struct Channels {
    std::array<BackendPtr, kNumChannels> backends;
    std::array<std::shared_ptr<Exchange>, kNumChannels> exchanges;  // they end first
  };
  auto channels = std::make_unique<Channels>(Channels{take_backends(), std::move(exchanges_)});
  if (getpid() != process_) {
    channels.release();  // a child of fork() has none of the threads that would be waited for
    return;
  }
  const int rank = channels->backends[0]->getRank(), size = channels->backends[0]->getSize();
  // Those threads may be releasing a tensor that Python knows.
  std::optional<pybind11::gil_scoped_release> no_gil;
  if (Py_IsInitialized() && PyGILState_Check()) no_gil.emplace();
  const bool ended = end_soon([channels = std::move(channels)] {
    for (auto& exchange : channels->exchanges) exchange.reset();
    for (BackendPtr& backend : channels->backends) backend.reset();
  });
  if (!ended) {
    std::fprintf(
        stderr,
        "fusedcomm: rank %d of %d lets go of its channels while a collective waits for a peer, for %d s by now: "
        "they end when that answers, or with the process group's timeout\n",
        rank, size, static_cast<int>(kPatience.count()));
  }
}

void HostTransport::all_to_all(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) {
  exchange(channel).start(send, receive, std::move(done));
}

void HostTransport::all_gather(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) {
  exchange(channel).start(send, receive, std::move(done));
}

void HostTransport::all_gather_in_place(Channel channel, WireSpan all, Lane::Completion done) {
  const int64_t nbytes = all.nbytes / backend(channel).getSize();
  const WireSpan own{all.data + backend(channel).getRank() * nbytes, nbytes, all.owner};
  exchange(channel).start(own, all, std::move(done));
}

void HostTransport::all_reduce(Channel channel, WireSpan data, Wire dtype, Lane::Completion done) {
  all_reduce_tensor(channel, as_tensor(data, scalar_type(dtype)), std::move(done));
}

void HostTransport::all_reduce_tensor(Channel channel, const at::Tensor& tensor, Lane::Completion done) {
  std::vector<at::Tensor> tensors = {tensor};
  on_end(backend(channel).allreduce(tensors), std::move(done));
}

void HostTransport::all_gather_tensor(Channel channel, const at::Tensor& output, const at::Tensor& input,
                                      Lane::Completion done) {
  at::Tensor to = output, from = input;
  on_end(backend(channel)._allgather_base(to, from), std::move(done));
}

// Else NCCL's destructor would abort collectives that the device has still before it, and leave garbage for the unpack
// kernels behind them, or a peer without its bytes. But a communicator's end may wait for ranks on the same host.
StreamTransport::~StreamTransport() {
  const std::vector<BackendPtr> own = own_backends();
  if (own.empty() || given_up()) return;
  end_soon([own, device = device_] {
    try {
      if (!device.is_cpu()) c10::impl::getDeviceGuardImpl(device.type())->synchronizeDevice(device.index());
      for (const BackendPtr& backend : own) backend->shutdown();
    } catch (...) {  // then they are aborted
    }
  });
}

void StreamTransport::all_to_all(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) {
  at::Tensor input = as_tensor(send, at::kByte, device_);
  at::Tensor output = as_tensor(receive, at::kByte, device_);
  std::vector<int64_t> equal_splits;
  c10d::AllToAllOptions options;
  options.asyncOp = false;
  enqueued(backend(channel).alltoall_base(output, input, equal_splits, equal_splits, options), done);
}

void StreamTransport::all_gather(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) {
  all_gather_tensor(channel, as_tensor(receive, at::kByte, device_), as_tensor(send, at::kByte, device_),
                    std::move(done));
}

void StreamTransport::all_gather_in_place(Channel channel, WireSpan all, Lane::Completion done) {
  const at::Tensor bytes = as_tensor(all, at::kByte, device_);
  const int64_t nbytes = all.nbytes / backend(channel).getSize();
  all_gather_tensor(channel, bytes, bytes.narrow(0, backend(channel).getRank() * nbytes, nbytes), std::move(done));
}

void StreamTransport::all_reduce(Channel channel, WireSpan data, Wire dtype, Lane::Completion done) {
  all_reduce_tensor(channel, as_tensor(data, scalar_type(dtype), device_), std::move(done));
}

void StreamTransport::all_reduce_tensor(Channel channel, const at::Tensor& tensor, Lane::Completion done) {
  std::vector<at::Tensor> tensors = {tensor};
  c10d::AllreduceOptions options;
  options.asyncOp = false;
  enqueued(backend(channel).allreduce(tensors, options), done);
}

void StreamTransport::all_gather_tensor(Channel channel, const at::Tensor& output, const at::Tensor& input,
                                        Lane::Completion done) {
  at::Tensor to = output, from = input;
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  enqueued(backend(channel)._allgather_base(to, from, options), done);
}

}  // namespace fusedcomm
