// A lane on CPU: one worker thread with a queue. It blocks, never spins: spinning threads collapse when ranks share
// cores. The thread is woken only when the head of its queue can run, so a bucket costs one wake-up a stage.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lane.h"

namespace fusedcomm {

class CpuLane;

class CpuEvent : public Event {
 public:
  bool done() const { return done_.load(std::memory_order_acquire); }
  // Valid once done.
  std::exception_ptr error() const { return error_; }
  // From any thread; a null pointer means success. The first call decides.
  void complete(std::exception_ptr error);
  // Wakes `lane` when done. Returns false if it already is.
  bool subscribe(CpuLane* lane);
  // After this returns the event does not refer to `lane` any more.
  void unsubscribe(CpuLane* lane);

 private:
  // Locked before a lane's mutex, never after it: a lane asks done(), which takes no lock.
  std::mutex mutex_;
  std::atomic<bool> done_{false};
  std::exception_ptr error_;
  std::vector<CpuLane*> subscribers_;
};

class CpuLane : public Lane {
 public:
  // `name` is what a debugger or `top -H` shows; at most 15 characters.
  explicit CpuLane(const std::string& name);
  ~CpuLane() override;

  void wait(EventPtr event) override {
    if (event) finally(std::move(event), [](std::exception_ptr) {});
  }
  EventPtr run(EventPtr after, Task task) override;
  EventPtr start(EventPtr after, Transfer transfer) override;
  void finally(EventPtr after, Finally task) override;
  void stop(std::exception_ptr reason) override;

  void wake_if_head_is_ready();

 private:
  // Runs with the error of `after` (null if none).
  using Work = std::function<void(std::exception_ptr)>;
  struct Item {
    std::shared_ptr<CpuEvent> after;
    Work work;
  };

  void push(EventPtr after, Work work);
  void loop();
  bool head_is_ready() const;

  std::mutex stop_mutex_;
  std::mutex mutex_;  // the queue and the reason
  std::condition_variable wake_;
  std::deque<Item> queue_;
  std::exception_ptr stop_reason_;
  std::thread thread_;
};

}  // namespace fusedcomm
