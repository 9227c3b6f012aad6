#include "frontends/horovod/gradient_submitter.h"

#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <numeric>

#include "frontends/reducer/gradient.h"

namespace fusedcomm::horovod {
namespace {

// Python's AssertionError, which is what Horovod raises.
struct TooManyPasses : public torch::PyTorchError {
  using torch::PyTorchError::PyTorchError;
  PyObject* python_type() override { return PyExc_AssertionError; }
};

// The tensor with its dimensions in the order of its memory. `dense`: without gaps or overlaps.
at::Tensor in_order_of_memory(const at::Tensor& dense) {
  if (dense.is_contiguous()) return dense;
  std::vector<int64_t> dims(static_cast<size_t>(dense.dim()));
  std::iota(dims.begin(), dims.end(), int64_t{0});
  std::stable_sort(dims.begin(), dims.end(), [&](int64_t a, int64_t b) { return dense.stride(a) > dense.stride(b); });
  return dense.permute(dims).contiguous();  // copies nothing
}

}  // namespace

std::shared_ptr<GradientSubmitter> GradientSubmitter::make(std::vector<Parameter> parameters, std::vector<Unit> units,
                                                           const Options& options, Submit submit) {
  std::shared_ptr<GradientSubmitter> submitter(
      new GradientSubmitter(std::move(parameters), std::move(units), options, std::move(submit)));
  submitter->add_hooks();
  return submitter;
}

GradientSubmitter::GradientSubmitter(std::vector<Parameter> parameters, std::vector<Unit> units, const Options& options,
                                     Submit submit)
    : parameters_(std::move(parameters)),
      units_(std::move(units)),
      submit_(std::move(submit)),
      unit_of_(parameters_.size(), SIZE_MAX),
      gradients_(parameters_.size()),
      states_(units_.size()) {
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    for (const size_t index : units_[unit].parameters) {
      TORCH_CHECK_VALUE(index < parameters_.size() && unit_of_[index] == SIZE_MAX, "fusedcomm: unit ", unit,
                        " has parameter ", index, ", which does not exist or is in another unit");
      unit_of_[index] = unit;
    }
  }
  for (size_t index = 0; index < parameters_.size(); ++index) {
    TORCH_CHECK_VALUE(unit_of_[index] != SIZE_MAX, "fusedcomm: ", parameters_[index].name, " is in no unit");
  }
  options_ = options;
  set_passes(options.num_passes);
}

void GradientSubmitter::add_hooks() {
  std::vector<at::Tensor> tensors;
  for (const Parameter& parameter : parameters_) tensors.push_back(parameter.tensor);
  accumulators_ =
      std::make_unique<Accumulators>(tensors, [weak = weak_from_this()](size_t index, const at::Tensor& added) {
        if (const auto submitter = weak.lock()) submitter->on_gradient(index, added);
      });
}

void GradientSubmitter::on_gradient(size_t index, const at::Tensor& added) {
  std::lock_guard<std::mutex> lock(mutex_);
  // autograd adds nothing to the gradient of a parameter that has been frozen since the forward pass.
  if (!accumulators_ || !parameters_[index].tensor.requires_grad()) return;
  Gradient& gradient = gradients_[index];
  if (gradient.passes_left == 0) {
    throw TooManyPasses(c10::str("fusedcomm.horovod: the gradient of ", parameters_[index].name,
                                 " was computed again after the ", options_.num_passes,
                                 " backward pass(es) of this step: call step() or synchronize() in between, or give "
                                 "DistributedOptimizer a larger backward_passes_per_step"));
  }
  if (--gradient.passes_left > 0) return;
  const at::NoGradGuard no_grad;
  prepare(index, added);
  const size_t unit = unit_of_[index];
  if (++states_[unit].num_ready == units_[unit].parameters.size()) submit(unit);
}

void GradientSubmitter::prepare(size_t index, const at::Tensor& added) {
  BucketGradient gradient = bucket_gradient(parameters_[index].tensor, /*is_sparse=*/false, /*is_kept=*/false, added);
  gradients_[index].tensor = std::move(gradient.tensor);
  gradients_[index].is_copy = gradient.is_copy;
}

void GradientSubmitter::submit(size_t unit) {
  const std::vector<size_t>& members = units_[unit].parameters;
  const auto is_sparse = [this](size_t index) { return gradients_[index].tensor.is_sparse(); };
  if (std::any_of(members.begin(), members.end(), is_sparse)) return;
  Submission submission;
  submission.name = members.empty() ? "" : parameters_[members.front()].name;
  submission.is_group = units_[unit].is_group;
  for (const size_t index : members) {
    submission.names.push_back(parameters_[index].name);
    submission.tensors.push_back(in_order_of_memory(gradients_[index].tensor));
  }
  submission.op = options_.op;
  submission.prescale = options_.prescale;
  submission.postscale = options_.postscale;
  submission.set = options_.set;
  submission.wire = options_.wire;
  states_[unit].is_submitted = true;  // also if this fails: the step has failed then
  submitted_.push_back({submit_(std::move(submission)), members});
}

size_t GradientSubmitter::outstanding() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return submitted_.size();
}

std::vector<size_t> GradientSubmitter::missing() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<size_t> missing;
  for (size_t index = 0; index < parameters_.size(); ++index) {
    if (!states_[unit_of_[index]].is_submitted) missing.push_back(index);
  }
  return missing;
}

void GradientSubmitter::submit_missing() {
  std::lock_guard<std::mutex> lock(mutex_);
  const at::NoGradGuard no_grad;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (states_[unit].is_submitted) continue;
    for (const size_t index : units_[unit].parameters) {
      // Something may have changed a gradient since it was ready.
      prepare(index, at::Tensor());
    }
    submit(unit);
  }
}

std::vector<GradientSubmitter::Submitted> GradientSubmitter::take_handles() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Submitted> taken = std::exchange(submitted_, {});
  copies_.clear();
  for (const Submitted& each : taken) {
    for (const size_t index : each.parameters) {
      if (gradients_[index].is_copy) copies_.emplace_back(index, gradients_[index].tensor);
    }
  }
  begin_step();
  return taken;
}

void GradientSubmitter::write_back() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [index, result] : std::exchange(copies_, {})) {
    fusedcomm::write_back(parameters_[index].tensor, result);
  }
  for (const Parameter& parameter : parameters_) mark_written(parameter.tensor);
}

void GradientSubmitter::set_passes(int64_t num_passes) {
  TORCH_CHECK_VALUE(num_passes > 0, "fusedcomm.horovod: backward_passes_per_step=", num_passes,
                    " is not possible: use a whole number, 1 or more");
  std::lock_guard<std::mutex> lock(mutex_);
  options_.num_passes = num_passes;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (!states_[unit].is_submitted) begin_step(unit);
  }
}

void GradientSubmitter::reset() {
  std::lock_guard<std::mutex> lock(mutex_);
  submitted_.clear();
  copies_.clear();
  begin_step();
}

void GradientSubmitter::begin_step() {
  for (size_t unit = 0; unit < units_.size(); ++unit) begin_step(unit);
}

void GradientSubmitter::begin_step(size_t unit) {
  for (const size_t index : units_[unit].parameters) {
    gradients_[index] = {options_.num_passes, at::Tensor(), /*is_copy=*/false};
  }
  states_[unit] = {};
}

void GradientSubmitter::detach() {
  std::unique_lock<std::mutex> lock(mutex_);
  const std::unique_ptr<Accumulators> accumulators = std::move(accumulators_);
  lock.unlock();  // the hooks' end takes autograd's locks
}

}  // namespace fusedcomm::horovod
