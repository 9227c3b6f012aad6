#include "c10d_transport.h"

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

namespace fusedcomm {
namespace {

constexpr std::chrono::seconds kPatience{10};

// A view of wire bytes that keeps them alive for as long as the backend holds it.
at::Tensor as_tensor(const WireSpan& span, at::ScalarType dtype, c10::Device device = c10::kCPU) {
  const int64_t numel = span.nbytes / static_cast<int64_t>(c10::elementSize(dtype));
  return at::for_blob(span.data, {numel})
      .deleter([owner = span.owner](void*) {})
      .options(at::TensorOptions().dtype(dtype).device(device))
      .target_device(device)
      .make_tensor();
}

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

// The end of a gloo backend waits for its collectives under way, and these for a peer that may be stopped, until the
// group's timeout: half an hour, by default.
WorkTransport::~WorkTransport() {
  auto backends = std::make_unique<std::array<BackendPtr, kNumChannels>>(take_backends());
  if (getpid() != process_) {
    backends.release();  // a child of fork() has none of the threads that would be waited for
    return;
  }
  const int rank = (*backends)[0]->getRank(), size = (*backends)[0]->getSize();
  // Those threads may be releasing a tensor that Python knows.
  std::optional<pybind11::gil_scoped_release> no_gil;
  if (Py_IsInitialized() && PyGILState_Check()) no_gil.emplace();
  const bool ended = end_soon([backends = std::move(backends)] {
    for (BackendPtr& backend : *backends) backend.reset();
  });
  if (!ended) {
    std::fprintf(
        stderr,
        "fusedcomm: rank %d of %d lets go of its channels while a collective waits for a peer, for %d s by now: "
        "they end when that answers, or with the process group's timeout\n",
        rank, size, static_cast<int>(kPatience.count()));
  }
}

void WorkTransport::all_to_all(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) {
  at::Tensor input = as_tensor(send, at::kByte);
  at::Tensor output = as_tensor(receive, at::kByte);
  std::vector<int64_t> equal_splits;
  on_end(backend(channel).alltoall_base(output, input, equal_splits, equal_splits), std::move(done));
}

void WorkTransport::all_gather_in_place(Channel channel, WireSpan all, Lane::Completion done) {
  const int rank = backend(channel).getRank(), size = backend(channel).getSize();
  if (size == 1) {
    done(nullptr);
    return;
  }
  at::Tensor bytes = as_tensor(all, at::kByte);
  const int64_t nbytes = all.nbytes / size;
  at::Tensor own = bytes.narrow(0, rank * nbytes, nbytes);
  if (size > 2) {
    all_gather_tensor(channel, bytes, own, std::move(done));
    return;
  }
  at::Tensor peers = bytes.narrow(0, (1 - rank) * nbytes, nbytes);
  std::vector<int64_t> to = {rank == 0 ? 0 : nbytes, rank == 0 ? nbytes : 0}, from = to;  // both are moved from
  on_end(backend(channel).alltoall_base(peers, own, from, to), std::move(done));
}

void WorkTransport::all_reduce(Channel channel, WireSpan data, Wire dtype, Lane::Completion done) {
  all_reduce_tensor(channel, as_tensor(data, scalar_type(dtype)), std::move(done));
}

void WorkTransport::all_reduce_tensor(Channel channel, const at::Tensor& tensor, Lane::Completion done) {
  std::vector<at::Tensor> tensors = {tensor};
  on_end(backend(channel).allreduce(tensors), std::move(done));
}

void WorkTransport::all_gather_tensor(Channel channel, const at::Tensor& output, const at::Tensor& input,
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
