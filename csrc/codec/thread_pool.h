// The threads that share one codec stage. Idle threads block and never spin: where ranks share cores, spinning threads
// take time from threads that have work.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "lanes/threads.h"

namespace fusedcomm {

// Runs jobs of numbered items. The caller works on its own job too, so a job never waits for another job to end.
class ThreadPool {
 public:
  // Throws std::system_error if the system cannot start another thread.
  explicit ThreadPool(int num_workers) {
    try {
      for (int i = 0; i < num_workers; ++i) workers_.push_back(start_thread("codec-pool", [this] { loop(); }));
    } catch (...) {
      join();
      throw;
    }
  }

  ~ThreadPool() { join(); }

  // Calls item(i) for every i below num_items and returns when all calls have returned. Any thread may call this.
  void run(int64_t num_items, const std::function<void(int64_t)>& item) {
    if (workers_.empty() || num_items < 2) {
      for (int64_t i = 0; i < num_items; ++i) item(i);
      return;
    }
    Job job{num_items, item};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      jobs_.push_back(&job);
    }
    wake_.notify_all();
    job.drain();
    std::unique_lock<std::mutex> lock(mutex_);
    retire(&job);
    job.idle.wait(lock, [&job] { return job.num_helpers == 0; });
  }

 private:
  void join() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  struct Job {
    Job(int64_t num_items, const std::function<void(int64_t)>& item) : num_items(num_items), item(item) {}
    void drain() {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_items;) item(i);
    }

    const int64_t num_items;
    const std::function<void(int64_t)>& item;
    std::atomic<int64_t> next{0};
    int num_helpers = 0;  // workers inside drain(); guarded by the pool's mutex
    std::condition_variable idle;
  };

  void loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
      if (stopping_) return;
      Job* job = jobs_.front();
      ++job->num_helpers;
      lock.unlock();
      job->drain();
      lock.lock();
      retire(job);  // every item is taken, so no other worker needs this job
      if (--job->num_helpers == 0) job->idle.notify_one();
    }
  }

  void retire(Job* job) { jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), job), jobs_.end()); }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Job*> jobs_;  // oldest first
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace fusedcomm
