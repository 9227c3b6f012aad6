#include "cpu_lane.h"

#include <pthread.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace fusedcomm {

void CpuEvent::complete(std::exception_ptr error) {
  // Wake-ups happen under the lock, so that unsubscribe() means what it says and a lane can be destroyed.
  std::lock_guard<std::mutex> lock(mutex_);
  if (done()) return;
  error_ = std::move(error);
  done_.store(true, std::memory_order_release);
  for (CpuLane* lane : subscribers_) lane->wake_if_head_is_ready();
  subscribers_.clear();
}

bool CpuEvent::subscribe(CpuLane* lane) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (done()) return false;
  subscribers_.push_back(lane);
  return true;
}

void CpuEvent::unsubscribe(CpuLane* lane) {
  std::lock_guard<std::mutex> lock(mutex_);
  subscribers_.erase(std::remove(subscribers_.begin(), subscribers_.end(), lane), subscribers_.end());
}

CpuLane::CpuLane(const std::string& name) : thread_([this] { loop(); }) {
#if defined(__linux__)
  pthread_setname_np(thread_.native_handle(), name.substr(0, 15).c_str());
#else
  (void)name;
#endif
}

CpuLane::~CpuLane() { stop(std::make_exception_ptr(std::runtime_error("fusedcomm: the lane was destroyed"))); }

EventPtr CpuLane::run(EventPtr after, Task task) {
  auto end = std::make_shared<CpuEvent>();
  push(std::move(after), [end, task = std::move(task)](std::exception_ptr error) {
    if (!error) {
      try {
        task();
      } catch (...) {
        error = std::current_exception();
      }
    }
    end->complete(error);
  });
  return end;
}

EventPtr CpuLane::start(EventPtr after, Transfer transfer) {
  auto end = std::make_shared<CpuEvent>();
  push(std::move(after), [end, transfer = std::move(transfer)](std::exception_ptr error) {
    if (!error) {
      try {
        transfer([end](std::exception_ptr transfer_error) { end->complete(std::move(transfer_error)); });
        return;
      } catch (...) {
        error = std::current_exception();
      }
    }
    end->complete(error);
  });
  return end;
}

void CpuLane::finally(EventPtr after, Finally task) { push(std::move(after), std::move(task)); }

void CpuLane::push(EventPtr after, Work work) {
  auto event = std::static_pointer_cast<CpuEvent>(std::move(after));
  std::exception_ptr stopped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopped = stop_reason_;
    if (!stopped) queue_.push_back({event, std::move(work)});
  }
  if (stopped) {
    work(stopped);
  } else if (!event || !event->subscribe(this)) {
    wake_if_head_is_ready();
  } else {
    // stop() may have given up what is in the queue since it was put there; then nobody else takes this lane off.
    std::unique_lock<std::mutex> lock(mutex_);
    const bool is_stopped = stop_reason_ != nullptr;
    lock.unlock();
    if (is_stopped) event->unsubscribe(this);
  }
}

bool CpuLane::head_is_ready() const {
  return !queue_.empty() && (!queue_.front().after || queue_.front().after->done());
}

void CpuLane::wake_if_head_is_ready() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (head_is_ready()) wake_.notify_one();
}

void CpuLane::loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_reason_ || head_is_ready(); });
    if (stop_reason_) return;
    Item item = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    // Waits for the event's complete() to have left this lane, which might be destroyed once the item has run.
    if (item.after) item.after->unsubscribe(this);
    item.work(item.after ? item.after->error() : nullptr);
    item = {};  // what the closure holds (buffers, the bucket's tensor) is released here, not while waiting
    lock.lock();
  }
}

void CpuLane::stop(std::exception_ptr reason) {
  std::lock_guard<std::mutex> one_at_a_time(stop_mutex_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!stop_reason_) stop_reason_ = std::move(reason);
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
  // The thread is gone and push() refuses, but an event may still wake this lane and look at the queue.
  std::deque<Item> abandoned;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    abandoned.swap(queue_);
  }
  for (Item& item : abandoned) {
    if (item.after) item.after->unsubscribe(this);
    item.work(stop_reason_);
  }
}

}  // namespace fusedcomm
