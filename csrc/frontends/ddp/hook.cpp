#include "frontends/ddp/hook.h"

#include <ATen/ATen.h>
#include <ATen/ThreadLocalPythonObjects.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "engine/stage.h"

namespace fusedcomm {

#ifdef FUSEDCOMM_REDUCER_HAS_COMM_HOOK  // see setup.py
// A reducer has no function that removes a hook, and its member is private. The explicit instantiation of a template
// may name private members, which gives access to it.
using HookMember = std::unique_ptr<c10d::CommHookInterface> c10d::Reducer::*;
std::unique_ptr<c10d::CommHookInterface>& hook_of(c10d::Reducer& reducer);
template <HookMember member>
struct HookAccess {
  friend std::unique_ptr<c10d::CommHookInterface>& hook_of(c10d::Reducer& reducer) { return reducer.*member; }
};
template struct HookAccess<&c10d::Reducer::comm_hook_>;
#endif

namespace {

// Hides Python's part of the thread-local state. A gloo collective keeps its caller's thread-local state until a gloo
// thread releases it. To release Python's part the thread asks for the GIL, which aborts a process that is just ending.
class NoPythonObjects {
 public:
  NoPythonObjects() : before_(at::impl::ThreadLocalPythonObjects::get_state()) {
    at::impl::ThreadLocalPythonObjects::set_state({});
  }
  ~NoPythonObjects() { at::impl::ThreadLocalPythonObjects::set_state(std::move(before_)); }
  NoPythonObjects(const NoPythonObjects&) = delete;
  NoPythonObjects& operator=(const NoPythonObjects&) = delete;

 private:
  at::impl::ThreadLocalPythonObjects before_;
};

// Throws c10::Error if the gradients do not have the shapes of the bucket's parameters.
void check_gradients(const c10d::GradBucket& bucket) {
  const std::vector<at::Tensor> parameters = bucket.getParameters();
  // With complex parameters a bucket's gradients do not have the shapes of what the bucket holds.
  if (std::any_of(parameters.begin(), parameters.end(), [](const at::Tensor& p) { return p.is_complex(); })) return;
  const std::vector<at::Tensor> gradients = bucket.getGradients();
  for (size_t i = 0; i < std::min(gradients.size(), parameters.size()); ++i) {
    TORCH_CHECK(gradients[i].sizes() == parameters[i].sizes(), "fusedcomm: ", bucket_name(bucket.getIndex()),
                " has a gradient of shape ", gradients[i].sizes(), " for a parameter of shape ", parameters[i].sizes(),
                ": torch has rebuilt its buckets but still lists their former parameters, as after "
                "_update_process_group with gradients in another order. Make a new DDP module instead");
  }
}

c10::intrusive_ptr<c10::ivalue::Future> all_reduce_mean(c10d::ProcessGroup& process_group, const at::Tensor& buffer) {
  const at::NoGradGuard no_grad;
  const NoPythonObjects no_python_objects;
  std::vector<at::Tensor> tensors = {buffer};
  tensors.front().mul_(1.0 / process_group.getSize());
  return process_group.allreduce(tensors)->getFuture();
}

}  // namespace

Bucket bucket_of(c10d::GradBucket& grad_bucket, bool is_shadow) {
  std::vector<at::Tensor> parameters = grad_bucket.getParameters();
  std::vector<SlicePlace> places;
  places.reserve(parameters.size());
  int64_t numel = 0;
  for (const at::Tensor& parameter : parameters) {
    // A complex bucket holds real numbers, two for each element.
    places.push_back({numel, parameter.numel() * (parameter.is_complex() ? 2 : 1)});
    numel += places.back().numel;
  }
  const at::Tensor& buffer = grad_bucket.getBuffer();
  if (!buffer.is_sparse() && buffer.numel() != numel) {
    check_gradients(grad_bucket);
    TORCH_CHECK(false, "fusedcomm: ", bucket_name(grad_bucket.getIndex()), " holds ", buffer.numel(),
                " elements, but its parameters have ", numel,
                ": this layout of buckets is not supported. Please report it with your DDP options.");
  }
  return {grad_bucket.getIndex(), grad_bucket.isLast(), std::move(parameters),
          std::make_shared<const Gradients>(buffer, std::move(places)),
          OfPass{[&grad_bucket] { check_gradients(grad_bucket); }, is_shadow}};
}

FuturePtr run_ddp_bucket(Synchronizer& hook, c10d::GradBucket& bucket, bool is_shadow) {
  const Bucket gradients = bucket_of(bucket, is_shadow);
  if (gradients.index == 0) hook.begin_pass();
  FuturePtr future = hook.run(gradients);
  // On a GPU a fault that is known by now is raised here: calls that DDP makes before it reads the future fail with the
  // same fault, and their text names no bucket.
  if (!future->devices().empty() && future->hasError()) std::rethrow_exception(future->exception_ptr());
  return future;
}

HookSwitch::HookSwitch(c10::intrusive_ptr<c10d::ProcessGroup> process_group)
    : process_group_(std::move(process_group)) {}

c10::intrusive_ptr<c10::ivalue::Future> HookSwitch::run(c10d::GradBucket& bucket) {
  if (!observer_.in_pass()) observer_.begin();  // may change hook_
  if (bucket.isLast()) observer_.end();
  std::unique_lock<std::mutex> lock(mutex_);
  const std::shared_ptr<Synchronizer> hook = hook_;
  const c10::intrusive_ptr<c10d::ProcessGroup> process_group = process_group_;
  lock.unlock();
  auto future = hook ? run_ddp_bucket(*hook, bucket, stands_in(bucket, *hook))
                     : all_reduce_mean(*process_group, bucket.getBuffer());
  return future;
}

void HookSwitch::set(std::shared_ptr<Synchronizer> hook, c10::intrusive_ptr<c10d::ProcessGroup> process_group) {
  std::lock_guard<std::mutex> lock(mutex_);
  hook_.swap(hook);  // the old hook ends after the lock is released
  process_group_ = std::move(process_group);
}

bool HookSwitch::stands_in(const c10d::GradBucket& bucket, Synchronizer& hook) {
  if (torch::autograd::get_current_graph_task_id() != -1) return false;
  std::unique_lock<std::mutex> lock(mutex_);
  if (bucket.getIndex() != 0 || !join_) return is_shadow_;
  const AskJoin ask = join_;
  lock.unlock();
  const Join join = ask();
  if (join != Join::kNone) hook.weights().count_active(join == Join::kActiveRanks);
  lock.lock();
  return is_shadow_ = join != Join::kNone;
}

void HookSwitch::ask(AskJoin join) {
  std::lock_guard<std::mutex> lock(mutex_);
  join_.swap(join);
}

ReducerNodes::ReducerNodes(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
  nodes_.reserve(parameters_.size());
  for (const at::Tensor& parameter : parameters_) {
    nodes_.push_back(torch::autograd::impl::try_get_grad_accumulator(parameter));
  }
}

std::vector<int64_t> ReducerNodes::missing() const {
  std::vector<int64_t> indices;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (!nodes_[i]) indices.push_back(static_cast<int64_t>(i));
  }
  return indices;
}

std::vector<int64_t> ReducerNodes::replaced() const {
  std::vector<int64_t> indices;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i] && torch::autograd::impl::try_get_grad_accumulator(parameters_[i]) != nodes_[i]) {
      indices.push_back(static_cast<int64_t>(i));
    }
  }
  return indices;
}

bool remove_hook(c10d::Reducer& reducer) {
#ifdef FUSEDCOMM_REDUCER_HAS_COMM_HOOK
  auto& hook = hook_of(reducer);
  if (dynamic_cast<DdpHook*>(hook.get()) == nullptr) return false;
  hook.reset();
  return true;
#else
  return false;
#endif
}

}  // namespace fusedcomm
