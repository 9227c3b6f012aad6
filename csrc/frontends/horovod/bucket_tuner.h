// Tries sizes of buckets while a plan runs, and keeps the fastest. Uses no torch, reads no clock.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace fusedcomm::horovod {

struct TuningOptions {
  bool is_on = false;
  int64_t warmup_samples = 3;     // samples of the first size that do not count
  int64_t steps_per_sample = 10;  // cycles of the plan
  std::string log;                // file that gets a line for each size; empty: none
};

class BucketTuner {
 public:
  // first: the size to begin with, in bytes.
  BucketTuner(const TuningOptions& options, int64_t first);

  int64_t nbytes() const { return sizes_[current_]; }
  bool is_searching() const { return is_searching_; }
  // Notes how long a cycle took. Returns whether nbytes() has changed.
  bool note_cycle(double seconds);
  // Leaves out the cycles so far of this size: they were not all of one plan.
  void forget_cycles() { cycles_.clear(); }

 private:
  void write_log() const;

  const TuningOptions options_;
  std::vector<int64_t> sizes_;
  std::vector<double> medians_;  // of the sizes that have been tried, in seconds
  size_t current_ = 0;
  int64_t num_to_skip_;
  std::vector<double> cycles_;
  bool is_searching_;
};

}  // namespace fusedcomm::horovod
