#include "gradients/pass_weight.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

namespace fusedcomm {
namespace {

constexpr int64_t kHeadNumel = kHeadNbytes / static_cast<int64_t>(sizeof(float));

// A factor that is so near 1 is 1: fp32 rounds sums of shares of which the mean is 1.
constexpr double kRounding = 0x1p-21;

// The exponent of a sum of marks tells the lowest rank that has one, whichever ranks above it have theirs, too.
constexpr int kMaxMarked = 60;
float mark_of(int rank) { return std::ldexp(1.0F, -2 * std::min(rank, kMaxMarked)); }
int lowest_rank(float marks) { return std::max(0, -std::ilogb(marks)) / 2; }

}  // namespace

double PassWeight::factor(const float* sum) const {
  const double factor = sum[0] > 0 ? num_ranks / sum[0] : 0;
  return std::abs(factor - 1) < kRounding ? 1 : factor;
}

at::Tensor PassWeight::factor_of(const at::Tensor& sum) const {
  const at::Tensor total = sum[0].to(at::kDouble), factor = total.reciprocal().mul_(num_ranks);
  const at::Tensor rounded = at::where((factor - 1).abs() < kRounding, at::ones_like(factor), factor);
  return at::where(total == 0, at::zeros_like(total), rounded).to(at::kFloat);
}

PassWeights::PassWeights(Engine* engine, c10::Device device)
    : engine_(engine), device_(device), num_ranks_(static_cast<double>(engine->world_size())), rank_(engine->rank()) {}

void PassWeights::use(bool of_sums) {
  std::lock_guard<std::mutex> lock(mutex_);
  is_on_ = true;
  of_sums_ = of_sums;
}

bool PassWeights::of_sums() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return of_sums_;
}

void PassWeights::count_active(bool counts) {
  std::lock_guard<std::mutex> lock(mutex_);
  counts_active_ = counts;
}

bool PassWeights::set(double weight) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int task = torch::autograd::get_current_graph_task_id();
  const bool is_under_way = task != -1 && ((in_pass_ && task == task_) || task == noted_task_);
  const bool is_late = is_under_way && weight != weight_;
  is_late_ = is_late_ || is_late;
  is_invalid_ = false;
  weight_ = weight;
  return is_late;
}

void PassWeights::set_invalid() {
  std::lock_guard<std::mutex> lock(mutex_);
  is_invalid_ = true;
  weight_ = 0;
}

bool PassWeights::note_pass() {
  std::lock_guard<std::mutex> lock(mutex_);
  noted_ += weight_.value_or(0);
  ++num_noted_;
  noted_task_ = torch::autograd::get_current_graph_task_id();
  return weight_.value_or(0) != 0;
}

bool PassWeights::has_noted() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_noted_ != 0;
}

void PassWeights::forget_passes() {
  std::lock_guard<std::mutex> lock(mutex_);
  noted_ = 0;
  num_noted_ = 0;
}

void PassWeights::fix_unit(double unit) {
  std::lock_guard<std::mutex> lock(mutex_);
  unit_ = unit;
  knows_unit_ = true;
}

void PassWeights::defer(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  is_deferred_ = true;
  rank_ = rank;
}

void PassWeights::spread(int64_t num_ranks, int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  num_ranks_ = static_cast<double>(num_ranks);
  rank_ = rank;
}

void PassWeights::follow(PassWeights& of_rows) {
  std::scoped_lock lock(mutex_, of_rows.mutex_);
  followed_ = of_rows.last_sum_;
  of_rows.unit_ = unit_;
}

void PassWeights::note_sum(const at::Tensor& sum) {
  std::lock_guard<std::mutex> lock(mutex_);
  last_sum_ = sum;
}

bool PassWeights::in_pass() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return in_pass_;
}

PassWeightPtr PassWeights::of(const Bucket& bucket) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!is_on_ && !counts_active_) return nullptr;
  const int task = torch::autograd::get_current_graph_task_id();
  // All buckets of static_graph's first pass have the index 0. Sums and rows have indices without an order: a pass of
  // theirs that was interrupted has not ended, and a module's may come after those of the last one.
  const bool is_same_task = task != -1 && task == task_;
  const bool begins = bucket.of_pass() ? bucket.index == 0 && !(in_pass_ && is_same_task)
                                       : !is_same_task && (!in_pass_ || (task != -1 && task_ != -1));
  if (begins) {
    task_ = task;
    last_ = begin(bucket.of_pass() && bucket.of_pass()->is_shadow);
  }
  in_pass_ = !bucket.is_last;
  return last_;
}

void PassWeights::take_over(const PassWeights& from) {
  std::scoped_lock lock(mutex_, from.mutex_);
  is_on_ = from.is_on_;
  of_sums_ = from.of_sums_;
  counts_active_ = from.counts_active_;
  weight_ = from.weight_;
  is_invalid_ = from.is_invalid_;
  is_late_ = from.is_late_;
  noted_ = from.noted_;
  num_noted_ = from.num_noted_;
}

PassWeightPtr PassWeights::begin(bool is_shadow) {
  const at::NoGradGuard no_grad;
  if (last_) learn_from(last_.get());
  is_refused_ = false;
  double own = is_shadow ? 0 : 1, unit = 1;
  bool is_valid = true;
  if (is_on_) {
    unit = unit_;
    if (!is_shadow) {
      own = num_noted_ != 0 ? noted_ : weight_.value_or(0);
      // A later weight does not mend the pass that had another one: the ranks are told once.
      is_valid = weight_ && !is_invalid_ && !std::exchange(is_late_, false);
      noted_ = 0;
      num_noted_ = 0;
    }
  }
  auto weight = std::make_shared<PassWeight>();
  weight->num_ranks = num_ranks_;
  weight->is_deferred = is_deferred_;
  weight->share = own / unit;
  if (followed_.defined()) {
    weight->head = followed_;
    weight->share = device_.is_cpu() ? followed_[0].item<double>() : 1;
    weight->pack = weight->share == 0 ? 0 : 1;  // the rows' pack has multiplied by the weight
    return weight;
  }
  weight->pack = own != 0 && of_sums_ ? 1 / unit : own / unit;
  const auto on_host = at::TensorOptions().dtype(at::kFloat).pinned_memory(!device_.is_cpu());
  const at::Tensor head = at::zeros({kHeadNumel}, on_host);
  auto* const data = head.mutable_data_ptr<float>();
  data[0] = is_valid ? static_cast<float>(weight->share) : NAN;
  data[1] = is_valid ? 0 : mark_of(rank_);
  weight->head = head.to(device_, /*non_blocking=*/true);
  engine_->device().will_use(weight->head);
  return weight;
}

void PassWeights::learn_from(PassWeight* last) {
  if (last->arrived) {
    // The message is a pass old, and all ranks throw in the same pass.
    wait_for(*last->arrived);
    last->arrived = nullptr;
    if (const auto refusal = received(last, last->on_host)) std::rethrow_exception(refusal);
  }
  const double mean = last->mean;
  if (knows_unit_ || is_deferred_ || !is_on_ || !(mean > 0) || !std::isfinite(mean)) return;
  unit_ *= mean;
  knows_unit_ = true;
}

std::exception_ptr PassWeights::received(PassWeight* weight, const at::Tensor& sum) {
  if (weight->is_deferred) return nullptr;
  if (!sum.is_cpu()) {
    if (weight->arrived) return nullptr;
    weight->on_host = at::empty({kHeadNumel}, at::TensorOptions().dtype(at::kFloat).pinned_memory(true));
    weight->on_host.copy_(sum, /*non_blocking=*/true);
    weight->arrived = engine_->device().stamp();
    return nullptr;
  }
  const auto* const data = sum.const_data_ptr<float>();
  if (data[0] < 0) return nullptr;  // the bucket is empty
  weight->mean = data[0] / weight->num_ranks;
  if (data[0] == 0) sums_to_zero_ = true;
  const std::exception_ptr refusal = refusal_of(data);
  if (refusal) is_refused_ = true;
  return refusal;
}

std::exception_ptr PassWeights::refusal_of(const float* sum) const {
  if (std::isfinite(sum[0])) return nullptr;
  const std::string what = sum[1] == 0
                               ? c10::str("the ranks' weights add up to ", sum[0])
                               : c10::str("rank ", lowest_rank(sum[1]),
                                          " has no weight in this pass: it has set none, or what its warning names");
  return std::make_exception_ptr(std::runtime_error(
      "fusedcomm: " + what +
      ". Give comm.weight a finite number, 0 or more, on every rank, before the backward pass that it is for"));
}

std::string PassWeights::take_notice() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!sums_to_zero_ || std::exchange(has_said_zero_, true)) return "";
  return "fusedcomm: in a backward pass the weights of all ranks were 0, so its gradients are zero. Later passes of "
         "this kind are not reported";
}

}  // namespace fusedcomm
