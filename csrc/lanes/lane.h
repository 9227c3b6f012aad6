// Lanes run work in order, events order work between lanes, and stamps tell when work was reached. The engine uses no
// other notion of time.
//
// A lane runs its tasks one after another; an event marks the end of one task. On CPU a lane is a queue, with a thread
// if its work takes long, and an event is a completion flag (cpu_lane.h). On an accelerator a lane is a stream and an
// event is a stream event (stream_lane.h); a task runs at once and enqueues its work. The engine only says "run this on
// that lane, after this event".
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

// A point on a lane, whose time is known when the lane has reached it.
class Stamp {
 public:
  virtual ~Stamp() = default;
  // Whether the lane has reached the point. May ask the device, which costs a call.
  virtual bool reached() const = 0;
  // Whether the point is known to be reached without asking the device.
  virtual bool is_known_reached() const { return true; }
  // Call when the point is known to be reached, for example because a later one is.
  virtual void mark_reached() const {}
  // Returns the milliseconds from `earlier`, a stamp of the same device, to this one. Waits until both are reached.
  // Negative if `earlier` is in fact later.
  virtual double ms_since(const Stamp& earlier) const = 0;
};
using StampPtr = std::shared_ptr<Stamp>;

// Waits on the host until the lane has reached the point, if it has not.
inline void wait_for(const Stamp& point) {
  if (!point.reached()) point.ms_since(point);
}

// An event and the stamp of its time. The event is null on a device that enqueues nothing.
struct Moment {
  EventPtr event;
  StampPtr stamp;
};

// The stage of a bucket that a lane serves. Those from kLocalReduce on exist only for sums on two levels (engine.h).
enum class LaneRole : uint8_t {
  kPack,
  kScatter,
  kReduce,
  kGather,
  kUnpack,
  kLocalReduce,
  kCrossScatter,
  kCrossGather,
  kLocalGather
};

class Lane {
 public:
  using Task = std::function<void()>;
  // Called once, from any thread, when a transfer has ended; a null pointer means success.
  using Completion = std::function<void(std::exception_ptr)>;
  using Transfer = std::function<void(Completion)>;
  using Finally = std::function<void(std::exception_ptr)>;

  virtual ~Lane() = default;

  // Everything submitted from now on runs after `event` (may be null), whether or not `event` failed.
  virtual void wait(EventPtr event) = 0;

  // Runs `task` after `after` (may be null) and after everything submitted before. If `after` failed, the task is
  // skipped and the returned event fails with the same error; an exception from the task fails it too.
  virtual EventPtr run(EventPtr after, Task task) = 0;

  // As run(), for work that continues after the call that starts it. The event completes when the transfer ends. The
  // lane goes on at once, so several transfers can be in flight.
  virtual EventPtr start(EventPtr after, Transfer transfer) = 0;

  // Runs `task` whether or not `after` failed, and passes it the error of `after` (null if none).
  virtual void finally(EventPtr after, Finally task) = 0;

  // Fails everything not yet run with `reason` and ends the lane. Idempotent.
  virtual void stop(std::exception_ptr reason) = 0;
};

}  // namespace fusedcomm
