#include "frontends/reducer/problem.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "lanes/threads.h"

namespace fusedcomm {
namespace {

constexpr std::chrono::seconds kStoreTimeout{2};

const std::string& problem_key() {
  static const std::string key = "problem";
  return key;
}

}  // namespace

// What is shared with the thread of a request, which may outlive the object.
struct Problem::Desk {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_busy = false, has_succeeded = false;
  // Used by the request's thread alone. `own`: the clone; null before the first request and after a failed one.
  StorePtr store, own;
};

Problem::Problem(StorePtr store) : desk_(std::make_shared<Desk>()) { desk_->store = std::move(store); }

void Problem::publish(const std::string& text) {
  ask([text](c10d::Store& store) {
    if (!store.check({problem_key()})) store.set(problem_key(), text);
  });
}

void Problem::note_pass(int rank, int64_t pass) {
  ask([key = "pass/" + std::to_string(rank), text = std::to_string(pass)](c10d::Store& store) {
    store.set(key, text);
  });
}

std::string Problem::read() {
  const auto found = std::make_shared<std::string>();
  const bool has_succeeded = ask([found](c10d::Store& store) {
    if (store.check({problem_key()})) *found = store.get_to_str(problem_key());
  });
  return has_succeeded ? *found : std::string();
}

bool Problem::ask(Request request) {
  std::unique_lock<std::mutex> lock(desk_->mutex);
  if (desk_->is_busy) return false;
  std::thread thread;
  try {
    thread = start_thread("fc-problem", [desk = desk_, request = std::move(request)] {
      bool has_succeeded = false;
      try {
        if (!desk->own) desk->own = desk->store->clone();
        request(*desk->own);
        has_succeeded = true;
      } catch (const std::exception&) {
        desk->own.reset();
      }
      std::lock_guard<std::mutex> lock(desk->mutex);
      desk->has_succeeded = has_succeeded;
      desk->is_busy = false;
      desk->changed.notify_all();
    });
  } catch (const std::system_error&) {  // no thread is left
    return false;
  }
  desk_->is_busy = true;
  const bool has_ended = desk_->changed.wait_for(lock, kStoreTimeout, [this] { return !desk_->is_busy; });
  const bool has_succeeded = has_ended && desk_->has_succeeded;
  lock.unlock();
  has_ended ? thread.join() : thread.detach();
  return has_succeeded;
}

}  // namespace fusedcomm
