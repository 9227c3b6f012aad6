// Ordered work, the events between it and the moments it reached: all that the engine knows about time.
//
// A lane runs what it is given one after another; an event marks the end of one piece of work. On CPU a lane is a
// queue, with a thread where its work takes a while, and an event a completion flag (cpu_lane.h); on an accelerator a
// lane is a stream and an event a stream event (stream_lane.h): there a task runs at once and enqueues its work. The
// engine only ever says "run this on that lane, after this event".
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>

namespace fusedcomm {

class Event {
 public:
  virtual ~Event() = default;
};
using EventPtr = std::shared_ptr<Event>;

// A moment on a lane, known once the lane has reached it.
class Stamp {
 public:
  virtual ~Stamp() = default;
  // May ask the device, which costs a call.
  virtual bool reached() const = 0;
  // Whether that is known without asking, and what says so to the others: one that lies before another is reached, too.
  virtual bool is_known_reached() const { return true; }
  virtual void mark_reached() const {}
  // Both of one device; waits until they are reached. Negative if `earlier` was the later one.
  virtual double ms_since(const Stamp& earlier) const = 0;
};
using StampPtr = std::shared_ptr<Stamp>;

// An event, null where nothing is ever enqueued, and when it is reached.
struct Moment {
  EventPtr event;
  StampPtr stamp;
};

// Which stage of a bucket a lane is for. Those of the second row are made only for sums on two levels (engine.h).
enum class LaneRole : uint8_t { kPack, kScatter, kReduce, kGather, kUnpack, kLocalReduce, kCrossScatter, kCrossGather };

class Lane {
 public:
  using Task = std::function<void()>;
  // Called once, from any thread, when a transfer has ended; a null pointer means success.
  using Completion = std::function<void(std::exception_ptr)>;
  using Transfer = std::function<void(Completion)>;
  using Finally = std::function<void(std::exception_ptr)>;

  virtual ~Lane() = default;

  // Everything submitted from now on runs after `event` (may be null), whether or not that failed.
  virtual void wait(EventPtr event) = 0;

  // Runs `task` after `after` (may be null) and after everything submitted before. If `after` failed, the task is
  // skipped and the returned event fails with the same error; an exception from the task fails it too.
  virtual EventPtr run(EventPtr after, Task task) = 0;

  // The same for work that goes on after the call that starts it: the event completes with the transfer, the lane
  // goes on at once, so several transfers can be in flight.
  virtual EventPtr start(EventPtr after, Transfer transfer) = 0;

  // Runs `task` whether or not `after` failed, with its error.
  virtual void finally(EventPtr after, Finally task) = 0;

  // Fails everything not yet run with `reason` and ends the lane. Idempotent.
  virtual void stop(std::exception_ptr reason) = 0;
};

}  // namespace fusedcomm
