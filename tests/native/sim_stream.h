// A simulated stream: a thread that works off a queue, and the marks that recordings of events leave in it.
#pragma once

#include <c10/core/Stream.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

namespace sim {

using SteadyTime = std::chrono::steady_clock::time_point;

// By stream: the index of its last piece of work that is ordered before.
using Clock = std::map<c10::StreamId, int64_t>;

inline void merge(Clock* clock, const Clock& other) {
  for (const auto& [stream, index] : other) {
    int64_t& known = (*clock)[stream];
    known = std::max(known, index);
  }
}

// The mark that one call of record() enqueues.
struct Recording {
  explicit Recording(Clock ordered_before) : clock(std::move(ordered_before)) {}

  void mark() {
    std::lock_guard<std::mutex> lock(mutex);
    reached = true;
    time = std::chrono::steady_clock::now();
    changed.notify_all();
  }
  bool is_reached() {
    std::lock_guard<std::mutex> lock(mutex);
    return reached;
  }
  SteadyTime wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return reached; });
    return time;
  }

  const Clock clock;
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;
  SteadyTime time;
};

class StreamThread {
 public:
  explicit StreamThread(const std::mt19937& random) : random_(random), thread_([this] { work_off(); }) {}
  ~StreamThread() {
    push(nullptr);
    thread_.join();
  }
  void push(std::function<void()> item) {
    std::lock_guard<std::mutex> lock(mutex_);
    items_.push_back(std::move(item));
    changed_.notify_one();
  }
  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return items_.empty() && !works_;
  }

  std::atomic<int> pause_us{0};

 private:
  void work_off() {
    for (;;) {
      std::function<void()> item;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        works_ = false;
        changed_.wait(lock, [this] { return !items_.empty(); });
        works_ = true;
        item = std::move(items_.front());
        items_.pop_front();
      }
      if (!item) return;
      const int us = pause_us;
      // Only one item in four has a pause: the order of work must vary, but pauses take time.
      if (us != 0 && random_() % 4 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random_() % static_cast<unsigned>(us)));
      }
      item();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> items_;
  bool works_ = false;
  std::mt19937 random_;
  std::thread thread_;
};

}  // namespace sim
