#include "ddp_hook.h"

#include <ATen/ATen.h>

#include <utility>

namespace fusedcomm {
namespace {

c10::intrusive_ptr<c10::ivalue::Future> all_reduce_mean(c10d::ProcessGroup& process_group, const at::Tensor& buffer) {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> tensors = {buffer};
  tensors.front().mul_(1.0 / process_group.getSize());
  return process_group.allreduce(tensors)->getFuture();
}

}  // namespace

HookTarget::HookTarget(c10::intrusive_ptr<c10d::ProcessGroup> process_group)
    : process_group_(std::move(process_group)) {}

c10::intrusive_ptr<c10::ivalue::Future> HookTarget::run(c10d::GradBucket& bucket) {
  std::shared_ptr<GradHook> hook;
  c10::intrusive_ptr<c10d::ProcessGroup> process_group;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    hook = hook_;
    process_group = process_group_;
  }
  return hook ? hook->run(bucket) : all_reduce_mean(*process_group, bucket.getBuffer());
}

void HookTarget::set(std::shared_ptr<GradHook> hook, c10::intrusive_ptr<c10d::ProcessGroup> process_group) {
  std::lock_guard<std::mutex> lock(mutex_);
  hook_.swap(hook);  // the old one ends after the lock is released
  process_group_ = std::move(process_group);
}

}  // namespace fusedcomm
