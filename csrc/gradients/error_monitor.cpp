#include "gradients/error_monitor.h"

#include <cmath>
#include <limits>
#include <utility>

namespace fusedcomm {
namespace {

// Verifications that are kept for verifications().
constexpr size_t kMaxVerifications = 256;

at::Tensor squared_norm(const at::Tensor& x) { return at::linalg_vector_norm(x, 2, {}, false, at::kDouble).square_(); }

// Writes a Verification's norms. `result`: a bucket's mean in its own dtype. `exact`: fp32.
void compare(const at::Tensor& result, const at::Tensor& exact, const at::Tensor& norms) {
  norms[0].copy_(squared_norm(at::sub(result.to(at::kFloat), exact)));
  norms[1].copy_(squared_norm(exact));
  const at::Tensor is_finite = at::isfinite(result);
  const at::Tensor should_be = at::isfinite(exact.to(result.scalar_type()));  // in the bucket's dtype
  const at::Tensor lost = at::logical_and(is_finite, should_be.logical_not()).sum();
  const at::Tensor made = at::logical_and(is_finite.logical_not(), should_be).sum();
  norms[2].copy_(lost + at::where(should_be.all(), made, at::zeros_like(made)));
}

// Inf if elements of the result are wrong (see Verification); else ‖result − exact‖₂ / ‖exact‖₂. None if that is not
// finite, as after an overflow or if the exact mean is zero: such a ratio means nothing.
std::optional<double> relative_error_of(const at::Tensor& norms) {
  if (norms[2].item<double>() != 0) return std::numeric_limits<double>::infinity();
  const double error = std::sqrt(norms[0].item<double>() / norms[1].item<double>());
  return std::isfinite(error) ? std::optional<double>(error) : std::nullopt;
}

}  // namespace

ErrorMonitor::ErrorMonitor(const ErrorMonitorOptions& options, Engine* engine, C10dTransport* transport)
    : options_(options), engine_(engine), transport_(transport) {}

void ErrorMonitor::submit_verified(std::shared_ptr<BucketJob> job, const GradientsPtr& gradients, int64_t pass,
                                   std::shared_ptr<const BucketRecord> record, float unscale) {
  at::NoGradGuard no_grad;
  // Copy, because the bucket's own sum overwrites the gradients; flattened() has copied separate tensors already.
  const auto exact = gradients->flattened().to(at::kFloat, /*non_blocking=*/false, /*copy=*/gradients->in_one_run());
  exact.mul_(1.0 / transport_->world_size());
  const auto norms = at::empty({3}, exact.options().dtype(at::kDouble));
  for (const at::Tensor& tensor : {exact, norms}) engine_->device().will_use(tensor);
  auto check = std::make_shared<BucketJob>();
  check->owner = job->owner;
  check->counted = false;
  check->label = std::make_shared<const BucketLabel>(job->label->name + " verified",
                                                     "the exact sum that verifies " + job->label->text);
  check->on_done = std::move(job->on_done);
  // After a failure the engine fails every later job, so the end of the check reports both.
  job->on_done = [](std::exception_ptr) {};

  const Verification verification{pass, job->label, norms};
  if (options_.fallback_error > 0) pending_.push_back({verification, std::move(record), {}});
  PassthroughStages stages;
  stages.scatter = [transport = transport_, exact](Lane::Completion done) {
    transport->all_reduce_tensor(Channel::kScatter, exact, std::move(done));
  };
  // This runs on the unpack lane, and therefore after the bucket's own unpack.
  stages.unpack = [this, verification, exact, gradients, unscale] {
    at::NoGradGuard inner_no_grad;
    compare(gradients->flattened(), exact, verification.norms);
    if (unscale != 1) gradients->scale(unscale);
    std::lock_guard<std::mutex> lock(mutex_);
    verifications_.push_back(verification);
    if (verifications_.size() > kMaxVerifications) verifications_.pop_front();
    if (!has_said_) unseen_.push_back(verification);
  };
  engine_->submit(std::move(job));
  engine_->submit_passthrough(std::move(check), std::move(stages));
}

std::vector<ErrorMonitor::Failing> ErrorMonitor::begin_pass(int64_t pass) {
  std::vector<Failing> failing;
  at::NoGradGuard no_grad;
  // `shared` was enqueued in an earlier pass, and the caller has since waited for a later bucket, so it has arrived.
  for (; !pending_.empty() && pending_.front().shared.defined(); pending_.pop_front()) {
    const Pending& oldest = pending_.front();
    const at::Tensor norms = oldest.shared.cpu();
    const std::optional<double> relative_error = relative_error_of(norms);
    if (!relative_error || *relative_error <= options_.fallback_error) continue;
    failing.push_back({oldest.record, oldest.verification.step, *relative_error});
  }
  for (Pending& pending : pending_) {
    if (pass > pending.verification.step) share(&pending);
  }
  return failing;
}

std::string ErrorMonitor::take_notice(int64_t pass) {
  for (;;) {
    Verification seen;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (unseen_.empty() || unseen_.front().step >= pass) return "";
      seen = std::move(unseen_.front());
      unseen_.pop_front();
    }
    const auto num_wrong = static_cast<int64_t>(seen.norms[2].item<double>());
    if (num_wrong == 0) continue;
    std::lock_guard<std::mutex> lock(mutex_);
    has_said_ = true;
    unseen_.clear();
    return c10::str(
        "fusedcomm: ", num_wrong, " elements of the mean of ", seen.label->text, " in step ", seen.step,
        " are NaN or Inf where those of an exact sum are finite, or finite where those are not: the wire cannot hold "
        "these gradients (fp16 ends at 65504), or a kernel is wrong. Use wire='bf16', and check "
        "comm.stats().verified for further cases. This warning is given once");
  }
}

// Each rank computes the norms from the same numbers, but perhaps adds them in another order. Their sum is the same on
// every rank.
void ErrorMonitor::share(Pending* pending) {
  const Verification& verification = pending->verification;
  pending->shared = verification.norms.clone();
  engine_->device().will_use(pending->shared);
  auto job = std::make_shared<BucketJob>();
  job->counted = false;
  job->label = std::make_shared<const BucketLabel>(
      "verdict", "the verdict on " + verification.label->text + " in step " + std::to_string(verification.step));
  job->on_done = [](std::exception_ptr) {};
  PassthroughStages stages;
  stages.scatter = [transport = transport_, norms = pending->shared](Lane::Completion done) {
    transport->all_reduce_tensor(Channel::kScatter, norms, std::move(done));
  };
  engine_->submit_passthrough(std::move(job), std::move(stages));
}

void ErrorMonitor::add(Measurement measurement) {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::string bucket = measurement.label->name;
  measurements_[bucket] = std::move(measurement);
}

void ErrorMonitor::forget(const std::string& bucket) {
  std::lock_guard<std::mutex> lock(mutex_);
  measurements_.erase(bucket);
}

std::vector<Verification> ErrorMonitor::verifications() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return {verifications_.begin(), verifications_.end()};
}

std::map<std::string, Measurement> ErrorMonitor::measurements() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return measurements_;
}

}  // namespace fusedcomm
