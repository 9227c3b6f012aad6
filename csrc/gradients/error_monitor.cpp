#include "gradients/error_monitor.h"

#include <cmath>
#include <limits>
#include <utility>

namespace fusedcomm {
namespace {

// Verifications that are kept for verifications().
constexpr size_t kMaxVerifications = 256;

// Inf if elements of the result are wrong (see Verification); else ‖result − exact‖₂ / ‖exact‖₂. None if that is not
// finite, as after an overflow or if the exact mean is zero: such a ratio means nothing.
std::optional<double> relative_error_of(const at::Tensor& norms) {
  if (norms[2].item<double>() != 0) return std::numeric_limits<double>::infinity();
  const double error = std::sqrt(norms[0].item<double>() / norms[1].item<double>());
  return std::isfinite(error) ? std::optional<double>(error) : std::nullopt;
}

}  // namespace

ErrorMonitor::ErrorMonitor(const ErrorMonitorOptions& options, Engine* engine, TensorTransport* transport)
    : options_(options), engine_(engine), transport_(transport) {}

void ErrorMonitor::expect(const Verification& verification, const BucketRecordPtr& record) {
  if (options_.fallback_error > 0) pending_.push_back({verification, record, {}});
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

void ErrorMonitor::add(const Verification& verification) {
  std::lock_guard<std::mutex> lock(mutex_);
  verifications_.push_back(verification);
  if (verifications_.size() > kMaxVerifications) verifications_.pop_front();
  if (!has_said_) unseen_.push_back(verification);
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
