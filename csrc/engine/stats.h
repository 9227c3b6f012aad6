// Counts of what an engine has done, and the times of its steps.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "lanes/lane.h"

namespace fusedcomm {

// Counts since the engine was made. A step ends with a bucket that is_last. Times are added once the device has
// finished the step.
struct EngineStats {
  int64_t num_steps = 0;
  int64_t num_buckets = 0;
  int64_t grad_nbytes = 0;
  int64_t sent_nbytes = 0;
  int64_t sent_between_hosts_nbytes = 0;
  int64_t num_nonfinite = 0;
  int64_t num_timed_steps = 0;
  // The time from the hand-over of a step's last bucket to its completion, for up to 512 recent steps. Once there are
  // as many, step i is at i mod 512.
  std::vector<float> recent_exposed_ms;
  // The time of the same steps, in the same order, during which at least one bucket was under way.
  std::vector<float> recent_busy_ms;
};

// The fields that count, by their names in fusedcomm/session/stats.py, where Stats has a field for each.
struct CountField {
  const char* name;
  int64_t EngineStats::* count;
};
inline constexpr CountField kCountFields[] = {
    {"steps", &EngineStats::num_steps},
    {"buckets", &EngineStats::num_buckets},
    {"grad_nbytes", &EngineStats::grad_nbytes},
    {"sent_nbytes", &EngineStats::sent_nbytes},
    {"sent_between_hosts_nbytes", &EngineStats::sent_between_hosts_nbytes},
    {"nonfinite", &EngineStats::num_nonfinite},
};

// Adds up the statistics of buckets as they end.
class StatsKeeper {
 public:
  StatsKeeper();
  // `bucket` has the counts of one bucket; its num_steps is 1 if it ends a step, else 0.
  void add(const EngineStats& bucket, StampPtr submitted, StampPtr done);
  EngineStats get();
  // Begins with what has been counted and timed before, by an engine that has ended.
  void begin_with(const EngineStats& before);

 private:
  // A bucket whose work has been enqueued; on an accelerator it may end later.
  struct Interval {
    StampPtr submitted, done;
    bool is_last;
  };
  // Takes the times of finished backward passes. Asks the device once for each pass, not for every bucket.
  void take_times();
  // Takes the times of the oldest `num_buckets` buckets, which are one finished pass.
  void take_pass(size_t num_buckets);

  std::mutex mutex_;  // guards the members below
  EngineStats stats_;
  std::deque<Interval> untimed_;
  StampPtr last_done_;
};

}  // namespace fusedcomm
