// The order of buckets within a backward pass, and the number of passes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gradients/bucket.h"

namespace fusedcomm {

// Not thread-safe.
class PassOrder {
 public:
  // Counts a bucket that is handed over. record: tells whether two passes have the same first bucket. Throws if DDP has
  // skipped buckets.
  void take(const Bucket& bucket, const void* record);

  int64_t step() const { return step_; }
  void restore_step(int64_t step) { step_ = step; }

 private:
  void check(const Bucket& bucket, const void* record);

  size_t next_index_ = 0;                // that the next bucket should have
  const void* first_of_pass_ = nullptr;  // bucket 0's record, to compare the next pass's with
  int num_unfinished_ = 0;               // unfinished passes in a row with the same first bucket
  int64_t step_ = 0;                     // backward passes so far; saved in checkpoints
};

}  // namespace fusedcomm
