#include "engine/failure_latch.h"

#include <stdexcept>
#include <utility>

namespace fusedcomm {

void FailureLatch::explain_with(Explain explain) {
  std::lock_guard<std::mutex> lock(mutex_);
  explain_ = std::move(explain);
}

std::exception_ptr FailureLatch::get() const {
  std::unique_lock<std::mutex> lock(mutex_);
  explained_.wait(lock, [this] { return !explaining_; });
  return first_;
}

void FailureLatch::set(std::exception_ptr error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!first_ && !explaining_) first_ = std::move(error);
}

bool FailureLatch::has_failed() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failed_;
}

std::exception_ptr FailureLatch::fail(const BucketJob& job, const std::string& stage, int64_t chunk,
                                      std::exception_ptr cause) {
  std::string what = "unknown error";
  try {
    std::rethrow_exception(cause);
  } catch (const std::exception& e) {
    what = e.what();
  } catch (...) {
  }
  const std::string failure = "the " + stage + " of chunk " + std::to_string(chunk + 1) + "/" +
                              std::to_string(job.num_chunks()) + " failed for " + job.label->text + ": " + what;
  const std::string text =
      "fusedcomm: rank " + std::to_string(rank_) + " of " + std::to_string(world_size_) + ": " + failure +
      "\nThe gradients of this step are not valid. If another rank died or left, its own log says why; restart the "
      "job from a checkpoint.";
  std::unique_lock<std::mutex> lock(mutex_);
  if (first_ || explaining_) return std::make_exception_ptr(std::runtime_error(text));
  failed_ = true;
  std::string explanation;
  if (explain_) {
    explaining_ = true;
    const Explain explain = explain_;  // another function may be set meanwhile
    lock.unlock();
    try {
      explanation = explain(failure);
    } catch (...) {  // report the failure without an explanation
    }
    lock.lock();
    explaining_ = false;
  }
  if (!explanation.empty()) explanation = "\n" + explanation;
  first_ = std::make_exception_ptr(std::runtime_error(text + explanation));
  explained_.notify_all();
  return first_;
}

}  // namespace fusedcomm
