// Records when each stage of each bucket was under way. It records only while a trace is taken.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/stage.h"
#include "lanes/lane.h"

namespace fusedcomm {

// A stage of a chunk, with its times in milliseconds since the trace began. kBucket is a bucket's time from hand-over
// to result. kExposed is the same for the last bucket of a backward pass: the time that the step waits for.
struct TraceSpan {
  std::shared_ptr<const BucketLabel> label;
  Stage stage;
  int64_t step;
  int64_t chunk;
  double begin_ms;
  double end_ms;
};

class Tracer {
 public:
  bool on() const { return on_.load(std::memory_order_relaxed); }

  void start(StampPtr origin) {
    std::lock_guard<std::mutex> lock(mutex_);
    origin_ = std::move(origin);
    entries_.clear();
    on_ = true;
  }

  void add(std::shared_ptr<const BucketLabel> label, Stage stage, int64_t step, int64_t chunk, StampPtr begin,
           StampPtr end) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (on_) entries_.push_back({std::move(label), stage, step, chunk, std::move(begin), std::move(end)});
  }

  // Ends the trace. Returns what has been recorded since start(); waits until the device has reached it.
  std::vector<TraceSpan> stop() {
    std::vector<Entry> entries;
    StampPtr origin;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      on_ = false;
      entries.swap(entries_);
      origin.swap(origin_);
    }
    std::vector<TraceSpan> spans;
    for (const Entry& entry : entries) {
      spans.push_back({entry.label, entry.stage, entry.step, entry.chunk, entry.begin->ms_since(*origin),
                       entry.end->ms_since(*origin)});
    }
    return spans;
  }

 private:
  struct Entry {
    std::shared_ptr<const BucketLabel> label;
    Stage stage;
    int64_t step, chunk;
    StampPtr begin, end;
  };
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  StampPtr origin_;
  std::vector<Entry> entries_;
};

}  // namespace fusedcomm
