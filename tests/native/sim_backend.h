// A c10d backend on the simulated accelerator. Ranks are threads, or processes over gloo. Like NCCL's, a collective
// runs on the current stream and waits there for the other ranks, unless the caller asks for one that is asynchronous.
// After abort() those of its rank end at once, as if they had succeeded, with bytes of ones. A backend that returns no
// Work is of torch's class for NCCL, and has a communicator.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "transport/nccl.h"

namespace sim {

// Where the ranks of a group meet.
class Group;

// The groups of one run, by name.
class Groups {
 public:
  std::shared_ptr<Group> get(const std::string& name, int64_t size);

 private:
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Group>> groups_;
};

// A rank's process that is lost. Collectives of the group are numbered from 0. It takes no part in those after number
// `at`. That one ends for the rank `reached` alone; -1: for nobody, as the lost rank takes no part in it, either. All
// other ranks wait until they abort.
struct Loss {
  int rank = -1;
  int64_t at = -1;
  int reached = -1;
};
void lose(Group& group, const Loss& loss);
// The number of collectives that have ended.
int64_t num_ended(Group& group);

struct BackendOptions {
  // Every collective runs on a stream of the backend's own and returns a Work.
  bool has_own_stream = false;
  // Collectives that the caller asks for as asynchronous do so; otherwise the test fails.
  bool takes_async = false;
  // Called by every collective while it is enqueued, with its rank; may be empty.
  std::function<void(int)> on_enqueue;
  // Called by shutdown(); may be empty.
  std::function<void()> on_shutdown;
  // What each collective takes on its stream, beside its meeting.
  int64_t pause_ms = 0;
  bool is_nccl = true;  // whether its class is torch's for NCCL; not with has_own_stream
};
c10::intrusive_ptr<c10d::Backend> make_backend(std::shared_ptr<Group> group, int rank, int size,
                                               BackendOptions options);
// For ranks in processes of their own, whose bytes go over this gloo backend.
c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Backend>& gloo, BackendOptions options);

// A stand-in for NCCL has functions with its symbols. A communicator is the backend, from its first collective on.
class Backend;
enum class Collective { kAllToAll, kAllGather, kAllReduce };
int size_of(const Backend& communicator);
c10::Device device_of(const Backend& communicator);
void enqueue(Backend& communicator, Collective what, const at::Tensor& send, const at::Tensor& receive,
             const c10::Stream& stream);

// The product's object over these functions, without the one of the symbol `hidden`. through_torch: why it calls none.
std::shared_ptr<const fusedcomm::Nccl> nccl(const std::string& hidden = "", const std::string& through_torch = "");
// The calls for communicators of this device since this was asked last: "ncclAllGather 2 ncclAlltoAll 1 ".
std::string take_nccl_calls(int index);
// From now on `function` returns `result`, and enqueues nothing. An empty name ends this.
void fail_nccl(const std::string& function, int result = 0);

}  // namespace sim
