// A lane on an accelerator is a stream. A task runs at once, with the stream current, and enqueues its work. Events
// order the streams, and the host never waits.
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

// The end of the work that a stream had been given at some moment. Other streams can wait for it. If it is recorded
// with keeps_time, it is also a stamp. An event that holds an error instead is never recorded: there is nothing to wait
// for.
class StreamEvent : public Event, public Stamp {
 public:
  StreamEvent(const c10::Stream& stream, std::shared_ptr<StreamEvents> pool)
      : stream_(stream), pool_(std::move(pool)) {}
  explicit StreamEvent(std::exception_ptr error) : error_(std::move(error)) {}
  ~StreamEvent() override;

  const std::exception_ptr& error() const { return error_; }
  const std::optional<c10::Stream>& stream() const { return stream_; }
  bool is_recorded() const { return event_ != nullptr; }
  // Records the event unless it is recorded already. Call it before the stream is given more work.
  void record(bool keeps_time);
  // Makes the later work of `stream` wait for this event, which must be recorded.
  void block(const c10::Stream& stream) const { event_->block(stream); }

  // The stamp's functions; the event must be recorded with keeps_time.
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

// Makes events, and reuses those that are no longer held. Reuse is safe: a wait that was enqueued refers to what had
// been recorded before it, so recording the event again does not change it.
class StreamEvents : public std::enable_shared_from_this<StreamEvents> {
 public:
  // An event of `stream` that is not recorded yet.
  StreamEventPtr make(const c10::Stream& stream) { return std::make_shared<StreamEvent>(stream, shared_from_this()); }
  // An event of `stream` that is recorded now, with keeps_time.
  StreamEventPtr now(const c10::Stream& stream);

 private:
  friend class StreamEvent;
  std::unique_ptr<c10::Event> take(c10::DeviceType type, bool keeps_time);
  void give_back(std::unique_ptr<c10::Event> event);

  std::mutex mutex_;
  std::vector<std::unique_ptr<c10::Event>> spare_, spare_timed_;
};

// A stream of our own, which several lanes may share. Each call to the driver costs the thread that runs the backward
// pass about a microsecond. An event is therefore recorded only where it is needed: if another stream waits for it, if
// its time is asked for, or if the stream is given more work while the event is still held. Like its lanes, it is used
// by one thread at a time.
class LaneStream {
 public:
  LaneStream(const c10::Stream& stream, std::shared_ptr<StreamEvents> events)
      : stream_(stream), events_(std::move(events)) {}

  const c10::Stream& stream() const { return stream_; }
  // The end of the work that the stream has been given so far.
  EventPtr end();
  // The same as a stamp. It is the event of end(), if that is still held and not recorded yet.
  StreamEventPtr stamp();
  // Call it before the stream is given more work: a holder of end() must not wait for that work, too.
  void go_on();
  // Makes the stream's later work wait for `event`.
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
  // The transfer must have been enqueued, and have called its completion, when it returns.
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
