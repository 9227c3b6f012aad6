#include "stream_lane.h"

#include <c10/core/StreamGuard.h>

#include <stdexcept>
#include <utility>

namespace fusedcomm {

EventPtr StreamEvents::record(const c10::Stream& stream) {
  std::unique_ptr<c10::Event> event;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!spare_.empty()) {
      event = std::move(spare_.back());
      spare_.pop_back();
    }
  }
  if (!event) event = std::make_unique<c10::Event>(stream.device_type());
  event->record(stream);
  return {new StreamEvent(std::move(event), nullptr), [pool = weak_from_this()](StreamEvent* done) {
            if (auto events = pool.lock()) {
              std::lock_guard<std::mutex> lock(events->mutex_);
              events->spare_.push_back(std::move(done->event_));
            }
            delete done;
          }};
}

EventPtr StreamEvents::failed(std::exception_ptr error) {
  return std::make_shared<StreamEvent>(nullptr, std::move(error));
}

StreamStamp::StreamStamp(const c10::Stream& stream) : event_(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT) {
  event_.record(stream);
}

double StreamStamp::ms_since(const Stamp& earlier) const {
  const auto& from = static_cast<const StreamStamp&>(earlier);
  from.event_.synchronize();
  event_.synchronize();
  return from.event_.elapsedTime(event_);
}

std::exception_ptr StreamLane::error_before(const EventPtr& after) {
  if (after) {
    const auto& event = static_cast<const StreamEvent&>(*after);
    if (event.error()) return event.error();
    event.block(stream_);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  return stop_reason_;
}

void StreamLane::wait(EventPtr event) {
  if (event) static_cast<const StreamEvent&>(*event).block(stream_);
}

EventPtr StreamLane::run(EventPtr after, Task task) {
  try {
    if (auto error = error_before(after)) return events_->failed(error);
    c10::StreamGuard on_stream(stream_);
    task();
    return events_->record(stream_);
  } catch (...) {
    // What follows on this lane must not go on without it: the bucket's end tells only of its last chunk.
    const auto error = std::current_exception();
    stop(error);
    return events_->failed(error);
  }
}

EventPtr StreamLane::start(EventPtr after, Transfer transfer) {
  return run(std::move(after), [&transfer] {
    bool ended = false;
    std::exception_ptr error;
    transfer([&](std::exception_ptr transfer_error) {
      ended = true;
      error = std::move(transfer_error);
    });
    if (error) std::rethrow_exception(error);
    if (!ended) throw std::logic_error("the transport did not enqueue its transfer on the current stream");
  });
}

void StreamLane::finally(EventPtr after, Finally task) {
  std::exception_ptr error;
  try {
    error = error_before(after);
  } catch (...) {
    error = std::current_exception();
  }
  c10::StreamGuard on_stream(stream_);
  task(std::move(error));
}

void StreamLane::stop(std::exception_ptr reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!stop_reason_) stop_reason_ = std::move(reason);
}

}  // namespace fusedcomm
