#include "devices/stream_lane.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <stdexcept>
#include <utility>

namespace fusedcomm {
namespace {

// Makes a lane's stream the current one, unless it is: a switch asks CUDA's runtime for the current device several
// times. A lane's stream is current only within such an object, which has switched the device, too.
class OnStream {
 public:
  explicit OnStream(const c10::Stream& stream) {
    if (c10::impl::VirtualGuardImpl(stream.device_type()).getStream(stream.device()) != stream) guard_.emplace(stream);
  }

 private:
  std::optional<c10::StreamGuard> guard_;
};

}  // namespace

StreamEvent::~StreamEvent() {
  if (event_) pool_->give_back(std::move(event_));
}

void StreamEvent::record(bool keeps_time) {
  if (event_) return;
  auto event = pool_->take(stream_->device_type(), keeps_time);
  event->record(*stream_);
  event_ = std::move(event);
}

bool StreamEvent::reached() const {
  if (!is_known_reached_ && event_->query()) is_known_reached_ = true;
  return is_known_reached_;
}

void StreamEvent::wait_on_host() const {
  if (is_known_reached_) return;
  event_->synchronize();
  is_known_reached_ = true;
}

double StreamEvent::ms_since(const Stamp& earlier) const {
  const auto& from = static_cast<const StreamEvent&>(earlier);
  from.wait_on_host();
  wait_on_host();
  // c10::Event::elapsedTime() would query the device about both events first.
  return c10::impl::VirtualGuardImpl(stream_->device_type())
      .elapsedTime(from.event_->eventId(), event_->eventId(), stream_->device_index());
}

StreamEventPtr StreamEvents::now(const c10::Stream& stream) {
  StreamEventPtr event = make(stream);
  event->record(/*keeps_time=*/true);
  return event;
}

std::unique_ptr<c10::Event> StreamEvents::take(c10::DeviceType type, bool keeps_time) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& spare = keeps_time ? spare_timed_ : spare_;
    if (!spare.empty()) {
      auto event = std::move(spare.back());
      spare.pop_back();
      return event;
    }
  }
  const auto flag = keeps_time ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT;
  return std::make_unique<c10::Event>(type, flag);
}

void StreamEvents::give_back(std::unique_ptr<c10::Event> event) {
  std::lock_guard<std::mutex> lock(mutex_);
  (event->flag() == c10::EventFlag::BACKEND_DEFAULT ? spare_timed_ : spare_).push_back(std::move(event));
}

EventPtr LaneStream::end() {
  StreamEventPtr end = events_->make(stream_);
  end_ = end;
  return end;
}

StreamEventPtr LaneStream::stamp() {
  const StreamEventPtr end = end_.lock();
  if (!end || end->is_recorded()) return events_->now(stream_);
  end->record(/*keeps_time=*/true);
  return end;
}

void LaneStream::go_on() {
  if (const StreamEventPtr end = end_.lock()) end->record(/*keeps_time=*/false);
  end_.reset();
}

void LaneStream::wait_for(StreamEvent& event) {
  if (event.stream() == stream_) return;  // a stream runs its work in order
  event.record(/*keeps_time=*/false);     // its own stream has been given nothing since, or it would be recorded
  go_on();
  event.block(stream_);
}

std::exception_ptr StreamLane::error_before(const EventPtr& after) {
  if (after) {
    auto& event = static_cast<StreamEvent&>(*after);
    if (event.error()) return event.error();
    stream_->wait_for(event);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  return stop_reason_;
}

void StreamLane::wait(EventPtr event) {
  if (event) stream_->wait_for(static_cast<StreamEvent&>(*event));
}

EventPtr StreamLane::run(EventPtr after, Task task) {
  try {
    if (auto error = error_before(after)) return std::make_shared<StreamEvent>(error);
    after = nullptr;  // otherwise go_on() would find the event held and record it
    stream_->go_on();
    const OnStream on_stream(stream_->stream());
    task();
    return stream_->end();
  } catch (...) {
    // Later work on this lane must not run without this task: the bucket's end carries only its last chunk's error.
    const auto error = std::current_exception();
    stop(error);
    return std::make_shared<StreamEvent>(error);
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
  const OnStream on_stream(stream_->stream());
  task(std::move(error));
}

void StreamLane::stop(std::exception_ptr reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!stop_reason_) stop_reason_ = std::move(reason);
}

}  // namespace fusedcomm
