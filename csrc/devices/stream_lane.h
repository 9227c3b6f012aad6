// A lane on an accelerator: a stream. A task runs at once, with the stream current, and enqueues its work; events order
// the streams, and the host never waits.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "lanes/lane.h"

namespace fusedcomm {

class StreamEvents;

// The end of what a stream had been given at some moment: other streams can wait for it, and if it was recorded as one
// that keeps the time, it is a stamp. Or the error because of which there is nothing to wait for.
class StreamEvent : public Event, public Stamp {
 public:
  StreamEvent(const c10::Stream& stream, std::shared_ptr<StreamEvents> pool)
      : stream_(stream), pool_(std::move(pool)) {}
  explicit StreamEvent(std::exception_ptr error) : error_(std::move(error)) {}
  ~StreamEvent() override;

  const std::exception_ptr& error() const { return error_; }
  const std::optional<c10::Stream>& stream() const { return stream_; }
  bool is_recorded() const { return event_ != nullptr; }
  // Once, before the stream is given more.
  void record(bool keeps_time);
  // What `stream` does from now on comes after it. Of a recorded one.
  void block(const c10::Stream& stream) const { event_->block(stream); }

  // As a stamp, of one that keeps the time.
  bool reached() const override;
  bool is_known_reached() const override { return is_known_reached_; }
  void mark_reached() const override { is_known_reached_ = true; }
  double ms_since(const Stamp& earlier) const override;

 private:
  void wait_on_host() const;

  const std::exception_ptr error_;
  const std::optional<c10::Stream> stream_;
  const std::shared_ptr<StreamEvents> pool_;
  std::unique_ptr<c10::Event> event_;
  mutable std::atomic<bool> is_known_reached_{false};
};
using StreamEventPtr = std::shared_ptr<StreamEvent>;

// Makes events and uses those that nobody holds any more again: a wait that was enqueued refers to what was recorded
// before it, so recording anew does not disturb it.
class StreamEvents : public std::enable_shared_from_this<StreamEvents> {
 public:
  // Not recorded yet.
  StreamEventPtr make(const c10::Stream& stream) { return std::make_shared<StreamEvent>(stream, shared_from_this()); }
  // Recorded now, and keeps the time.
  StreamEventPtr now(const c10::Stream& stream);

 private:
  friend class StreamEvent;
  std::unique_ptr<c10::Event> take(c10::DeviceType type, bool keeps_time);
  void give_back(std::unique_ptr<c10::Event> event);

  std::mutex mutex_;
  std::vector<std::unique_ptr<c10::Event>> spare_, spare_timed_;
};

// A stream of ours, which several lanes may share. Each call to the driver takes a microsecond or so of the thread that
// runs the backward pass, so an event is recorded only where somebody needs it: another stream waits for it, its time
// is asked for, or the stream goes on while somebody still holds it. Used by one thread at a time, as its lanes are.
class LaneStream {
 public:
  LaneStream(const c10::Stream& stream, std::shared_ptr<StreamEvents> events)
      : stream_(stream), events_(std::move(events)) {}

  const c10::Stream& stream() const { return stream_; }
  // The end of what the stream has been given so far.
  EventPtr end();
  // The same as a moment; one event with end() if that has not been recorded.
  StampPtr stamp();
  // Call it before the stream is given more: who holds its end must not wait for that, too.
  void go_on();
  // What the stream is given from now on comes after `event`.
  void wait_for(StreamEvent& event);

 private:
  const c10::Stream stream_;
  const std::shared_ptr<StreamEvents> events_;
  std::weak_ptr<StreamEvent> end_;
};

class StreamLane : public Lane {
 public:
  explicit StreamLane(std::shared_ptr<LaneStream> stream) : stream_(std::move(stream)) {}

  void wait(EventPtr event) override;
  EventPtr run(EventPtr after, Task task) override;
  // The transfer has been enqueued when it returns, and has called its completion.
  EventPtr start(EventPtr after, Transfer transfer) override;
  void finally(EventPtr after, Finally task) override;
  void stop(std::exception_ptr reason) override;

 private:
  // Makes the stream wait for `after`; returns the error that keeps the next task from running.
  std::exception_ptr error_before(const EventPtr& after);

  const std::shared_ptr<LaneStream> stream_;
  std::mutex mutex_;
  std::exception_ptr stop_reason_;
};

}  // namespace fusedcomm
