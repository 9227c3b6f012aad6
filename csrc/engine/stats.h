// What an engine has done, and how long its steps took.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "lanes/lane.h"

namespace fusedcomm {

// Sums since the engine was made; a step ends with a bucket that is_last. Times follow when the device has got there.
struct EngineStats {
  int64_t num_steps = 0;
  int64_t num_buckets = 0;
  int64_t grad_nbytes = 0;
  int64_t sent_nbytes = 0;
  int64_t sent_between_hosts_nbytes = 0;  // on one level every rank counts as a host
  int64_t num_nonfinite = 0;
  double busy_ms = 0;  // time during which at least one bucket was under way
  // Of the last steps, unordered. Exposed: from the last bucket's hand-over to its completion.
  std::vector<float> recent_exposed_ms;
  std::vector<float> recent_busy_ms;
};

// Adds up the statistics of buckets as they end.
class StatsKeeper {
 public:
  StatsKeeper();
  // `bucket` has the counts of one bucket, which ends a step if its num_steps is 1.
  void add(const EngineStats& bucket, StampPtr submitted, StampPtr done);
  EngineStats get();

 private:
  // A bucket whose result has been ordered; on an accelerator it may be there only later.
  struct Interval {
    StampPtr submitted, done;
    bool is_last;
  };
  // Takes the times of backward passes that are through. The device is asked once for each, not for every bucket.
  void take_times();
  void take_pass(size_t num_buckets);

  std::mutex mutex_;  // of all that follows
  EngineStats stats_;
  std::deque<Interval> untimed_;
  StampPtr last_done_;
  int64_t num_timed_steps_ = 0;
};

}  // namespace fusedcomm
