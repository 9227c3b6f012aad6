// What Python changes and asks between backward passes.
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "frontends/reducer/reducer.h"

namespace fusedcomm {

bool GradReducer::is_on() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_synchronizing();
}

void GradReducer::turn(bool on) {
  std::lock_guard<std::mutex> lock(mutex_);
  is_on_ = on;
}

void GradReducer::turn_on_once() {
  std::lock_guard<std::mutex> lock(mutex_);
  is_on_ = is_on_once_ = true;
}

void GradReducer::synchronize_passes_of(const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad() || output.is_leaf()) continue;  // a leaf would keep the hook
    output.register_hook([weak = weak_from_this()](const at::Tensor&) {
      if (const auto reducer = weak.lock()) reducer->synchronize_task();
    });
  }
}

void GradReducer::synchronize_task() {
  std::lock_guard<std::mutex> lock(mutex_);
  const int task = torch::autograd::get_current_graph_task_id();
  auto& tasks = synchronized_tasks_;
  if (!accumulators_ || std::find(tasks.begin(), tasks.end(), task) != tasks.end()) return;
  tasks.push_back(task);
  at_task_end([task](GradReducer& reducer, bool) {
    std::lock_guard<std::mutex> lock(reducer.mutex_);
    auto& left = reducer.synchronized_tasks_;
    left.erase(std::remove(left.begin(), left.end(), task), left.end());
  });
}

void GradReducer::refuse_local_passes(bool refuse) {
  std::lock_guard<std::mutex> lock(mutex_);
  refuses_local_passes_ = refuse;
}

bool GradReducer::waits_for_pass() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_on_once_;
}

std::string GradReducer::lost_parameter() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return accumulators_ && failure_.empty() ? lost_text() : "";
}

void GradReducer::refuse(const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(failure_.empty(), failure_);
  fail(c10::str(rank_text(), why));
}

void GradReducer::detach() {
  observer_.unwatch();
  std::lock_guard<std::mutex> lock(mutex_);
  is_on_ = in_pass_ = false;
  accumulators_.reset();
}

void GradReducer::set_synchronizer(std::shared_ptr<Synchronizer> synchronizer) {
  std::lock_guard<std::mutex> lock(mutex_);
  check_flags();  // while the old one runs
  synchronizer_.swap(synchronizer);
}

int64_t GradReducer::num_copied() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_copied_;
}

}  // namespace fusedcomm
