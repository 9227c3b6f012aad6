// What a reducer does whose passes are an optimizer's steps.
#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "frontends/reducer/reducer.h"
#include "transport/error_text.h"

namespace fusedcomm {
namespace {

// Kinds of gradients. kDense + n: sparse ones with n sparse dimensions. The greater one counts.
constexpr int64_t kUnknown = 0, kDense = 1;

}  // namespace

void GradReducer::on_gradient_of_step(std::unique_lock<std::mutex>& lock, size_t index, const at::Tensor& added) {
  if (!is_on_) return;
  std::string failure = failure_;
  if (failure.empty() && ready_.empty()) failure = options_.steps->failure_of_job();
  if (failure.empty() && passes_left_[index] > 0) {
    try {
      return take_gradient_of_step(lock, index, added);
    } catch (const std::exception& error) {
      if (failure_.empty()) failure_ = error_text(error);
      failure = failure_;
    }
  }
  lock.unlock();
  options_.steps->refuse(failure);
}

void GradReducer::take_gradient_of_step(std::unique_lock<std::mutex>& lock, size_t index, const at::Tensor& added) {
  if (--passes_left_[index] > 0) return;
  ready_.push_back(index);
  if (holds_) return;
  if (!in_pass_) {
    call_before_pass(lock);
    begin_pass();
  }
  if (bucket_of_[index] == SIZE_MAX) {
    fail(c10::str(rank_text(), "requires_grad of ", parameters_[index].name,
                  " has become True within a step, when other gradients had been sent: thaw parameters between two "
                  "steps"));
  }
  arrive(index, added);
}

void GradReducer::end_step() {
  std::unique_lock<std::mutex> lock(mutex_);
  TORCH_CHECK(failure_.empty(), failure_);
  if (!in_pass_) {
    call_before_pass(lock);
    begin_pass();
    for (const size_t index : ready_) arrive(index, at::Tensor());
  }
  end_pass_of_step(lock);
}

bool GradReducer::end_step_without_gradients() {
  std::unique_lock<std::mutex> lock(mutex_);
  TORCH_CHECK(failure_.empty(), failure_);
  call_before_pass(lock);
  begin_pass(Part::kZeros);
  if (all_are_without_gradients()) {
    in_pass_ = false;
    return false;
  }
  end_pass_of_step(lock);
  return true;
}

bool GradReducer::all_are_without_gradients() {
  if (!flags_of_all_) return true;
  return wait_for_numbers(flags_of_all_).select(1, 2).min().item<int64_t>() != 0;
}

void GradReducer::agree_on_number(int64_t num_parameters) {
  std::unique_lock<std::mutex> lock(mutex_);
  TORCH_CHECK(failure_.empty(), failure_);
  num_parameters_ = num_parameters;
  call_before_pass(lock);
  begin_pass();
  check_flags();
  in_pass_ = false;
}

void GradReducer::end_pass_of_step(std::unique_lock<std::mutex>& lock) {
  std::fill(num_missing_.begin(), num_missing_.end(), 0);
  hand_over_complete(at::Tensor());
  finish_pass(lock);
  begin_step();
  say_notices(lock);
}

void GradReducer::begin_step() {
  ready_.clear();
  std::fill(passes_left_.begin(), passes_left_.end(), passes_);
  bool has_sparse = false, has_unknown = false;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!trained_[i]) continue;
    has_sparse = has_sparse || kinds_[i] > kDense;
    has_unknown = has_unknown || kinds_[i] == kUnknown;
  }
  holds_ = !synchronizer_ || (has_sparse && has_unknown);
}

void GradReducer::learn_sparse() {
  std::vector<int64_t> kinds = kinds_;
  for (size_t i = 0; i < kinds.size() && part_ == Part::kGradients; ++i) {
    const at::Tensor& gradient = parameters_[i].tensor.grad();
    if (kinds[i] == kUnknown && gradient.defined()) {
      kinds[i] = gradient.is_sparse() ? kDense + gradient.sparse_dim() : kDense;
    }
  }
  if (world_size_ > 1) {
    const at::Tensor of_all = wait_for_numbers(gather(kinds, "the list of sparse gradients"));
    const at::Tensor greatest = std::get<0>(of_all.max(0)).contiguous();
    kinds.assign(greatest.const_data_ptr<int64_t>(), greatest.const_data_ptr<int64_t>() + kinds.size());
  }
  if (kinds != kinds_) buckets_.clear();
  kinds_ = std::move(kinds);
}

int64_t GradReducer::sparse_dims(size_t index) const {
  return parameters_[index].is_sparse ? 1 : std::max<int64_t>(kinds_[index] - kDense, 0);
}

bool GradReducer::has_begun_step() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !ready_.empty();
}

void GradReducer::set_passes(int64_t passes) {
  std::lock_guard<std::mutex> lock(mutex_);
  passes_ = passes;
  std::fill(passes_left_.begin(), passes_left_.end(), passes);
  for (const size_t index : ready_) passes_left_[index] = 0;
}

void GradReducer::set_layout(std::vector<int64_t> group_of, const std::vector<int64_t>& order) {
  std::lock_guard<std::mutex> lock(mutex_);
  group_of_ = std::move(group_of);
  order_.assign(order.begin(), order.end());
  buckets_.clear();
}

void GradReducer::leave_ranks() {
  std::shared_ptr<Synchronizer> left;  // freed after the lock
  std::lock_guard<std::mutex> lock(mutex_);
  left.swap(synchronizer_);
  rank_ = 0;
  world_size_ = 1;
  failure_.clear();
  flags_of_all_ = nullptr;
  in_pass_ = must_agree_on_order_ = wants_new_order_ = false;
  pass_ = -1;
  under_way_.clear();
  std::iota(order_.begin(), order_.end(), size_t{0});
  arrival_order_ = ArrivalOrder();
  trained_.clear();
  buckets_.clear();
  std::fill(kinds_.begin(), kinds_.end(), kUnknown);
  begin_step();
}

}  // namespace fusedcomm
