#include "sim_backend.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "require.h"
#include "sim_accelerator.h"

namespace sim {

// A rank's share of a collective, as tensors on the CPU that alias its memory.
struct Part {
  at::Tensor send, receive;
};
// Moves the bytes of all ranks' parts.
using Move = std::function<void(std::vector<Part>& parts)>;

// Where ranks meet for a collective, which `sequence` numbers.
class Meeting {
 public:
  virtual ~Meeting() = default;
  // Called on a stream's thread; returns when this rank's part has received.
  virtual void meet(int64_t sequence, int rank, const Part& part, const Move& move) = 0;
  // Lets this rank's collectives end at once.
  virtual void abort(int rank) = 0;
};

class Group : public Meeting {
 public:
  explicit Group(int size) : size_(static_cast<size_t>(size)) {}

  // The last rank to come moves the bytes of all.
  void meet(int64_t sequence, int rank, const Part& part, const Move& move) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (rank == loss_.rank && (sequence > loss_.at || (sequence == loss_.at && loss_.reached < 0))) return;
    const auto is_aborted = [&] { return aborted_.count(rank) != 0; };
    if (!is_aborted()) {
      auto& parts = meetings_[sequence];
      parts.resize(size_);
      REQUIRE(!parts[static_cast<size_t>(rank)].send.defined(), "rank %d begins collective %ld twice", rank,
              static_cast<long>(sequence));
      parts[static_cast<size_t>(rank)] = part;
      if (++num_there_[sequence] == size_) end(sequence, move);
      changed_.wait(lock, [&] { return has_ended(sequence, rank) || is_aborted(); });
      if (has_ended(sequence, rank)) return;
      if (const auto left = meetings_.find(sequence); left != meetings_.end()) {
        left->second[static_cast<size_t>(rank)] = {};
        --num_there_[sequence];
      }
    }
    std::memset(part.receive.data_ptr(), 0xFF, part.receive.nbytes());
  }

  void abort(int rank) override {
    std::lock_guard<std::mutex> lock(mutex_);
    aborted_.insert(rank);
    changed_.notify_all();
  }

  void lose(const Loss& loss) {
    std::lock_guard<std::mutex> lock(mutex_);
    loss_ = loss;
  }

  int64_t num_ended() {
    std::lock_guard<std::mutex> lock(mutex_);
    return num_ended_;
  }

 private:
  // Call these with mutex_ held.
  bool reaches(int64_t sequence, int rank) const {
    return loss_.rank < 0 || sequence != loss_.at || rank == loss_.rank || rank == loss_.reached;
  }
  bool has_ended(int64_t sequence, int rank) const { return num_ended_ > sequence && reaches(sequence, rank); }
  void end(int64_t sequence, const Move& move) {
    std::vector<Part>& parts = meetings_[sequence];
    const at::NoGradGuard no_grad;
    for (size_t rank = 0; rank < size_; ++rank) {
      REQUIRE(parts[rank].send.numel() == parts[0].send.numel() && parts[rank].send.dtype() == parts[0].send.dtype(),
              "collective %ld differs between ranks", static_cast<long>(sequence));
      if (!reaches(sequence, static_cast<int>(rank))) parts[rank].receive = parts[rank].receive.clone();
    }
    move(parts);
    meetings_.erase(sequence);
    num_there_.erase(sequence);
    num_ended_ = sequence + 1;
    changed_.notify_all();
  }

  const size_t size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t num_ended_ = 0;
  Loss loss_;
  std::set<int> aborted_;  // ranks
  std::map<int64_t, std::vector<Part>> meetings_;
  std::map<int64_t, size_t> num_there_;
};

std::shared_ptr<Group> Groups::get(const std::string& name, int64_t size) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& group = groups_[name];
  if (!group) group = std::make_shared<Group>(static_cast<int>(size));
  return group;
}

// Ranks in processes of their own: each gets all ranks' bytes over gloo, in the order of the collectives, and moves its
// part.
class OverGloo : public Meeting {
 public:
  explicit OverGloo(c10::intrusive_ptr<c10d::Backend> gloo) : gloo_(std::move(gloo)) {}

  void meet(int64_t sequence, int rank, const Part& part, const Move& move) override {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return num_ended_ == sequence; });
    at::Tensor send = part.send.contiguous().view(-1);
    at::Tensor all = at::empty({gloo_->getSize() * send.numel()}, send.options());
    gloo_->_allgather_base(all, send)->wait();
    std::vector<Part> parts;
    for (const at::Tensor& sent : all.view({gloo_->getSize(), -1}).unbind()) {
      const bool is_own = static_cast<int>(parts.size()) == rank;
      parts.push_back({sent.view(part.send.sizes()), is_own ? part.receive : at::empty_like(part.receive)});
    }
    move(parts);
    ++num_ended_;
    changed_.notify_all();
  }

  void abort(int) override {}  // a rank that is lost ends gloo's collectives with an error

 private:
  const c10::intrusive_ptr<c10d::Backend> gloo_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t num_ended_ = 0;
};

void lose(Group& group, const Loss& loss) { group.lose(loss); }
int64_t num_ended(Group& group) { return group.num_ended(); }

namespace {

at::Tensor reduced(const std::vector<Part>& parts, c10d::ReduceOp::RedOpType op) {
  REQUIRE(op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::MAX, "reduction %d", static_cast<int>(op));
  at::Tensor all = parts[0].send.clone();
  for (size_t rank = 1; rank < parts.size(); ++rank) {
    op == c10d::ReduceOp::SUM ? all.add_(parts[rank].send) : all.copy_(at::maximum(all, parts[rank].send));
  }
  return all;
}

Move all_reduce(c10d::ReduceOp::RedOpType op) {
  return [op](std::vector<Part>& parts) {
    const at::Tensor all = reduced(parts, op);
    for (Part& part : parts) part.receive.copy_(all);
  };
}

void all_gather(std::vector<Part>& parts) {
  std::vector<at::Tensor> sent;
  for (const Part& part : parts) sent.push_back(part.send.flatten());
  const at::Tensor all = at::cat(sent);
  for (Part& part : parts) part.receive.view({-1}).copy_(all);
}

void all_to_all(std::vector<Part>& parts) {
  const auto size = static_cast<int64_t>(parts.size());
  std::vector<at::Tensor> sent;
  for (const Part& part : parts) sent.push_back(part.send.view({size, -1}).clone());
  for (int64_t to = 0; to < size; ++to) {
    at::Tensor received = parts[static_cast<size_t>(to)].receive.view({size, -1});
    for (int64_t from = 0; from < size; ++from) received[from].copy_(sent[static_cast<size_t>(from)][to]);
  }
}

Move reduce_and_scatter(c10d::ReduceOp::RedOpType op) {
  return [op](std::vector<Part>& parts) {
    const at::Tensor all = reduced(parts, op).view({static_cast<int64_t>(parts.size()), -1});
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      parts[rank].receive.copy_(all[static_cast<int64_t>(rank)].view(parts[rank].receive.sizes()));
    }
  };
}

// A root's tensor for all ranks.
Move broadcast_from(int64_t root) {
  return [root](std::vector<Part>& parts) {
    const at::Tensor sent = parts[static_cast<size_t>(root)].send.clone();
    for (Part& part : parts) part.receive.copy_(sent);
  };
}

at::Tensor on_cpu(const at::Tensor& tensor) {
  REQUIRE(tensor.is_contiguous(), "a collective of a tensor with gaps");
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.options().device(at::kCPU));
}

class Work : public c10d::Work {
 public:
  explicit Work(c10::Event ended) : ended_(std::move(ended)) {}
  bool wait(std::chrono::milliseconds) override {
    ended_.block(current_stream(ended_.device_index()));
    return true;
  }

 private:
  c10::Event ended_;
};

}  // namespace

class Backend : public c10d::Backend {
 public:
  Backend(std::shared_ptr<Meeting> meeting, int rank, int size, BackendOptions options)
      : c10d::Backend(rank, size), meeting_(std::move(meeting)), options_(options) {}
  const std::string getBackendName() const override { return "sim"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return c10::make_intrusive<Options>("sim"); }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    return enqueue("all-reduce", tensors[0], tensors[0], options.asyncOp, all_reduce(options.reduceOp.op_));
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    return enqueue("broadcast", tensors[0], tensors[0], options.asyncOp, broadcast_from(options.rootRank));
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    return enqueue("all-gather", input, output, options.asyncOp, &all_gather);
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override {
    at::Tensor all = at::empty({getSize() * inputs[0].numel()}, inputs[0].options());
    const auto work = enqueue("all-gather", inputs[0], all, options.asyncOp, &all_gather);
    if (work) work->wait();
    for (int rank = 0; rank < getSize(); ++rank) {
      outputs[0][static_cast<size_t>(rank)].copy_(all.view({getSize(), -1})[rank].view(inputs[0].sizes()));
    }
    return work;
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                 std::vector<at::Tensor>& inputs,
                                                                 const c10d::AllgatherOptions& options) override {
    c10::intrusive_ptr<c10d::Work> last;
    for (size_t i = 0; i < inputs.size(); ++i) last = _allgather_base(outputs[i], inputs[i], options);
    return last;
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) override {
    return enqueue("reduce-scatter", input, output, options.asyncOp, reduce_and_scatter(options.reduceOp.op_));
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>&,
                                               std::vector<int64_t>&, const c10d::AllToAllOptions& options) override {
    return enqueue("all-to-all", input, output, options.asyncOp, &all_to_all);
  }
  void abort() override {
    REQUIRE(!is_enqueuing_, "rank %d aborts its collectives while one is enqueued", getRank());
    check_device("aborts its collectives");
    meeting_->abort(getRank());
  }
  // NCCL's aborts what is under way. Over gloo it is torch's destroy_process_group() that calls this.
  void shutdown() override {
    check_device("ends its backend");
    if (options_.on_shutdown) options_.on_shutdown();
    REQUIRE(*num_under_way_ == 0 || options_.takes_async, "the backend was shut down with %d collectives under way",
            num_under_way_->load());
  }

  // As torch's: only that of the current device, once its ranks are connected.
  Backend* communicator() {
    return c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1).getDevice().index() == index_ ? this : nullptr;
  }
  void enqueue_directly(Collective what, const at::Tensor& send, const at::Tensor& receive) {
    if (what == Collective::kAllToAll) enqueue_now("all-to-all", send, receive, false, &all_to_all);
    if (what == Collective::kAllGather) enqueue_now("all-gather", send, receive, false, &all_gather);
    if (what == Collective::kAllReduce) {
      enqueue_now("all-reduce", send, receive, false, all_reduce(c10d::ReduceOp::SUM));
    }
  }
  c10::Device device() const { return sim::device(index_); }

 private:
  // NCCL's calls on a thread with another current device make a context there.
  void check_device(const char* what) const {
    const int current = c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1).getDevice().index();
    REQUIRE(index_ < 0 || current == index_, "rank %d %s, and the thread's device is %d", getRank(), what, current);
  }

  c10::intrusive_ptr<c10d::Work> enqueue(const char* what, const at::Tensor& send, const at::Tensor& receive,
                                         bool is_async, const Move& move) {
    const auto work = enqueue_now(what, send, receive, is_async, move);
    // torch makes such an event for its watchdog.
    if (options_.is_nccl && !work) {
      if (!of_watchdog_) of_watchdog_.emplace(send.device().type());
      of_watchdog_->record(current_stream(send.device().index()));
    }
    return work;
  }

  c10::intrusive_ptr<c10d::Work> enqueue_now(const char* what, const at::Tensor& send, const at::Tensor& receive,
                                             bool is_async, const Move& move) {
    REQUIRE(!is_enqueuing_.exchange(true), "two threads of rank %d enqueue collectives at once", getRank());
    const std::shared_ptr<void> leaves(nullptr, [this](void*) { is_enqueuing_ = false; });
    const int index = send.device().index();
    index_ = index;
    if (options_.on_enqueue) options_.on_enqueue(getRank());
    REQUIRE(!is_async || options_.takes_async,
            "\"%s\" is to run on the backend's own stream, whose memory nothing keeps", what);
    const c10::Stream caller = current_stream(index);
    const bool on_own = is_async || options_.has_own_stream;
    if (on_own && !own_stream_) {
      own_stream_ = c10::impl::VirtualGuardImpl(caller.device_type()).getNewStream(caller.device(), 0);
    }
    const c10::Stream stream = on_own ? *own_stream_ : caller;
    if (is_async) {
      for (const at::Tensor& tensor : {send, receive}) record_use(tensor.data_ptr(), stream);
    }
    if (on_own) {
      c10::Event before(caller.device_type());
      before.record(caller);
      before.block(stream);
    }
    ++*num_under_way_;
    const auto access = [](const at::Tensor& tensor, bool writes) {
      return Access{tensor.data_ptr(), static_cast<int64_t>(tensor.nbytes()), writes};
    };
    const bool in_place = send.data_ptr() == receive.data_ptr() && send.numel() == receive.numel();
    launch(stream, what, {access(send, in_place), access(receive, true)},
           [meeting = meeting_, sequence = num_begun_++, rank = getRank(), part = Part{on_cpu(send), on_cpu(receive)},
            move, num_under_way = num_under_way_, pause = std::chrono::milliseconds(options_.pause_ms)] {
             meeting->meet(sequence, rank, part, move);
             std::this_thread::sleep_for(pause);
             --*num_under_way;
           });
    if (!on_own) return nullptr;
    c10::Event ended(caller.device_type());
    ended.record(stream);
    return c10::make_intrusive<Work>(std::move(ended));
  }

  const std::shared_ptr<Meeting> meeting_;
  const BackendOptions options_;
  const std::shared_ptr<std::atomic<int>> num_under_way_ = std::make_shared<std::atomic<int>>(0);
  std::optional<c10::Stream> own_stream_;
  std::optional<c10::Event> of_watchdog_;
  int64_t num_begun_ = 0;
  std::atomic<bool> is_enqueuing_{false};
  std::atomic<int> index_{-1};  // of the device; none before the first collective
};

void enqueue(Backend& communicator, Collective what, const at::Tensor& send, const at::Tensor& receive,
             const c10::Stream& stream) {
  const c10::StreamGuard on_stream(stream);
  communicator.enqueue_directly(what, send, receive);
}
int size_of(const Backend& communicator) { return communicator.getSize(); }
c10::Device device_of(const Backend& communicator) { return communicator.device(); }

}  // namespace sim

namespace c10d {

// By its name and by the symbol of its function the product knows torch's class.
class ProcessGroupNCCL : public sim::Backend {
 public:
  using sim::Backend::Backend;
  int64_t getCommPtr();
};

int64_t ProcessGroupNCCL::getCommPtr() { return reinterpret_cast<int64_t>(communicator()); }

}  // namespace c10d

namespace sim {
namespace {

c10::intrusive_ptr<c10d::Backend> make(std::shared_ptr<Meeting> meeting, int rank, int size, BackendOptions options) {
  options.is_nccl = options.is_nccl && !options.has_own_stream;
  if (!options.is_nccl) return c10::make_intrusive<Backend>(std::move(meeting), rank, size, std::move(options));
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(std::move(meeting), rank, size, std::move(options));
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(std::shared_ptr<Group> group, int rank, int size,
                                               BackendOptions options) {
  return make(std::move(group), rank, size, std::move(options));
}

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Backend>& gloo, BackendOptions options) {
  return make(std::make_shared<OverGloo>(gloo), gloo->getRank(), gloo->getSize(), std::move(options));
}

}  // namespace sim
