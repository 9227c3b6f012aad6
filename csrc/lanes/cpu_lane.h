// Lanes on CPU. Their threads block and never spin: spinning threads are very slow when ranks share cores. To wake a
// thread takes some microseconds, and up to the scheduler's slice of milliseconds if other threads compute on the same
// cores. Codec stages take long, so each has a thread, which is woken only when the head of its queue can run.
// Collectives are only started, so their lanes have no thread.
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
  // Valid once done() is true. Null means success.
  std::exception_ptr error() const { return error_; }
  // Call from any thread; a null pointer means success. Only the first call counts.
  void complete(std::exception_ptr error);
  // Makes `queue` advance when this event is done. Returns false if it is done already.
  bool subscribe(const std::shared_ptr<CpuLaneQueue>& queue);

 private:
  std::mutex mutex_;
  std::atomic<bool> done_{false};
  std::exception_ptr error_;
  std::vector<std::shared_ptr<CpuLaneQueue>> subscribers_;
};

// The items of a lane that have not run. Events may keep the queue for longer than its lane exists.
class CpuLaneQueue {
 public:
  // Gets the error of `after` (null if none).
  using Work = std::function<void(std::exception_ptr)>;
  struct Item {
    std::shared_ptr<CpuEvent> after;
    Work work;
  };

  explicit CpuLaneQueue(bool has_worker) : has_worker_(has_worker) {}

  // Moves the item into the queue. Returns false, and does not change the item, if the lane has been stopped.
  bool push(Item* item);
  // Call when the event that the head waits for may be done. Wakes the worker. Without a worker, runs every item that
  // can run, on this thread.
  void advance();
  // The worker's loop. Returns when the lane is stopped.
  void work();
  // Stops the queue and returns the items that have not run. Without a worker, first waits for the item that is
  // running, so it must not be called from an item.
  std::deque<Item> stop(std::exception_ptr reason);
  // Null if the lane has not been stopped.
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
  // `worker`: the name of the lane's thread, at most 15 characters, which a debugger or `top -H` shows. If it is empty,
  // the lane has no thread: a task then runs on the thread that completes the event it waits for. This is for tasks
  // that only begin something.
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
