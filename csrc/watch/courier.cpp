#include "watch/courier.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <utility>

namespace fusedcomm {

// Shared with the thread, which may outlive the courier.
struct Courier::Desk {
  std::mutex mutex;
  std::condition_variable changed;
  StorePtr store;
  Errand errand;  // empty: none waits or is under way
  bool stopping = false;
  bool ended = false;  // the thread
  std::string loss;
  std::string problem;  // of the errand under way, or of the last one

  // Of the thread alone.
  bool was_renewed = false;

  void work() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return stopping || errand; });
      if (stopping) break;
      problem.clear();
      lock.unlock();
      std::string what = run([this] { errand(*store); });
      if (!what.empty() && !was_renewed) {
        was_renewed = true;
        lock.lock();
        problem = what;  // it may take long to connect again
        lock.unlock();
        what = run([this] {
          store = store->clone();
          errand(*store);
        });
      }
      lock.lock();
      loss = problem = std::move(what);
      errand = nullptr;
      changed.notify_all();
    }
    ended = true;
    changed.notify_all();
    lock.unlock();
    store.reset();  // a store of Python's is released with the GIL, for which nobody must wait with the lock held
  }

  // Returns what `call` threw, in one line; empty if nothing.
  template <typename Call>
  static std::string run(const Call& call) {
    try {
      call();
      return "";
    } catch (const std::exception& error) {
      std::string what = error.what();
      what.resize(std::min(what.size(), what.find('\n')));  // torch's have a backtrace
      return what.empty() ? "unknown error" : what;
    }
  }
};

Courier::Courier(StorePtr store) : desk_(std::make_shared<Desk>()) {
  desk_->store = std::move(store);
  thread_ = std::thread([desk = desk_] { desk->work(); });
#if defined(__linux__)
  pthread_setname_np(thread_.native_handle(), "fc-courier");
#endif
}

std::string Courier::send(Errand errand, std::chrono::duration<double> limit) {
  std::unique_lock<std::mutex> lock(desk_->mutex);
  if (desk_->stopping) return "the engine is stopping";
  if (!desk_->loss.empty()) return desk_->loss;
  if (desk_->errand) return "it has not answered yet";
  desk_->errand = std::move(errand);
  desk_->changed.notify_all();
  desk_->changed.wait_for(lock, limit, [this] { return desk_->stopping || !desk_->errand; });
  if (desk_->stopping) return "the engine is stopping";
  if (!desk_->errand) return desk_->problem;
  const std::string late = "no answer within " + std::to_string(static_cast<int>(limit.count() * 1e3)) + " ms";
  return desk_->problem.empty() ? late : late + " of connecting again after: " + desk_->problem;
}

std::string Courier::loss() const {
  std::lock_guard<std::mutex> lock(desk_->mutex);
  return desk_->loss;
}

bool Courier::has_failed() const {
  std::lock_guard<std::mutex> lock(desk_->mutex);
  return !desk_->problem.empty() || !desk_->loss.empty();
}

void Courier::stop() {
  if (!thread_.joinable()) return;
  constexpr std::chrono::milliseconds kPatience{100};
  bool ended;
  {
    std::unique_lock<std::mutex> lock(desk_->mutex);
    desk_->stopping = true;
    desk_->changed.notify_all();
    ended = desk_->changed.wait_for(lock, kPatience, [this] { return desk_->ended; });
  }
  ended ? thread_.join() : thread_.detach();
}

}  // namespace fusedcomm
