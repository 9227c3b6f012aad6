// Lanes on CPU. They block, never spin: spinning threads collapse when ranks share cores. Each thread that has to wake
// up costs some microseconds, and where others compute on the same cores up to the scheduler's slice of milliseconds;
// so codec stages, which take a while, have a thread each, which is woken only when the head of its queue can run, and
// collectives, which are only started, have none.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lanes/lane.h"

namespace fusedcomm {

class CpuLaneQueue;

class CpuEvent : public Event {
 public:
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Valid once done.
  std::exception_ptr error() const { return error_; }
  // From any thread; a null pointer means success. The first call decides.
  void complete(std::exception_ptr error);
  // Has `queue` advance when this is done. Returns false if it already is.
  bool subscribe(const std::shared_ptr<CpuLaneQueue>& queue);

 private:
  std::mutex mutex_;
  std::atomic<bool> done_{false};
  std::exception_ptr error_;
  std::vector<std::shared_ptr<CpuLaneQueue>> subscribers_;
};

// What a lane has been given and has not run. Events may know it for longer than its lane lives.
class CpuLaneQueue {
 public:
  // Runs with the error of `after` (null if none).
  using Work = std::function<void(std::exception_ptr)>;
  struct Item {
    std::shared_ptr<CpuEvent> after;
    Work work;
  };

  explicit CpuLaneQueue(bool has_worker) : has_worker_(has_worker) {}

  // Returns false, and leaves the item alone, if the lane has been stopped.
  bool push(Item* item);
  // What the head waits for may be done: wakes the worker, or, where there is none, runs what can run, on this thread.
  void advance();
  // The worker's, until the lane is stopped.
  void work();
  // Returns when nothing runs any more that somebody else has begun; hands over what has not run.
  std::deque<Item> stop(std::exception_ptr reason);
  std::exception_ptr stop_reason() const;

 private:
  bool head_is_ready() const { return !items_.empty() && (!items_.front().after || items_.front().after->done()); }
  void run_head(std::unique_lock<std::mutex>* lock);

  const bool has_worker_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  bool is_running_ = false;
  std::exception_ptr stop_reason_;
};

class CpuLane : public Lane {
 public:
  // With a thread called `worker`, which is what a debugger or `top -H` shows, at most 15 characters. If it is empty
  // there is none: for work that only begins something, and is done by whoever completes what it waits for.
  explicit CpuLane(const std::string& worker = "");
  ~CpuLane() override;

  void wait(EventPtr event) override {
    if (event) finally(std::move(event), [](std::exception_ptr) {});
  }
  EventPtr run(EventPtr after, Task task) override;
  EventPtr start(EventPtr after, Transfer transfer) override;
  void finally(EventPtr after, Finally task) override;
  void stop(std::exception_ptr reason) override;

 private:
  const std::shared_ptr<CpuLaneQueue> queue_;
  std::mutex stop_mutex_;
  std::thread worker_;
};

}  // namespace fusedcomm
