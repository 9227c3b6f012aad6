// The native DDP communication hook: no Python between the backward pass and the wire. On CUDA the GIL is waited for
// nevertheless, once a collective, where torch's flight recorder is on (see submit_mutex_ in engine.h).
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <vector>

#include "gradients/synchroniser.h"

namespace fusedcomm {

using DdpBucket = c10d::GradBucket;

// The neutral bucket of DDP's. It calls `grad_bucket` when it is checked, so it must not outlive that.
Bucket bucket_of(c10d::GradBucket& grad_bucket);
// What a hook that is registered in Python calls; the future holds DDP's own buffer.
FuturePtr run_ddp_bucket(GradHook& hook, c10d::GradBucket& bucket);

// A bucket that passed while somebody watched; times since the first of them, on the timeline of the gradients.
struct SeenBucket {
  int64_t nbytes;
  bool is_last;  // of its backward pass
  double handed_ms;
  double done_ms;  // NaN if it failed
};

// Tells when backward passes begin, and when each bucket came and was done. Not a forward pre-hook: only the
// communication hook is called on every rank alike, under Join and under no_sync.
class PassWatch : public std::enable_shared_from_this<PassWatch> {
 public:
  // device: whose time it is, and which says first whether it can take over a bucket. begin_pass: called before the
  // first bucket of each pass; what it throws fails the pass. With static_graph the first two passes are one, since the
  // first does not say which bucket is its last.
  PassWatch(std::shared_ptr<Device> device, std::function<void()> begin_pass)
      : device_(std::move(device)), begin_pass_(std::move(begin_pass)) {}

  struct Seen {
    int64_t nbytes;
    bool is_last;
    StampPtr handed, done;
  };
  std::shared_ptr<Seen> hand_over(c10d::GradBucket& bucket);
  void follow(const std::shared_ptr<Seen>& seen, c10::ivalue::Future& future);

  // Those since the last call, oldest first; waits for the device. Between passes.
  std::vector<SeenBucket> take();

 private:
  const std::shared_ptr<Device> device_;
  const std::function<void()> begin_pass_;
  bool between_passes_ = true;
  std::mutex mutex_;  // what follows, and `done` of what has been seen
  StampPtr origin_;
  std::vector<std::shared_ptr<Seen>> seen_;
};

// What a reducer's hook calls. A reducer keeps its hook for life, so attaching, detaching and attaching again change
// the target behind it. Without a target it does what DDP does by default: an exact mean on DDP's own group.
class HookTarget {
 public:
  explicit HookTarget(c10::intrusive_ptr<c10d::ProcessGroup> process_group);

  c10::intrusive_ptr<c10::ivalue::Future> run(c10d::GradBucket& bucket);
  void set(std::shared_ptr<GradHook> hook, c10::intrusive_ptr<c10d::ProcessGroup> process_group);
  // Null: nobody watches any more. The watch's begin_pass may call this and set().
  void watch(std::shared_ptr<PassWatch> watch);
  std::vector<SeenBucket> take_seen();

 private:
  std::mutex mutex_;
  std::shared_ptr<PassWatch> watch_;
  std::shared_ptr<GradHook> hook_;
  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
};

class DdpHook : public c10d::CppCommHookInterface<std::shared_ptr<HookTarget>> {
 public:
  using CppCommHookInterface::CppCommHookInterface;
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override { return state_->run(bucket); }
};

// Takes a DdpHook away from the reducer, so that this does what it does without a hook, division in its own copies
// included. Between backward passes. False if it has none of ours, or if this torch does not let go of hooks.
bool take_ddp_hook(c10d::Reducer& reducer);

}  // namespace fusedcomm
