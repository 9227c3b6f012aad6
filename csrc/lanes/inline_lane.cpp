#include "lanes/inline_lane.h"

#include <future>
#include <utility>

namespace fusedcomm {
namespace {

EventPtr completed(std::exception_ptr error) {
  auto event = std::make_shared<CpuEvent>();
  event->complete(std::move(error));
  return event;
}

}  // namespace

std::exception_ptr InlineLane::error_before(const EventPtr& after) const {
  if (after) {
    if (auto error = static_cast<const CpuEvent&>(*after).error()) return error;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  return stop_reason_;
}

EventPtr InlineLane::run(EventPtr after, Task task) {
  std::exception_ptr error = error_before(after);
  if (!error) {
    try {
      task();
    } catch (...) {
      error = std::current_exception();
    }
  }
  return completed(std::move(error));
}

EventPtr InlineLane::start(EventPtr after, Transfer transfer) {
  std::exception_ptr error = error_before(after);
  if (!error) {
    // Shared with the transfer, which may still be in set_value() when get() has returned.
    auto ended = std::make_shared<std::promise<std::exception_ptr>>();
    try {
      transfer([ended](std::exception_ptr transfer_error) { ended->set_value(std::move(transfer_error)); });
      error = ended->get_future().get();
    } catch (...) {
      error = std::current_exception();
    }
  }
  return completed(std::move(error));
}

void InlineLane::finally(EventPtr after, Finally task) { task(error_before(after)); }

void InlineLane::stop(std::exception_ptr reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!stop_reason_) stop_reason_ = std::move(reason);
}

}  // namespace fusedcomm
