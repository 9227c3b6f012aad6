#include "transport/store_client.h"

#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "lanes/threads.h"
#include "transport/error_text.h"

namespace fusedcomm {
namespace {

StorePtr connected(const StorePtr& store) {
  auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  const StorePtr innermost = prefixed ? prefixed->getUnderlyingNonPrefixStore() : store;
  return dynamic_cast<c10d::TCPStore*>(innermost.get()) ? store->clone() : store;
}

}  // namespace

// What is shared with the thread of a request, which may outlive the object.
struct StoreClient::Desk {
  explicit Desk(StorePtr of) : store(std::move(of)) {}

  void run(const Request& request) {
    if (!own) own = connected(store);
    try {
      request(*own);
    } catch (const std::exception& error) {
      {
        std::lock_guard<std::mutex> lock(mutex);
        problem = error_text(error);
      }
      own = connected(store);
      request(*own);
    }
  }

  const StorePtr store;
  StorePtr own;  // used by the request's thread alone; null before the first one
  std::mutex mutex;
  std::condition_variable changed;
  // Of the last request.
  bool is_under_way = false;
  std::string problem;
  std::exception_ptr error;
};

StoreClient::StoreClient(StorePtr store, std::chrono::milliseconds timeout)
    : desk_(std::make_shared<Desk>(std::move(store))), timeout_(timeout) {}

bool StoreClient::ask(Request request) {
  std::unique_lock<std::mutex> lock(desk_->mutex);
  if (desk_->is_under_way) return false;
  const auto run = [desk = desk_, request = std::move(request)] {
    std::exception_ptr error;
    try {
      desk->run(request);
    } catch (...) {
      error = std::current_exception();
    }
    std::lock_guard<std::mutex> done(desk->mutex);
    desk->error = std::move(error);
    desk->is_under_way = false;
    desk->changed.notify_all();
  };
  if (!desk_->error) {
    desk_->problem.clear();
    try {
      start_thread("fc-store", run).detach();
    } catch (const std::system_error&) {
      return false;
    }
    desk_->is_under_way = true;
    if (!desk_->changed.wait_for(lock, timeout_, [this] { return !desk_->is_under_way; })) return false;
  }
  if (desk_->error) std::rethrow_exception(std::exchange(desk_->error, nullptr));
  return true;
}

std::string StoreClient::problem() const {
  std::lock_guard<std::mutex> lock(desk_->mutex);
  return desk_->problem;
}

}  // namespace fusedcomm
