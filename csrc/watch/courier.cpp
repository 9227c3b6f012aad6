#include "watch/courier.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <utility>

#include "lanes/threads.h"

namespace fusedcomm {

// The state shared with the thread, which may outlive the courier.
struct Courier::Desk {
  std::mutex mutex;
  std::condition_variable changed;
  StorePtr store;
  Errand errand;  // empty: none is waiting or running
  bool stopping = false;
  bool ended = false;                  // whether the thread has ended
  std::optional<std::string> loss;     // see loss()
  std::optional<std::string> problem;  // what the running errand threw or, if none is running, the last one

  // Used only by the thread. Whether the store has been cloned after an error.
  bool was_renewed = false;

  void work() {
    std::optional<std::string> no_clone = run([this] { store = store->clone(); });
    std::unique_lock<std::mutex> lock(mutex);
    loss = problem = std::move(no_clone);
    if (loss) errand = nullptr;
    changed.notify_all();
    for (;;) {
      changed.wait(lock, [this] { return stopping || errand; });
      if (stopping) break;
      problem.reset();
      lock.unlock();
      std::optional<std::string> what = run([this] { errand(*store); });
      if (what && !was_renewed) {
        was_renewed = true;
        lock.lock();
        problem = what;  // set before reconnecting, which may take long
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
    lock.unlock();
    // Without the lock, since releasing a store written in Python takes the GIL. It is part of what stop() does not
    // wait for: the last reference to a FileStore whose folder is gone waits for the store's timeout.
    store.reset();
    lock.lock();
    ended = true;
    changed.notify_all();
  }

  // Returns the first line of what `call` threw, or nothing if it did not throw.
  template <typename Call>
  static std::optional<std::string> run(const Call& call) {
    try {
      call();
      return std::nullopt;
    } catch (const std::exception& error) {
      std::string what = error.what();
      what.resize(std::min(what.size(), what.find('\n')));  // torch's errors continue with a backtrace
      return what.empty() ? "unknown error" : what;
    }
  }
};

Courier::Courier(StorePtr store) : desk_(std::make_shared<Desk>()) {
  desk_->store = std::move(store);
  thread_ = start_thread("fc-courier", [desk = desk_] { desk->work(); });
}

std::optional<StoreProblem> Courier::send(Errand errand, std::chrono::duration<double> timeout) {
  using Kind = StoreProblem::Kind;
  const StoreProblem is_stopping{Kind::kStopping, "the engine is stopping"};
  std::unique_lock<std::mutex> lock(desk_->mutex);
  if (desk_->stopping) return is_stopping;
  if (desk_->loss) return StoreProblem{Kind::kFailed, *desk_->loss};
  if (desk_->errand) {
    return StoreProblem{desk_->problem ? Kind::kFailed : Kind::kSilent, "it has not answered yet"};
  }
  desk_->errand = std::move(errand);
  desk_->changed.notify_all();
  desk_->changed.wait_for(lock, timeout, [this] { return desk_->stopping || !desk_->errand; });
  if (desk_->stopping) return is_stopping;
  if (!desk_->errand) {
    if (!desk_->problem) return std::nullopt;
    return StoreProblem{Kind::kFailed, *desk_->problem};
  }
  const std::string late = "no answer within " + std::to_string(static_cast<int>(timeout.count() * 1e3)) + " ms";
  if (!desk_->problem) return StoreProblem{Kind::kSilent, late};
  return StoreProblem{Kind::kFailed, late + " of reconnecting after the error: " + *desk_->problem};
}

std::optional<std::string> Courier::loss() const {
  std::lock_guard<std::mutex> lock(desk_->mutex);
  return desk_->loss;
}

void Courier::stop() {
  if (!thread_.joinable()) return;
  // How long to wait for a request to end before the thread is detached.
  constexpr std::chrono::milliseconds kEndTimeout{100};
  bool ended;
  {
    std::unique_lock<std::mutex> lock(desk_->mutex);
    desk_->stopping = true;
    desk_->changed.notify_all();
    ended = desk_->changed.wait_for(lock, kEndTimeout, [this] { return desk_->ended; });
  }
  ended ? thread_.join() : thread_.detach();
}

}  // namespace fusedcomm
