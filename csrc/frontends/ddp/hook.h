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

#include "gradients/pass_observer.h"
#include "gradients/synchronizer.h"

namespace fusedcomm {

using DdpBucket = c10d::GradBucket;

// Converts DDP's bucket. The result's check uses `grad_bucket`, so the result must not outlive it. Throws c10::Error if
// a dense buffer has not as many elements as the parameters.
Bucket bucket_of(c10d::GradBucket& grad_bucket, bool is_shadow = false);
// Runs a bucket, as for a hook that is registered in Python. The future holds DDP's own buffer. is_shadow: see OfPass.
FuturePtr run_ddp_bucket(Synchronizer& hook, c10d::GradBucket& bucket, bool is_shadow = false);

// The target of a reducer's hook. A reducer keeps its hook for life, so attaching, detaching and attaching again change
// the synchronizer behind it. Without a synchronizer it does what DDP does by default: an exact mean on DDP's own
// group.
class HookSwitch {
 public:
  explicit HookSwitch(c10::intrusive_ptr<c10d::ProcessGroup> process_group);

  c10::intrusive_ptr<c10::ivalue::Future> run(c10d::GradBucket& bucket);
  // `hook`: null for DDP's default, which uses `process_group`.
  void set(std::shared_ptr<Synchronizer> hook, c10::intrusive_ptr<c10d::ProcessGroup> process_group);
  // A pass begins before its first bucket, where set() may be called, and ends when the last one is handed over. With
  // static_graph the first two passes count as one, because the first does not mark its last bucket. No forward
  // pre-hook tells of passes, because under Join and under no_sync only the communication hook is called alike on every
  // rank.
  PassObserver& observer() { return observer_; }
  // How the module is used when a rank hands over buckets outside of a backward pass.
  enum class Join { kNone, kAllRanks, kActiveRanks };  // the last two: what gradients are divided by
  using AskJoin = std::function<Join()>;
  // Asks `join` before such buckets: under Join they are those of a rank that has no inputs left.
  void ask(AskJoin join);

 private:
  // Whether the buckets of this pass stand in for those of a backward pass that the rank does not have.
  bool stands_in(const c10d::GradBucket& bucket, Synchronizer& hook);

  PassObserver observer_;
  std::mutex mutex_;  // guards the members below
  AskJoin join_;
  bool is_shadow_ = false;
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
