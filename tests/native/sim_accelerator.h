// An accelerator without hardware, so that what orders streams can be tested anywhere: c10's PrivateUse1 device type,
// whose streams are threads that work off a queue with random pauses, and whose events behave as CUDA's do: a wait
// refers to what was last recorded before it was enqueued, and recording anew does not disturb it.
//
// Two things find a wait that is missing. The pauses make the work happen in another order, and so give wrong bytes;
// that takes luck. What takes none: every piece of work names the memory that it touches, and when it is enqueued, what
// the waits so far order before it is known (a vector clock for each stream). Work that touches what earlier work
// wrote, or writes what it read, without being ordered after it ends the test, whatever the timing was.
//
// Each rank of a test has a device index of its own.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace sim {

inline constexpr int kNumDevices = 6;

// Elements [begin, end) of what `memory` names; any unit, as long as all work on that memory uses the same.
struct Access {
  const void* memory;
  int section;
  int64_t begin, end;
  bool writes;
};

c10::Device device(int index);
c10::Stream current_stream(int index);

// Enqueues `work`, as a kernel is launched. An exception from it is a fault of the device: it does nothing more, and
// every call that has to do with its streams throws.
void launch(const c10::Stream& stream, const std::string& what, const std::vector<Access>& accesses,
            std::function<void()> work);
int64_t num_launches(int index);
// Lets go of `memory` when the stream gets there.
void keep_until_reached(const c10::Stream& stream, std::shared_ptr<void> memory);

// How long a stream pauses at most before each item. Streams of a device are numbered as they were made; 0 is the
// default stream.
void set_pause(int index, int stream, int microseconds);

// Calls that a driver would have got, by kind. Setting and asking for the current device or stream is none: CUDA's
// runtime answers that itself.
struct Calls {
  int64_t launched = 0, recorded = 0, waited = 0;
  int64_t created = 0, destroyed = 0;                // events
  int64_t asked = 0, timed = 0, waited_on_host = 0;  // of events: whether they are reached, what lies between two
  int64_t total() const { return launched + recorded + waited + created + destroyed + asked + timed + waited_on_host; }
};

// While it lives, in this thread: calls count, and of those that record an event or make a stream wait the one whose
// number, from 1, was given to fail_call throws.
class CountCalls {
 public:
  explicit CountCalls(bool count);
  ~CountCalls();
  CountCalls(const CountCalls&) = delete;
  CountCalls& operator=(const CountCalls&) = delete;

 private:
  const bool before_;
};
void fail_call(int index, int64_t number);
int64_t num_calls(int index);  // that record or wait
Calls calls(int index);

// Ends all streams when they have nothing left to do, and starts over.
void reset();

}  // namespace sim
