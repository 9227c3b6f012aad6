#include "sim_backend.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "require.h"
#include "sim_accelerator.h"

namespace sim {

// A rank's share of a collective, as tensors on the CPU that alias its memory.
struct Part {
  at::Tensor send, receive;
};
using Move = void (*)(std::vector<Part>& parts);

class Group {
 public:
  explicit Group(int size) : size_(static_cast<size_t>(size)) {}

  // Called on a stream's thread. The last rank to come moves the bytes of all.
  void meet(int64_t sequence, int rank, Part part, Move move) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto& parts = meetings_[sequence];
    parts.resize(size_);
    REQUIRE(!parts[static_cast<size_t>(rank)].send.defined(), "rank %d begins collective %ld twice", rank,
            static_cast<long>(sequence));
    parts[static_cast<size_t>(rank)] = std::move(part);
    if (++num_there_[sequence] < size_) {
      changed_.wait(lock, [&] { return num_ended_ > sequence; });
      return;
    }
    for (const Part& other : parts) {
      REQUIRE(other.send.numel() == parts[0].send.numel() && other.send.dtype() == parts[0].send.dtype(),
              "collective %ld differs between ranks", static_cast<long>(sequence));
    }
    const at::NoGradGuard no_grad;
    move(parts);
    meetings_.erase(sequence);
    num_there_.erase(sequence);
    num_ended_ = sequence + 1;
    changed_.notify_all();
  }

 private:
  const size_t size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t num_ended_ = 0;
  std::map<int64_t, std::vector<Part>> meetings_;
  std::map<int64_t, size_t> num_there_;
};

std::shared_ptr<Group> make_group(int size) { return std::make_shared<Group>(size); }

namespace {

void all_reduce(std::vector<Part>& parts) {
  const at::Tensor sum = parts[0].send.clone();
  for (size_t rank = 1; rank < parts.size(); ++rank) sum.add_(parts[rank].send);
  for (Part& part : parts) part.receive.copy_(sum);
}

void all_gather(std::vector<Part>& parts) {
  std::vector<at::Tensor> sent;
  for (const Part& part : parts) sent.push_back(part.send.flatten());
  const at::Tensor all = at::cat(sent);
  for (Part& part : parts) part.receive.copy_(all);
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

class Backend : public c10d::Backend {
 public:
  Backend(std::shared_ptr<Group> group, int rank, int size, BackendOptions options)
      : c10d::Backend(rank, size), group_(std::move(group)), options_(options) {}
  const std::string getBackendName() const override { return "sim"; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    return enqueue("all-reduce", tensors[0], tensors[0], options.asyncOp, &all_reduce);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    return enqueue("all-gather", input, output, options.asyncOp, &all_gather);
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>&,
                                               std::vector<int64_t>&, const c10d::AllToAllOptions& options) override {
    return enqueue("all-to-all", input, output, options.asyncOp, &all_to_all);
  }
  // NCCL's aborts what is under way.
  void shutdown() override {
    REQUIRE(*num_under_way_ == 0, "the backend was shut down with %d collectives under way", num_under_way_->load());
  }

 private:
  c10::intrusive_ptr<c10d::Work> enqueue(const char* what, const at::Tensor& send, const at::Tensor& receive,
                                         bool is_async, Move move) {
    const int index = send.device().index();
    REQUIRE(!is_async, "\"%s\" is to run on the backend's own stream, whose memory nothing keeps", what);
    const c10::Stream caller = current_stream(index);
    if (options_.has_own_stream && !own_stream_) {
      own_stream_ = c10::impl::VirtualGuardImpl(caller.device_type()).getNewStream(caller.device(), 0);
    }
    const c10::Stream stream = own_stream_.value_or(caller);
    if (own_stream_) {
      c10::Event before(caller.device_type());
      before.record(caller);
      before.block(stream);
    }
    ++*num_under_way_;
    const auto access = [](const at::Tensor& tensor, bool writes) {
      return Access{tensor.data_ptr(), 0, 0, static_cast<int64_t>(tensor.nbytes()), writes};
    };
    const bool in_place = send.data_ptr() == receive.data_ptr() && send.numel() == receive.numel();
    launch(stream, what, {access(send, in_place), access(receive, true)},
           [group = group_, sequence = num_begun_++, rank = getRank(), part = Part{on_cpu(send), on_cpu(receive)}, move,
            num_under_way = num_under_way_] {
             group->meet(sequence, rank, part, move);
             --*num_under_way;
           });
    if (!own_stream_) return nullptr;
    c10::Event ended(caller.device_type());
    ended.record(stream);
    return c10::make_intrusive<Work>(std::move(ended));
  }

  const std::shared_ptr<Group> group_;
  const BackendOptions options_;
  const std::shared_ptr<std::atomic<int>> num_under_way_ = std::make_shared<std::atomic<int>>(0);
  std::optional<c10::Stream> own_stream_;
  int64_t num_begun_ = 0;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(std::shared_ptr<Group> group, int rank, int size,
                                               BackendOptions options) {
  return c10::make_intrusive<Backend>(std::move(group), rank, size, options);
}

}  // namespace sim
