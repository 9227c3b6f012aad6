// The board of an engine: which bucket is under way, in which stage, since when. A watch reads it (watched.h).
// The board is always kept, because a stall is noticed only after it has begun. The cost is small: a mutex that is held
// briefly, and entries that are reused.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/stage.h"
#include "lanes/lane.h"

namespace fusedcomm {

class Board {
 public:
  using Clock = std::chrono::steady_clock;

  // Every rank hands over the same jobs in the same order, so num_handed and num_ended tell which rank is behind.
  struct View {
    int64_t num_handed = 0;
    int64_t num_ended = 0;
    int64_t last_step = -1;        // the last step whose last job has ended; -1 if none
    Clock::time_point last_ended;  // when the last job ended; at first, when the board was made

    // The fields below describe the oldest job that has not ended. `label` is null if there is none.
    std::shared_ptr<const BucketLabel> label;
    int64_t step = 0;
    int64_t num_chunks = 0;  // 0 for a collective call between steps
    Clock::time_point handed;
    Clock::time_point moved;  // its last change, from which a stall is timed
    // The job's place: waiting for a stage, in a stage, or with all its work enqueued on streams. If several stages
    // are under way, `stage`, `chunk` and `stage_began` describe the one that began first.
    enum class At : uint8_t { kQueue, kStage, kStream } at = At::kQueue;
    Stage stage = Stage::kPack;
    int64_t chunk = 0;
    Clock::time_point stage_began;
  };

  // Adds a job. Returns its number on this board.
  int64_t hand_over(std::shared_ptr<const BucketLabel> label, int64_t step, bool is_last, int64_t num_chunks) {
    const auto now = Clock::now();
    std::lock_guard<std::mutex> lock(mutex_);
    drop_ended(now, /*asks=*/false);
    jobs_.push_back({std::move(label), step, is_last, num_chunks, now, now});
    return num_dropped_ + static_cast<int64_t>(jobs_.size()) - 1;
  }

  // Notes that all work of a job has been enqueued. `done` is reached when the device has finished that work; null if
  // it has finished already.
  void end(int64_t job, StampPtr done) {
    const auto now = Clock::now();
    std::lock_guard<std::mutex> lock(mutex_);
    Job& ended = jobs_[static_cast<size_t>(job - num_dropped_)];
    // Ask the device once a pass, with the pass's last job, not for every job, and not for one only just enqueued.
    drop_ended(now, /*asks=*/ended.is_last);
    ended.is_through = true;
    ended.done = std::move(done);
    ended.moved = now;
    drop_ended(now, /*asks=*/false);
  }

  // Removes the newest job as if it had never been handed over. Does nothing if `job` is not the newest.
  void withdraw(int64_t job) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (num_dropped_ + static_cast<int64_t>(jobs_.size()) - 1 == job) jobs_.pop_back();
  }

  // Returns the entry to pass to end_stage().
  size_t begin_stage(int64_t job, Stage stage, int64_t chunk) {
    const auto now = Clock::now();
    std::lock_guard<std::mutex> lock(mutex_);
    touch(job, now);
    size_t i = 0;
    while (i < stages_.size() && stages_[i].job >= 0) ++i;
    if (i == stages_.size()) stages_.emplace_back();
    stages_[i] = {job, stage, chunk, now};
    return i;
  }

  void end_stage(size_t entry) {
    const auto now = Clock::now();
    std::lock_guard<std::mutex> lock(mutex_);
    touch(stages_[entry].job, now);
    stages_[entry].job = -1;
  }

  // Asks the device about the oldest job only if that job has not changed since `asked_since`. Otherwise jobs on
  // streams are seen to end only when the last job of a pass is enqueued.
  View view(Clock::time_point asked_since) {
    const auto now = Clock::now();
    std::lock_guard<std::mutex> lock(mutex_);
    if (!jobs_.empty() && jobs_.front().moved <= asked_since) drop_ended(now, /*asks=*/true);
    View view;
    view.num_ended = num_dropped_;
    view.num_handed = num_dropped_ + static_cast<int64_t>(jobs_.size());
    view.last_step = last_step_;
    view.last_ended = last_ended_;
    if (jobs_.empty()) return view;
    const Job& oldest = jobs_.front();
    view.label = oldest.label;
    view.step = oldest.step;
    view.num_chunks = oldest.num_chunks;
    view.handed = oldest.handed;
    view.moved = std::max(oldest.moved, last_ended_);
    if (oldest.is_through) view.at = View::At::kStream;
    for (const Entry& entry : stages_) {
      if (entry.job != num_dropped_ || (view.at == View::At::kStage && entry.began >= view.stage_began)) continue;
      view.at = View::At::kStage;
      view.stage = entry.stage;
      view.chunk = entry.chunk;
      view.stage_began = entry.began;
    }
    return view;
  }

 private:
  struct Job {
    std::shared_ptr<const BucketLabel> label;
    int64_t step;
    bool is_last;
    int64_t num_chunks;
    Clock::time_point handed, moved;
    bool is_through = false;  // all its work has been enqueued; on a CPU, done
    StampPtr done;            // reached when the device has finished it; null if it has
  };
  struct Entry {
    int64_t job = -1;  // -1: free
    Stage stage = Stage::kPack;
    int64_t chunk = 0;
    Clock::time_point began;
  };

  void touch(int64_t job, Clock::time_point now) {
    // A transfer that was given up may end after its job was dropped.
    if (job >= num_dropped_) jobs_[static_cast<size_t>(job - num_dropped_)].moved = now;
  }

  // Drops the oldest jobs as far as they have ended. `asks`: ask the device about stamps that are not known to be
  // reached.
  void drop_ended(Clock::time_point now, bool asks) {
    for (; !jobs_.empty() && jobs_.front().is_through; jobs_.pop_front()) {
      const Job& oldest = jobs_.front();
      try {
        if (oldest.done && !(asks ? oldest.done->reached() : oldest.done->is_known_reached())) return;
      } catch (...) {  // the device has failed: the next stage reports that, with the bucket's name
      }
      if (oldest.is_last) last_step_ = oldest.step;
      last_ended_ = now;
      ++num_dropped_;
    }
  }

  std::mutex mutex_;
  std::deque<Job> jobs_;  // in the order of their numbers; the first has the number num_dropped_
  int64_t num_dropped_ = 0;
  std::vector<Entry> stages_;
  int64_t last_step_ = -1;
  Clock::time_point last_ended_ = Clock::now();
};

}  // namespace fusedcomm
