// The native DDP communication hook: no Python and no GIL between the backward pass and the wire.
#pragma once

#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "grad_hook.h"

namespace fusedcomm {

// What a reducer's hook calls. A reducer keeps its hook for life, so attaching, detaching and attaching again change
// the target behind it. Without a target it does what DDP does by default: an exact mean on DDP's own group.
class HookTarget {
 public:
  explicit HookTarget(c10::intrusive_ptr<c10d::ProcessGroup> process_group);

  c10::intrusive_ptr<c10::ivalue::Future> run(c10d::GradBucket& bucket);
  void set(std::shared_ptr<GradHook> hook, c10::intrusive_ptr<c10d::ProcessGroup> process_group);

 private:
  std::mutex mutex_;
  std::shared_ptr<GradHook> hook_;
  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
};

class DdpHook : public c10d::CppCommHookInterface<std::shared_ptr<HookTarget>> {
 public:
  using CppCommHookInterface::CppCommHookInterface;
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override { return state_->run(bucket); }
};

}  // namespace fusedcomm
