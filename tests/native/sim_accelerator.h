// A simulated accelerator, so that the order of streams can be tested without hardware. It is c10's PrivateUse1 device
// type. Its streams are threads that work off a queue with random pauses. Its events behave like CUDA's: a wait refers
// to the last recording before the wait was enqueued, and a later recording does not change it.
//
// A missing wait is found in two ways. First, the pauses change the order of the work and so may give wrong bytes; this
// depends on luck. Second, every piece of work names the memory that it accesses. When work is enqueued, a vector clock
// for each stream tells which earlier work is ordered before it. If the work accesses memory that earlier work wrote,
// or writes memory that earlier work read, and is not ordered after it, the test fails, whatever the timing was.
//
// Memory comes from an allocator like torch's caching allocator: memory that is given back goes to its stream again,
// and the test fails if other streams may still use it.
//
// Each rank of a test has its own device index.
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace sim {

inline constexpr int kNumDevices = 6;

// The pauses of all streams derive from this number. Call it before any stream is made.
void set_seed(uint64_t seed);

// An access to bytes of allocate(), which may begin anywhere in a block; of none, `memory` may be null.
struct Access {
  const void* memory;
  int64_t nbytes;
  bool writes;
};

c10::Device device(int index);
c10::Stream current_stream(int index);
// The stream with this native handle.
c10::Stream stream_of(void* handle);
// Waits on the host. If it `counts`, this thread's later work is ordered after what the stream has been given so far.
void synchronize(const c10::Stream& stream, bool counts);
// Makes it torch's accelerator, as pinned memory and Python's streams need. Call it once.
void become_torchs_accelerator();
// From now on waits of all threads count, autograd's among them, and not only those of threads with CountCalls.
void count_waits_of_all_threads();

// Enqueues `work`, as a kernel launch does. An exception from `work` is a fault of the device: the device does no more
// work, and every later call that uses its streams or events throws.
void launch(const c10::Stream& stream, const std::string& what, const std::vector<Access>& accesses,
            std::function<void()> work);

// Returns zeroed memory, aligned to 64 bytes, that belongs to a stream. As with cudaMallocAsync it is there once the
// stream reaches this: work that accesses it must be ordered after that.
std::byte* allocate(const c10::Stream& stream, int64_t nbytes);
// Notes what an enqueued copy from the host brings to `data`, the begin of memory of allocate().
void note_copy(const void* data, const void* host, int64_t nbytes, c10::Device device);
// The same byte of what was noted, which the host may read before the stream has come to the copy. Null for null.
const void* enqueued(const void* data, c10::Device device);
// Like torch's record_stream(): memory that is given back also waits for the work that this stream has been given by
// then. `data` may point anywhere into the memory; does nothing if it is not of allocate().
void record_use(const void* data, const c10::Stream& stream);
// Gives memory of allocate() back to its stream. The test fails if work that accesses it is neither on that stream, nor
// on one that was recorded, nor ordered before that stream's next work. It also fails if later work accesses it.
void give_back(const void* data);

// Whether this thread's later work is ordered after an event that it asks about from now on, if that is reached, as on
// a GPU. It is not otherwise, because an event that is reached by luck would hide a missing wait.
void count_queries(bool count);

// Sets the longest pause of a stream before an item of work; not every item has a pause. The streams of a device are
// numbered in the order in which they were made; 0 is the default stream.
void set_pause(int index, int stream, int microseconds);

// The numbers of calls that a real driver would have received, by kind. Calls that set or return the current device or
// stream do not count: CUDA's runtime answers those itself.
struct Calls {
  int64_t launched = 0, recorded = 0, waited = 0;
  int64_t on_default = 0;              // of the launches, those on the default stream
  int64_t created = 0, destroyed = 0;  // events
  // asked: whether an event is reached; timed: the time between two events; waited_on_host: the host's wait for one, or
  // for a stream.
  int64_t asked = 0, timed = 0, waited_on_host = 0;
  // The events that torch's allocator would record, and ask about, for memory that is given back: one for each stream
  // of record_use(). On all threads; not in total(), because only some of these are of a bucket.
  int64_t of_allocator = 0;
  int64_t ordering() const { return recorded + waited; }
  int64_t total() const { return launched + ordering() + created + destroyed + asked + timed + waited_on_host; }
};

// While an object of this class exists with `count` true, this thread's calls count.
class CountCalls {
 public:
  explicit CountCalls(bool count);
  ~CountCalls();
  CountCalls(const CountCalls&) = delete;
  CountCalls& operator=(const CountCalls&) = delete;

 private:
  const bool before_;
};
Calls calls(int index);

// What fails once on a device. Both number the calls that count, from 1 after fail(); 0: none of them.
struct Failures {
  int64_t ordering = 0;  // of the calls that record an event or make a stream wait: the one that throws
  int64_t launch = 0;    // of the launches: the one that fails
  // Whether the launch is a fault of the device. Otherwise it throws, and every later launch that counts ends the test.
  bool on_device = false;
};
void fail(int index, const Failures& failures);  // begins calls(index) with 0
// What was to be launched when a launch failed; empty before.
std::string failed_launch(int index);

// Blocks of memory that have not been given back.
int64_t num_blocks(int index);

// Lets all streams of a device finish their work, and frees the memory that has been given back: an access to that is
// no longer found.
void free_memory(int index);

// Lets all streams finish their work, removes them, and resets all counts and faults.
void reset();

}  // namespace sim
