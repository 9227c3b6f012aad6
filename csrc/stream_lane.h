// A lane on an accelerator: a stream. A task runs at once, with the stream current, and enqueues its work; events order
// the streams, and the host never waits.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <mutex>
#include <vector>

#include "lane.h"

namespace fusedcomm {

// An event recorded on a stream, or the error because of which there was nothing to record.
class StreamEvent : public Event {
 public:
  StreamEvent(std::unique_ptr<c10::Event> event, std::exception_ptr error)
      : event_(std::move(event)), error_(std::move(error)) {}
  const std::exception_ptr& error() const { return error_; }
  // What `stream` does from now on comes after it.
  void block(const c10::Stream& stream) const {
    if (event_) event_->block(stream);
  }

 private:
  friend class StreamEvents;
  std::unique_ptr<c10::Event> event_;
  std::exception_ptr error_;
};

// Makes events and uses those that nobody holds any more again: a wait that was enqueued refers to what was recorded
// before it, so recording anew does not disturb it.
class StreamEvents : public std::enable_shared_from_this<StreamEvents> {
 public:
  EventPtr record(const c10::Stream& stream);
  EventPtr failed(std::exception_ptr error);

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<c10::Event>> spare_;
};

// A moment on a stream, by an event that keeps the time.
class StreamStamp : public Stamp {
 public:
  explicit StreamStamp(const c10::Stream& stream);
  bool reached() const override { return event_.query(); }
  double ms_since(const Stamp& earlier) const override;

 private:
  c10::Event event_;
};

class StreamLane : public Lane {
 public:
  StreamLane(const c10::Stream& stream, std::shared_ptr<StreamEvents> events)
      : stream_(stream), events_(std::move(events)) {}

  void wait(EventPtr event) override;
  EventPtr run(EventPtr after, Task task) override;
  // The transfer has been enqueued when it returns, and has called its completion.
  EventPtr start(EventPtr after, Transfer transfer) override;
  void finally(EventPtr after, Finally task) override;
  void stop(std::exception_ptr reason) override;

 private:
  // Makes the stream wait for `after`; returns the error that keeps the next task from running.
  std::exception_ptr error_before(const EventPtr& after);

  const c10::Stream stream_;
  const std::shared_ptr<StreamEvents> events_;
  std::mutex mutex_;
  std::exception_ptr stop_reason_;
};

}  // namespace fusedcomm
