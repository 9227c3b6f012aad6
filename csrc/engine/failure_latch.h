// Keeps the first error of an engine, with the rank, stage, chunk and bucket where it happened.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <string>

#include "engine/job.h"

namespace fusedcomm {

// Keeps the first error of an engine; every later job fails with it. Transfers share the latch, because they may
// outlive the engine.
class FailureLatch {
 public:
  // Takes the text of a failure. Returns what is known of the other ranks, empty if nothing. It may take some seconds,
  // but must return by itself.
  using Explain = std::function<std::string(const std::string& failure)>;

  FailureLatch(int rank, int world_size) : rank_(rank), world_size_(world_size) {}
  // Sets the function that adds detail to the first failure's text. It runs once, on the failing thread, without the
  // latch's lock. It must wait for nothing that needs the engine's submit_mutex_, because a thread whose bucket fails
  // while it is handed over holds that mutex. The watch takes only its own locks and the board's, and
  // Synchronizer::stop(), which ends its wait, does not take submit_mutex_.
  void explain_with(Explain explain);
  // The first error, null if there is none. Waits while the first failure is being explained, because every job gets
  // the explained text.
  std::exception_ptr get() const;
  // Keeps `error` if it is the first.
  void set(std::exception_ptr error);
  // Whether the first error is a failure, and not from set().
  bool has_failed() const;
  // Returns `cause` with the rank, the stage, the chunk and the bucket in its text. The first failure is also explained
  // and kept.
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
