// The first error of an engine, with what is known of where it happened.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <string>

#include "engine/job.h"

namespace fusedcomm {

// The first error of an engine, which every later job gets. Shared with transfers, which may outlive the engine.
class FailureLatch {
 public:
  // From the text of a failure to what can be said of the other ranks; may take some seconds, and must end by itself.
  using Explain = std::function<std::string(const std::string& failure)>;

  FailureLatch(int rank, int world_size) : rank_(rank), world_size_(world_size) {}
  // Called for the first failure alone, on the thread that met it, without the latch's lock; but if a bucket fails
  // while it is handed over, that thread holds the engine's submit_mutex_. So what explains must wait for nothing that
  // takes that one: the watch takes its own locks and the board's, and what ends its wait, GradHook::stop(), takes
  // none.
  void explain_with(Explain explain);
  // Waits while the first failure is being explained: what it says goes to every job.
  std::exception_ptr get() const;
  // Keeps `error` if it is the first.
  void set(std::exception_ptr error);
  // Whether the first is a failure, and not what set() was given.
  bool has_failed() const;
  // `cause` with the rank, the stage, the chunk and the bucket in its text; also kept if it is the first.
  std::exception_ptr fail(const BucketJob& job, const std::string& stage, int64_t chunk, std::exception_ptr cause);

 private:
  const int rank_, world_size_;
  mutable std::mutex mutex_;
  mutable std::condition_variable explained_;
  Explain explain_;
  bool explaining_ = false, failed_ = false;
  std::exception_ptr first_;
};

}  // namespace fusedcomm
