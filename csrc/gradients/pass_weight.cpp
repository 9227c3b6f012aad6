#include "gradients/pass_weight.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "gradients/bucket_future.h"
#include "transport/without_gil.h"

namespace fusedcomm {
namespace {

constexpr int64_t kNumValues = std::tuple_size_v<WeightSums>;
constexpr int kMaxMarked = 1000;

double mark_of(int rank) { return std::ldexp(1.0, -std::min(rank, kMaxMarked)); }
int lowest_rank(double marks) { return std::max(0, -std::ilogb(marks)); }

}  // namespace

PassWeights::PassWeights(Engine* engine, std::shared_ptr<TensorTransport> transport, c10::Device device)
    : engine_(engine),
      transport_(std::move(transport)),
      device_(device),
      num_ranks_(static_cast<double>(engine->world_size())),
      rank_(engine->rank()) {}

void PassWeights::use(bool of_sums) {
  std::lock_guard<std::mutex> lock(mutex_);
  is_on_ = true;
  of_sums_ = of_sums;
}

void PassWeights::count_active(bool counts) {
  std::lock_guard<std::mutex> lock(mutex_);
  counts_active_ = counts;
}

bool PassWeights::set(double weight, std::optional<double> scale) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int task = torch::autograd::get_current_graph_task_id();
  const bool is_under_way = task != -1 && ((in_pass_ && task == task_) || task == noted_task_);
  const bool is_late = is_under_way && weight != weight_;
  if (is_late || problem_ == WeightProblem::kInvalid) problem_ = is_late ? WeightProblem::kLate : WeightProblem::kNone;
  weight_ = weight;
  scale_ = scale;
  return is_late;
}

void PassWeights::set_invalid(const std::string& what) {
  std::lock_guard<std::mutex> lock(mutex_);
  problem_ = WeightProblem::kInvalid;
  invalid_ = what;
  weight_ = 0;
}

double PassWeights::note_pass() {
  std::lock_guard<std::mutex> lock(mutex_);
  const double weight = weight_.value_or(0);
  noted_ += weight;
  ++num_noted_;
  noted_task_ = torch::autograd::get_current_graph_task_id();
  return of_sums_ && weight != 0 ? 1 : weight;
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

void PassWeights::follow(const PassWeights& of_rows) {
  std::scoped_lock lock(mutex_, of_rows.mutex_);
  if (!of_rows.last_) return;
  followed_ = of_rows.last_->sums;
  weight_ = followed_[0];
  scale_ = of_rows.unit_;
  invalid_ = of_rows.invalid_;
}

double PassWeights::last_sum() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return last_ ? last_->sums[0] : 0;
}

bool PassWeights::is_refused() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return last_ && last_->refusal;
}

bool PassWeights::in_pass() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return in_pass_;
}

PassWeightPtr PassWeights::of(const Bucket& bucket) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!is_on_ && !counts_active_) return nullptr;
  const int task = torch::autograd::get_current_graph_task_id();
  // All buckets of static_graph's first pass have the index 0. Of buckets that are alone, a pass that was interrupted
  // has not ended.
  const bool is_same_task = in_pass_ && task != -1 && task == task_;
  const bool begins =
      bucket.is_alone ? !in_pass_ || (task != -1 && task_ != -1 && task != task_) : bucket.index == 0 && !is_same_task;
  if (begins) {
    task_ = task;
    last_ = begin(bucket.is_shadow);
  }
  in_pass_ = !bucket.is_last;
  return last_;
}

void PassWeights::take_over(const PassWeights& from, bool again) {
  std::scoped_lock lock(mutex_, from.mutex_);
  is_on_ = from.is_on_;
  of_sums_ = from.of_sums_;
  counts_active_ = from.counts_active_;
  weight_ = from.weight_;
  scale_ = from.scale_;
  problem_ = from.problem_;
  invalid_ = from.invalid_;
  noted_ = from.noted_;
  num_noted_ = from.num_noted_;
  unit_ = from.unit_;
  again_ = again ? from.last_ : nullptr;
}

void PassWeights::finish_last(double sum) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!last_) return;
  last_->sums[0] = sum;
  last_->unpack = sum > 0 ? unit_ * num_ranks_ / sum : 0;
}

void PassWeights::set_unit(double unit) {
  std::lock_guard<std::mutex> lock(mutex_);
  unit_ = unit;
}

PassWeightPtr PassWeights::begin(bool is_shadow) {
  const at::NoGradGuard no_grad;
  check_last();
  auto weight = std::make_shared<PassWeight>();
  weight->is_deferred = is_deferred_;
  double own = 0, scale = 0;
  WeightProblem problem = WeightProblem::kNone;
  if (!is_on_) {
    own = scale = is_shadow ? 0 : 1;
    unit_ = 1;
  } else if (!is_shadow) {
    const bool is_noted = num_noted_ != 0;
    own = is_noted ? noted_ : weight_.value_or(0);
    scale = own == 0 ? 0 : is_noted || of_sums_ ? scale_.value_or(1) : scale_.value_or(own);
    problem = weight_ ? problem_ : WeightProblem::kMissing;
    // A later weight does not mend the pass that had another one: the ranks are told once.
    if (problem_ == WeightProblem::kLate) problem_ = WeightProblem::kNone;
    noted_ = 0;
    num_noted_ = 0;
  }
  if (again_) {
    own = again_->share * unit_;
    scale = again_->pack * unit_;
    problem = again_->problem;
    again_ = nullptr;
  }
  at::Tensor values = at::zeros({kNumValues}, at::kDouble);
  auto* const data = values.mutable_data_ptr<double>();
  std::copy(followed_.begin(), followed_.end(), data);
  data[0] = own;
  weight->problem = problem;
  if (problem != WeightProblem::kNone) data[static_cast<int64_t>(problem)] += mark_of(rank_);
  values = values.to(device_, /*non_blocking=*/true);
  if (!device_.is_cpu()) {
    weight->on_device = at::empty({}, values.options().dtype(at::kFloat));
    for (const at::Tensor& tensor : {values, weight->on_device}) engine_->device().will_use(tensor);
  }
  send(weight, values);
  weight->pack = unit_ == 0 ? scale : scale / unit_;
  weight->share = unit_ == 0 ? own : own / unit_;
  return weight;
}

void PassWeights::send(const PassWeightPtr& weight, const at::Tensor& values) {
  static const auto kLabel = std::make_shared<const BucketLabel>("weights", "the ranks' weights in the mean");
  const FuturePtr future = make_future(device_);
  auto job = std::make_shared<BucketJob>();
  job->counted = false;
  job->label = kLabel;
  job->on_done = [future, values](std::exception_ptr error) { complete(*future, values, std::move(error)); };
  PassthroughStages stages;
  if (device_.is_cpu()) {
    // A gather and not an all-reduce: it can be given up.
    const at::Tensor all = at::empty({engine_->world_size() * kNumValues}, values.options());
    stages.scatter = [transport = transport_, values, all](Lane::Completion done) {
      transport->all_gather_tensor(Channel::kScatter, all, values,
                                   [values, all, done = std::move(done)](std::exception_ptr error) {
                                     const at::NoGradGuard no_grad;
                                     if (!error) values.copy_(all.view({-1, kNumValues}).sum(0));
                                     done(std::move(error));
                                   });
    };
  } else {
    // All on one stream, as an intermediate tensor's memory goes back to the stream that made it.
    stages.scatter = [this, weight, values, unit = unit_](Lane::Completion done) {
      transport_->all_reduce_tensor(Channel::kScatter, values, [](std::exception_ptr error) {
        if (error) std::rethrow_exception(error);
      });
      if (unit != 0) finish_on_device(weight.get(), values, unit);
      done(nullptr);
    };
  }
  // Also on a device: later tasks of the lane follow the message. Only residuals of sums need it on the reduce lane.
  Lane::Task& follows = engine_->config().feedback ? stages.reduce : stages.unpack;
  follows = [this, weight, values, unit = unit_] {
    if (device_.is_cpu() && unit != 0) finish(weight.get(), values.const_data_ptr<double>(), unit);
  };
  if (!device_.is_cpu()) stages.unpack = [] {};
  engine_->submit_passthrough(std::move(job), std::move(stages));
  if (unit_ != 0) return;
  {
    const WithoutGil no_gil;
    future->waitAndThrow();
  }
  const at::Tensor on_host = values.cpu();
  const auto* const data = on_host.const_data_ptr<double>();
  const double sum = data[0];
  finish(weight.get(), data, sum / num_ranks_);
  if (weight->refusal && !device_.is_cpu()) std::rethrow_exception(weight->refusal);
  if (!weight->refusal && sum > 0 && std::isfinite(sum)) unit_ = sum / num_ranks_;
  if (weight->on_device.defined()) weight->on_device.fill_(weight->unpack);
}

void PassWeights::finish(PassWeight* weight, const double* values, double unit) {
  std::copy_n(values, kNumValues, weight->sums.begin());
  if (!is_deferred_) weight->refusal = refusal_of(values);
  weight->unpack = values[0] > 0 ? unit * num_ranks_ / values[0] : 0;
  if (values[0] == 0) sums_to_zero_ = true;
}

void PassWeights::finish_on_device(PassWeight* weight, const at::Tensor& values, double unit) const {
  const at::NoGradGuard no_grad;
  const at::Tensor sum = values[0], marks = values.narrow(0, 1, kNumValues - 1).sum();
  const at::Tensor factor = at::where(sum == 0, at::zeros_like(sum), sum.reciprocal().mul_(unit * num_ranks_));
  weight->on_device.copy_(at::where(marks == 0, factor, at::full_like(factor, NAN)));
  weight->values = at::empty({kNumValues}, at::TensorOptions().dtype(at::kDouble).pinned_memory(true));
  weight->values.copy_(values, /*non_blocking=*/true);
  weight->arrived = engine_->device().stamp();
}

void PassWeights::check_last() {
  if (!last_ || !last_->arrived) return;
  // Waits for a message that is a pass old, so that all ranks throw in the same pass.
  last_->arrived->ms_since(*last_->arrived);
  const auto* const values = last_->values.const_data_ptr<double>();
  last_->arrived = nullptr;
  if (const auto refusal = refusal_of(values)) std::rethrow_exception(refusal);
  if (values[0] == 0) sums_to_zero_ = true;
}

std::exception_ptr PassWeights::refusal_of(const double* values) const {
  const auto marks = [values](WeightProblem problem) { return values[static_cast<int64_t>(problem)]; };
  const auto refused = [](const auto&... said) {
    return std::make_exception_ptr(std::runtime_error(
        c10::str("fusedcomm: ", said...,
                 ". Give comm.weight a finite number, 0 or more, on every rank, before the backward pass that it is "
                 "for")));
  };
  if (const double of = marks(WeightProblem::kMissing); of != 0) {
    return refused("rank ", lowest_rank(of), " has not set comm.weight, and means are weighted (Config(weighted=…))");
  }
  if (const double of = marks(WeightProblem::kInvalid); of != 0) {
    const bool is_own = lowest_rank(of) == rank_;
    return refused("rank ", lowest_rank(of), " has set comm.weight to ",
                   is_own ? invalid_ : "what is no weight: a negative, NaN or infinite number, or several");
  }
  if (const double of = marks(WeightProblem::kLate); of != 0) {
    return refused(
        "rank ", lowest_rank(of),
        " has set comm.weight within a backward pass whose first bucket had left, or whose gradients are added "
        "to others, so that pass had another weight");
  }
  return std::isfinite(values[0]) ? nullptr : refused("the ranks' weights add up to ", values[0]);
}

std::string PassWeights::take_notice() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!sums_to_zero_ || std::exchange(has_said_zero_, true)) return "";
  return "fusedcomm: in a backward pass the weights of all ranks were 0, so its gradients are zero. Later passes of "
         "this kind are not reported";
}

}  // namespace fusedcomm
