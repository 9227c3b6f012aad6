#include "engine/stats.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace fusedcomm {
namespace {

// Steps whose times are kept.
constexpr size_t kNumRecentSteps = 512;

// Buckets whose times wait for the last one of their pass. Where none is the last, no times are taken, and the
// oldest are dropped.
constexpr size_t kMaxUntimed = size_t{1} << 14;

void push_recent(std::vector<float>* recent, int64_t num_steps, double value) {
  if (recent->size() < kNumRecentSteps) {
    recent->push_back(static_cast<float>(value));
  } else {
    (*recent)[static_cast<size_t>(num_steps) % kNumRecentSteps] = static_cast<float>(value);
  }
}

}  // namespace

StatsKeeper::StatsKeeper() {
  stats_.recent_exposed_ms.reserve(kNumRecentSteps);
  stats_.recent_busy_ms.reserve(kNumRecentSteps);
}

void StatsKeeper::add(const EngineStats& bucket, StampPtr submitted, StampPtr done) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const CountField& field : kCountFields) stats_.*field.count += bucket.*field.count;
  const bool is_last = bucket.num_steps != 0;
  if (is_last) take_times();  // before this pass is added, which has only just been enqueued
  untimed_.push_back({std::move(submitted), std::move(done), is_last});
  if (untimed_.size() > kMaxUntimed) untimed_.pop_front();
}

EngineStats StatsKeeper::get() {
  std::lock_guard<std::mutex> lock(mutex_);
  take_times();
  return stats_;
}

void StatsKeeper::begin_with(const EngineStats& before) {
  std::lock_guard<std::mutex> lock(mutex_);
  stats_ = before;
}

void StatsKeeper::take_times() {
  for (;;) {
    const auto last = std::find_if(untimed_.begin(), untimed_.end(), [](const Interval& b) { return b.is_last; });
    if (last == untimed_.end() || !last->done->reached()) return;
    take_pass(static_cast<size_t>(last - untimed_.begin()) + 1);
  }
}

// Buckets are handed over and completed in order. The time with at least one bucket under way is therefore the time
// from the first hand-over to the last completion, without the gaps between a bucket's completion and the next
// hand-over. Time before the completion of the previous pass is counted with that pass.
void StatsKeeper::take_pass(size_t num_buckets) {
  const auto begin = untimed_.begin(), end = begin + static_cast<std::ptrdiff_t>(num_buckets);
  // Every stamp precedes the last bucket's completion, which has been reached.
  std::for_each(begin, end, [](const Interval& bucket) {
    bucket.submitted->mark_reached();
    bucket.done->mark_reached();
  });
  const Interval& last = *(end - 1);
  double busy_ms = last.done->ms_since(*begin->submitted);
  const double exposed_ms = num_buckets == 1 ? busy_ms : last.done->ms_since(*last.submitted);
  for (auto bucket = begin; bucket != end; ++bucket) {
    if (bucket != begin) {
      busy_ms -= std::max(0.0, bucket->submitted->ms_since(*(bucket - 1)->done));
    } else if (last_done_) {
      busy_ms -= std::max(0.0, last_done_->ms_since(*bucket->submitted));
    }
  }
  last_done_ = last.done;
  untimed_.erase(begin, end);
  push_recent(&stats_.recent_exposed_ms, stats_.num_timed_steps, exposed_ms);
  push_recent(&stats_.recent_busy_ms, stats_.num_timed_steps, busy_ms);
  ++stats_.num_timed_steps;
}

}  // namespace fusedcomm
