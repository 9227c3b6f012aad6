// The native DDP communication hook: no Python runs between the backward pass and the wire. On CUDA each collective
// still waits for the GIL once if torch's flight recorder is on (see submit_mutex_ in engine.h).
#pragma once

#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <utility>
#include <vector>

#include "gradients/synchronizer.h"

namespace fusedcomm {

using DdpBucket = c10d::GradBucket;

// Converts DDP's bucket. The result's check uses `grad_bucket`, so the result must not outlive it. Throws c10::Error if
// a dense buffer has not as many elements as the parameters.
Bucket bucket_of(c10d::GradBucket& grad_bucket, bool is_shadow = false);
// Runs a bucket, as for a hook that is registered in Python. The future holds DDP's own buffer. is_shadow: see OfPass.
FuturePtr run_ddp_bucket(Synchronizer& hook, c10d::GradBucket& bucket, bool is_shadow = false);

// Tells when backward passes begin and when the last bucket of each is handed over. It uses no forward pre-hook,
// because under Join and under no_sync only the communication hook is called alike on every rank.
class PassObserver {
 public:
  // `device`: takes the stamps; before anything else it checks whether it can take over the bucket. `begin_pass`:
  // called before the first bucket of each pass; an exception fails the pass. With static_graph the first two passes
  // count as one, because the first does not mark its last bucket.
  PassObserver(std::shared_ptr<Device> device, std::function<void()> begin_pass)
      : device_(std::move(device)), begin_pass_(std::move(begin_pass)) {}

  // Call when DDP hands over `bucket`. Throws if the device cannot take it over.
  void hand_over(const c10d::GradBucket& bucket);
  // Returns when the last bucket of each pass since the last call was handed over: milliseconds since the first of
  // them, on the timeline of the gradients' device. Waits for the device. Call between passes.
  std::vector<double> take_pass_ends();

 private:
  const std::shared_ptr<Device> device_;
  const std::function<void()> begin_pass_;
  bool between_passes_ = true;
  std::mutex mutex_;  // guards ends_
  std::vector<StampPtr> ends_;
};

// The target of a reducer's hook. A reducer keeps its hook for life, so attaching, detaching and attaching again change
// the synchronizer behind it. Without a synchronizer it does what DDP does by default: an exact mean on DDP's own
// group.
class HookSwitch {
 public:
  explicit HookSwitch(c10::intrusive_ptr<c10d::ProcessGroup> process_group);

  c10::intrusive_ptr<c10::ivalue::Future> run(c10d::GradBucket& bucket);
  // `hook`: null for DDP's default, which uses `process_group`.
  void set(std::shared_ptr<Synchronizer> hook, c10::intrusive_ptr<c10d::ProcessGroup> process_group);
  // Sets the observer; null: none. The observer's begin_pass may call this function and set().
  void watch(std::shared_ptr<PassObserver> watch);
  // How the module is used when a rank hands over buckets outside of a backward pass.
  enum class Join { kNone, kAllRanks, kActiveRanks };  // the last two: what gradients are divided by
  using AskJoin = std::function<Join()>;
  // Asks `join` before such buckets: under Join they are those of a rank that has no inputs left.
  void ask(AskJoin join);
  // See PassObserver. Empty without an observer.
  std::vector<double> take_pass_ends();

 private:
  // Whether the buckets of this pass stand in for those of a backward pass that the rank does not have.
  bool stands_in(const c10d::GradBucket& bucket, Synchronizer& hook);

  std::mutex mutex_;
  AskJoin join_;
  bool is_shadow_ = false;
  std::shared_ptr<PassObserver> watch_;
  std::shared_ptr<Synchronizer> hook_;
  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
};

class DdpHook : public c10d::CppCommHookInterface<std::shared_ptr<HookSwitch>> {
 public:
  using CppCommHookInterface::CppCommHookInterface;
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override { return state_->run(bucket); }
};

// The autograd nodes at which DDP's reducer has its hooks, one for each parameter. torch gives a parameter another node
// when it converts the parameter in place, as Module.to(dtype) does, and the reducer hears nothing of the new one.
class ReducerNodes {
 public:
  explicit ReducerNodes(std::vector<at::Tensor> parameters);

  // The indices of parameters that had no node, so that no reducer made before has a hook there.
  std::vector<int64_t> missing() const;
  // Indices of the parameters whose node was replaced since construction.
  std::vector<int64_t> replaced() const;

 private:
  // A shared pointer of one kind or another, depending on torch's version.
  using NodePtr = decltype(torch::autograd::impl::try_get_grad_accumulator(std::declval<const at::Tensor&>()));

  const std::vector<at::Tensor> parameters_;
  std::vector<NodePtr> nodes_;
};

// Removes a DdpHook from the reducer, which then works as without a hook: it also divides again when it copies
// gradients. Call between backward passes. Returns false if the reducer has no DdpHook or this torch gives no access to
// its hook.
bool remove_hook(c10d::Reducer& reducer);

}  // namespace fusedcomm
