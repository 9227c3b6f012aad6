#include "guard.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace fusedcomm {
namespace {

constexpr size_t kMaxVerifications = 256;

}  // namespace

Guard::Guard(const GuardOptions& options, Engine* engine, C10dTransport* transport)
    : options_(options), engine_(engine), transport_(transport) {}

void Guard::submit(std::shared_ptr<BucketJob> job, const at::Tensor& buffer, int64_t pass, size_t index,
                   size_t num_buckets, std::shared_ptr<const BucketRecord> record) {
  const int64_t every = options_.verify_every;
  const bool due = every != 0 && pass % every == 0 && index == static_cast<size_t>(pass / every) % num_buckets;
  if (!due || job->plan.in_place) {
    engine_->submit(std::move(job));
    return;
  }
  at::NoGradGuard no_grad;
  const auto exact = buffer.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true).mul_(1.0 / transport_->world_size());
  const auto norms = at::empty({2}, buffer.options().dtype(at::kDouble));
  for (const at::Tensor& tensor : {exact, norms}) engine_->device().will_use(tensor);
  auto check = std::make_shared<BucketJob>();
  check->owner = job->owner;
  check->counted = false;
  check->label = std::make_shared<const BucketLabel>(job->label->name + " verified",
                                                     "the exact sum that verifies " + job->label->text);
  check->on_done = std::move(job->on_done);
  // The engine fails all that follows a failure, so the check's end tells of both.
  job->on_done = [](std::exception_ptr) {};

  const Verification verification{pass, job->label, norms};
  if (options_.fallback_error > 0) pending_.push_back({verification, std::move(record), {}});
  ForeignStages stages;
  stages.scatter = [transport = transport_, exact](Lane::Completion done) {
    transport->all_reduce_tensor(Channel::kScatter, exact, std::move(done));
  };
  // On the lane, and so after the end, of the bucket's own unpacking.
  stages.unpack = [this, verification, exact, buffer] {
    at::NoGradGuard inner_no_grad;
    const auto norm = [](const at::Tensor& x) {
      return at::linalg_vector_norm(x, 2, {}, false, at::kDouble).square_();
    };
    verification.norms[0].copy_(norm(at::sub(buffer.to(at::kFloat), exact)));
    verification.norms[1].copy_(norm(exact));
    std::lock_guard<std::mutex> lock(mutex_);
    verifications_.push_back(verification);
    if (verifications_.size() > kMaxVerifications) verifications_.pop_front();
  };
  engine_->submit(std::move(job));
  engine_->submit_foreign(std::move(check), std::move(stages));
}

std::vector<Guard::Failing> Guard::begin_pass(int64_t pass) {
  std::vector<Failing> failing;
  at::NoGradGuard no_grad;
  // Since they were shared, their caller has waited for a bucket that came after.
  for (; !pending_.empty() && pending_.front().shared.defined(); pending_.pop_front()) {
    const Pending& oldest = pending_.front();
    const at::Tensor norms = oldest.shared.cpu();
    const double relative_error = std::sqrt(norms[0].item<double>() / norms[1].item<double>());
    // A pass with overflows, or in which all gradients were zeros, tells nothing.
    if (!std::isfinite(relative_error) || relative_error <= options_.fallback_error) continue;
    failing.push_back({oldest.record, oldest.verification.step, relative_error});
  }
  for (Pending& pending : pending_) {
    if (pass > pending.verification.step) share(&pending);
  }
  return failing;
}

// The ranks' norms are of the same numbers, but need not have been added up in the same order.
void Guard::share(Pending* pending) {
  const Verification& verification = pending->verification;
  pending->shared = verification.norms.clone();
  engine_->device().will_use(pending->shared);
  auto job = std::make_shared<BucketJob>();
  job->counted = false;
  job->label = std::make_shared<const BucketLabel>(
      "verdict", "the verdict on " + verification.label->text + " in step " + std::to_string(verification.step));
  job->on_done = [](std::exception_ptr) {};
  ForeignStages stages;
  stages.scatter = [transport = transport_, norms = pending->shared](Lane::Completion done) {
    transport->all_reduce_tensor(Channel::kScatter, norms, std::move(done));
  };
  engine_->submit_foreign(std::move(job), std::move(stages));
}

bool Guard::is_measured(int64_t pass) const {
  // Not in the first passes, after which DDP cuts its buckets anew.
  constexpr int64_t kFirst = 2;
  const int64_t every = options_.measure_every;
  return every != 0 && pass % every == std::min(kFirst, every - 1);
}

void Guard::add(const std::string& bucket, Measurement measurement) {
  std::lock_guard<std::mutex> lock(mutex_);
  measurements_[bucket] = std::move(measurement);
}

void Guard::forget(const std::string& bucket) {
  std::lock_guard<std::mutex> lock(mutex_);
  measurements_.erase(bucket);
}

std::vector<Verification> Guard::verifications() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return {verifications_.begin(), verifications_.end()};
}

std::map<std::string, Measurement> Guard::measurements() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return measurements_;
}

}  // namespace fusedcomm
