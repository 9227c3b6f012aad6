#include "lanes/cpu_lane.h"

#include <stdexcept>
#include <utility>

#include "lanes/threads.h"

namespace fusedcomm {

void CpuEvent::complete(std::exception_ptr error) {
  std::vector<std::shared_ptr<CpuLaneQueue>> subscribers;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (done()) return;
    error_ = std::move(error);
    done_.store(true, std::memory_order_release);
    subscribers.swap(subscribers_);
  }
  for (const auto& queue : subscribers) queue->advance();
}

bool CpuEvent::subscribe(const std::shared_ptr<CpuLaneQueue>& queue) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (done()) return false;
  subscribers_.push_back(queue);
  return true;
}

bool CpuLaneQueue::push(Item* item) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stop_reason_) return false;
  items_.push_back(std::move(*item));
  return true;
}

void CpuLaneQueue::advance() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (has_worker_) {
    if (head_is_ready()) changed_.notify_one();
    return;
  }
  // The thread that runs an item now, perhaps this one, checks the head again before it returns.
  if (is_running_) return;
  while (!stop_reason_ && head_is_ready()) run_head(&lock);
  changed_.notify_all();
}

void CpuLaneQueue::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_reason_ || head_is_ready(); });
    if (stop_reason_) return;
    run_head(&lock);
  }
}

void CpuLaneQueue::run_head(std::unique_lock<std::mutex>* lock) {
  Item item = std::move(items_.front());
  items_.pop_front();
  is_running_ = true;
  lock->unlock();
  item.work(item.after ? item.after->error() : nullptr);
  item = {};  // releases what the closure holds (buffers, the bucket's tensor) before the next wait
  lock->lock();
  is_running_ = false;
}

std::deque<CpuLaneQueue::Item> CpuLaneQueue::stop(std::exception_ptr reason) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!stop_reason_) stop_reason_ = std::move(reason);
  changed_.notify_all();
  changed_.wait(lock, [this] { return has_worker_ || !is_running_; });
  return std::exchange(items_, {});
}

std::exception_ptr CpuLaneQueue::stop_reason() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stop_reason_;
}

CpuLane::CpuLane(const std::string& worker) : queue_(std::make_shared<CpuLaneQueue>(!worker.empty())) {
  if (worker.empty()) return;
  worker_ = start_thread(worker.substr(0, 15), [queue = queue_] { queue->work(); });
}

CpuLane::~CpuLane() { stop(std::make_exception_ptr(std::runtime_error("fusedcomm: the lane was destroyed"))); }

EventPtr CpuLane::run(EventPtr after, Task task) {
  auto end = std::make_shared<CpuEvent>();
  finally(std::move(after), [end, task = std::move(task)](std::exception_ptr error) {
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
  finally(std::move(after), [end, transfer = std::move(transfer)](std::exception_ptr error) {
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

void CpuLane::finally(EventPtr after, Finally task) {
  CpuLaneQueue::Item item{std::static_pointer_cast<CpuEvent>(std::move(after)), std::move(task)};
  const std::shared_ptr<CpuEvent> event = item.after;
  if (!queue_->push(&item)) {
    item.work(queue_->stop_reason());
  } else if (!event || !event->subscribe(queue_)) {
    queue_->advance();
  }
}

void CpuLane::stop(std::exception_ptr reason) {
  std::lock_guard<std::mutex> one_at_a_time(stop_mutex_);
  std::deque<CpuLaneQueue::Item> abandoned = queue_->stop(std::move(reason));
  if (worker_.joinable()) {
    // A result's receiver may be the last owner of the lane. The worker then ends when its item has.
    worker_.get_id() == std::this_thread::get_id() ? worker_.detach() : worker_.join();
  }
  for (CpuLaneQueue::Item& item : abandoned) item.work(queue_->stop_reason());
}

}  // namespace fusedcomm
