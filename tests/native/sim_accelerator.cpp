#include "sim_accelerator.h"

#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <utility>

#include "require.h"
#include "sim_memory.h"
#include "sim_stream.h"

extern "C" int fake_spoils_capture();
extern "C" int fake_is_captured();

namespace sim {
namespace {

constexpr int64_t kMaxStreams = 100'000;  // of a device

struct DeviceState {
  std::mutex mutex;  // protects threads, clocks and blocks
  std::map<c10::StreamId, std::unique_ptr<StreamThread>> threads;
  std::map<c10::StreamId, Clock> clocks;
  Blocks blocks;
  std::atomic<bool> faulted{false};
  std::mutex fault_mutex;
  std::string fault;       // the exception's text
  std::mutex calls_mutex;  // protects what follows
  Calls calls;
  Failures failures;
  std::string failed_launch;
};

DeviceState& state(int index) {
  static std::array<DeviceState, kNumDevices> devices;
  REQUIRE(index >= 0 && index < kNumDevices, "there is no device %d", index);
  return devices[static_cast<size_t>(index)];
}

thread_local c10::DeviceIndex t_device = 0;
thread_local std::array<c10::StreamId, kNumDevices> t_streams = {};
thread_local bool t_count_calls = false, t_count_queries = false;

std::atomic<uint64_t> seed{1};
std::atomic<int64_t> num_resets{0};
std::atomic<bool> counts_all_waits{false};

// What this thread has waited for: all work that it enqueues later is ordered after that.
Clock& host_clock(DeviceState& device) {
  thread_local std::map<const DeviceState*, Clock> clocks;
  thread_local int64_t num_resets_seen = 0;
  if (const int64_t now = num_resets; std::exchange(num_resets_seen, now) != now) clocks.clear();
  return clocks[&device];
}

StreamThread& thread_of(DeviceState& device, c10::StreamId id) {
  auto& thread = device.threads[id];
  if (!thread) {
    const auto index = static_cast<uint32_t>(&device - &state(0)), stream = static_cast<uint32_t>(id);
    const uint64_t number = seed;
    std::seed_seq numbers{static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32), index, stream};
    thread = std::make_unique<StreamThread>(std::mt19937(numbers));
  }
  return *thread;
}

void check_fault(DeviceState& device) {
  if (!device.faulted) return;
  std::lock_guard<std::mutex> lock(device.fault_mutex);
  throw std::runtime_error("simulated fault: an earlier kernel failed on this device: " + device.fault);
}

void count(DeviceState& device, int64_t Calls::* kind) {
  if (!t_count_calls && !(counts_all_waits && kind == &Calls::waited_on_host)) return;
  std::lock_guard<std::mutex> lock(device.calls_mutex);
  ++(device.calls.*kind);
}

// Counts a call that records an event or makes a stream wait.
void count_ordering(DeviceState& device, int64_t Calls::* kind) {
  check_fault(device);
  count(device, kind);
  std::lock_guard<std::mutex> lock(device.calls_mutex);
  if (t_count_calls && device.calls.ordering() == device.failures.ordering) {
    throw std::runtime_error("simulated failure of a call");
  }
}

// Counts a launch. Returns whether the work is a fault.
bool count_launch(DeviceState& device, const c10::Stream& stream, const std::string& what) {
  check_fault(device);
  count(device, &Calls::launched);
  if (stream.id() == 0) count(device, &Calls::on_default);
  std::lock_guard<std::mutex> lock(device.calls_mutex);
  if (!t_count_calls) return false;
  const bool on_device = device.failures.on_device;
  REQUIRE(device.failed_launch.empty() || on_device, "\"%s\" is launched after the failure", what.c_str());
  if (device.calls.launched != device.failures.launch) return false;
  device.failed_launch = what;
  if (!on_device) throw std::runtime_error("simulated failure of a launch");
  return true;
}

struct SimEvent {
  SimEvent(DeviceState& recorded_on, bool with_time) : device(recorded_on), keeps_time(with_time) {}

  std::shared_ptr<Recording> get() {
    std::lock_guard<std::mutex> lock(mutex);
    return last;
  }
  SteadyTime wait() {
    const std::shared_ptr<Recording> recording = get();
    const SteadyTime time = recording->wait();
    merge(&host_clock(device), recording->clock);
    check_fault(device);
    return time;
  }
  // The time of the last recording, which must be reached: CUDA reports an error otherwise.
  SteadyTime time() {
    REQUIRE(keeps_time, "the time of an event that keeps none");
    const std::shared_ptr<Recording> recording = get();
    REQUIRE(recording->is_reached(), "the time of an event that is not reached yet");
    return recording->wait();
  }

  DeviceState& device;
  const bool keeps_time;
  std::mutex mutex;
  std::shared_ptr<Recording> last;
};

// The caller has locked `device`.
std::shared_ptr<Recording> enqueue_recording(DeviceState& device, c10::StreamId id) {
  auto recording = std::make_shared<Recording>(device.clocks[id]);
  thread_of(device, id).push([recording] { recording->mark(); });
  return recording;
}

std::vector<c10::Stream> streams_of(int index) {
  std::vector<c10::Stream> streams;
  std::lock_guard<std::mutex> lock(state(index).mutex);
  for (const auto& [id, thread] : state(index).threads) {
    streams.push_back(c10::Stream(c10::Stream::UNSAFE, device(index), id));
  }
  return streams;
}

// Ends the test if the thread's question, or its wait, would spoil a capture on a GPU.
void check_capture(const char* what) {
  REQUIRE(!fake_spoils_capture(), "%s while a step is captured spoils the graph", what);
}

struct GuardImpl final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {type(), std::exchange(t_device, device.index())};
  }
  c10::Device getDevice() const override { return {type(), t_device}; }
  void setDevice(c10::Device device) const override { t_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { t_device = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }

  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, t_streams[static_cast<size_t>(device.index())]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    DeviceState& sim = state(device.index());
    std::lock_guard<std::mutex> lock(sim.mutex);
    thread_of(sim, 0);
    const auto id = static_cast<c10::StreamId>(sim.threads.size());
    thread_of(sim, id);
    return c10::Stream(c10::Stream::UNSAFE, device, id);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto& current = t_streams[static_cast<size_t>(stream.device_index())];
    return c10::Stream(c10::Stream::UNSAFE, stream.device(), std::exchange(current, stream.id()));
  }
  // Only a thread of count_queries() learns it: streams that are used again would have other pauses.
  bool queryStream(const c10::Stream& stream) const override {
    check_capture("a question whether a stream is idle");
    DeviceState& sim = state(stream.device_index());
    std::lock_guard<std::mutex> lock(sim.mutex);
    return t_count_queries && thread_of(sim, stream.id()).is_idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    check_capture("a wait for a stream");
    synchronize(stream, /*counts=*/true);
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    REQUIRE(!fake_is_captured(), "a wait for the device while a step is captured spoils the graph");
    for (const c10::Stream& stream : streams_of(index)) synchronizeStream(stream);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.device_index() * kMaxStreams + stream.id() + 1);  // not null
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data.get(), stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex index,
              const c10::EventFlag flag) const override {
    REQUIRE(index == -1 || index == stream.device_index(), "an event of device %d recorded on device %d", index,
            stream.device_index());
    DeviceState& sim = state(stream.device_index());
    count_ordering(sim, &Calls::recorded);
    if (*event == nullptr) {
      count(sim, &Calls::created);
      *event = new SimEvent(sim, flag == c10::EventFlag::BACKEND_DEFAULT);
    }
    auto* recorded = static_cast<SimEvent*>(*event);
    std::lock_guard<std::mutex> lock(sim.mutex);
    auto recording = enqueue_recording(sim, stream.id());
    std::lock_guard<std::mutex> event_lock(recorded->mutex);
    recorded->last = std::move(recording);
  }
  void block(void* event, const c10::Stream& stream) const override {
    DeviceState& sim = state(stream.device_index());
    count_ordering(sim, &Calls::waited);
    auto recording = static_cast<SimEvent*>(event)->get();
    std::lock_guard<std::mutex> lock(sim.mutex);
    merge(&sim.clocks[stream.id()], recording->clock);
    thread_of(sim, stream.id()).push([recording] { recording->wait(); });
  }
  bool queryEvent(void* event) const override {
    check_capture("a question whether an event is reached");
    check_fault(static_cast<SimEvent*>(event)->device);
    count(static_cast<SimEvent*>(event)->device, &Calls::asked);
    const std::shared_ptr<Recording> recording = static_cast<SimEvent*>(event)->get();
    if (!recording->is_reached()) return false;
    if (t_count_queries) merge(&host_clock(static_cast<SimEvent*>(event)->device), recording->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    check_capture("a wait for an event");
    count(static_cast<SimEvent*>(event)->device, &Calls::waited_on_host);
    static_cast<SimEvent*>(event)->wait();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    count(static_cast<SimEvent*>(event)->device, &Calls::destroyed);
    delete static_cast<SimEvent*>(event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    count(static_cast<SimEvent*>(from)->device, &Calls::timed);
    const SteadyTime begin = static_cast<SimEvent*>(from)->time();
    return std::chrono::duration<double, std::milli>(static_cast<SimEvent*>(to)->time() - begin).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl);

}  // namespace

c10::Stream stream_of(void* handle) {
  const int64_t number = reinterpret_cast<int64_t>(handle) - 1;
  return c10::Stream(c10::Stream::UNSAFE, device(static_cast<int>(number / kMaxStreams)), number % kMaxStreams);
}

void synchronize(const c10::Stream& stream, bool counts) {
  DeviceState& sim = state(stream.device_index());
  std::shared_ptr<Recording> end;
  {
    std::lock_guard<std::mutex> lock(sim.mutex);
    end = enqueue_recording(sim, stream.id());
  }
  end->wait();
  if (counts) {
    count(sim, &Calls::waited_on_host);
    merge(&host_clock(sim), end->clock);
  }
  check_fault(sim);
}

c10::Device device(int index) { return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)}; }

c10::Stream current_stream(int index) {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1).getStream(device(index));
}

void launch(const c10::Stream& stream, const std::string& what, const std::vector<Access>& accesses,
            std::function<void()> work) {
  DeviceState& sim = state(stream.device_index());
  if (count_launch(sim, stream, what)) work = [] { throw std::runtime_error("illegal address"); };
  std::lock_guard<std::mutex> lock(sim.mutex);
  merge(&sim.clocks[stream.id()], host_clock(sim));
  check_order(&sim.blocks, &sim.clocks[stream.id()], stream.id(), what, accesses);
  thread_of(sim, stream.id()).push([&sim, work = std::move(work)] {
    if (sim.faulted) return;
    try {
      work();
    } catch (const std::exception& e) {
      std::lock_guard<std::mutex> fault_lock(sim.fault_mutex);
      sim.fault = e.what();
      sim.faulted = true;
    }
  });
}

void set_seed(uint64_t number) { seed = number; }
void count_waits_of_all_threads() { counts_all_waits = true; }

std::byte* allocate(const c10::Stream& stream, int64_t nbytes) {
  auto* const data = static_cast<std::byte*>(::operator new(static_cast<size_t>(nbytes), kCacheLine));
  std::memset(data, 0, static_cast<size_t>(nbytes));
  DeviceState& sim = state(stream.device_index());
  std::lock_guard<std::mutex> lock(sim.mutex);
  Clock& clock = sim.clocks[stream.id()];
  merge(&clock, host_clock(sim));
  const PastAccess made{0, nbytes, /*writes=*/true, stream.id(), ++clock[stream.id()], "its allocation"};
  sim.blocks[data] = {std::unique_ptr<std::byte, Delete>(data), nbytes, stream.id(), {}, false, {made}, {}};
  return data;
}

void note_copy(const void* data, const void* host, int64_t nbytes, c10::Device device) {
  DeviceState& sim = state(device.index());
  std::lock_guard<std::mutex> lock(sim.mutex);
  Block* const block = block_of(&sim.blocks, data);
  if (!block || block->memory.get() != data) return;
  const auto* const bytes = static_cast<const std::byte*>(host);
  block->enqueued.assign(bytes, bytes + nbytes);
}

const void* enqueued(const void* data, c10::Device device) {
  if (!data) return nullptr;
  DeviceState& sim = state(device.index());
  std::lock_guard<std::mutex> lock(sim.mutex);
  const Block* const block = block_of(&sim.blocks, data);
  REQUIRE(block, "%p is not memory of its device", data);
  const auto offset = static_cast<size_t>(static_cast<const std::byte*>(data) - block->memory.get());
  REQUIRE(offset < block->enqueued.size(), "%p was not copied from the host", data);
  return block->enqueued.data() + offset;
}

void record_use(const void* data, const c10::Stream& stream) {
  DeviceState& sim = state(stream.device_index());
  std::lock_guard<std::mutex> lock(sim.mutex);
  Block* const block = block_of(&sim.blocks, data);
  if (block && block->home != stream.id()) block->users.insert(stream.id());
}

void give_back(const void* data) {
  for (int index = 0; index < kNumDevices; ++index) {
    DeviceState& sim = state(index);
    std::lock_guard<std::mutex> lock(sim.mutex);
    Block* const block = block_of(&sim.blocks, data);
    if (!block) continue;
    block->is_given_back = true;
    {
      std::lock_guard<std::mutex> calls_lock(sim.calls_mutex);
      sim.calls.of_allocator += static_cast<int64_t>(block->users.size());
    }
    // What is ordered before all later work of its stream: work that the host, this stream or a recorded one has had.
    Clock ended = sim.clocks[block->home];
    merge(&ended, host_clock(sim));
    for (const c10::StreamId user : block->users) merge(&ended, sim.clocks[user]);
    for (const PastAccess& access : block->past) {
      REQUIRE(access.index <= ended[access.stream],
              "memory of stream %d was given back, and \"%s\" on stream %d may still use it",
              static_cast<int>(block->home), access.what.c_str(), static_cast<int>(access.stream));
    }
    return;
  }
  REQUIRE(false, "%p is not memory of a device", data);
}

void free_memory(int index) {
  for (const c10::Stream& stream : streams_of(index)) synchronize(stream, /*counts=*/false);
  DeviceState& sim = state(index);
  std::lock_guard<std::mutex> lock(sim.mutex);
  std::erase_if(sim.blocks, [](const auto& block) { return block.second.is_given_back; });
}

int64_t num_blocks(int index) {
  DeviceState& sim = state(index);
  std::lock_guard<std::mutex> lock(sim.mutex);
  return std::ranges::count_if(sim.blocks, [](const auto& block) { return !block.second.is_given_back; });
}

void count_queries(bool count) { t_count_queries = count; }

void set_pause(int index, int stream, int microseconds) {
  DeviceState& sim = state(index);
  std::lock_guard<std::mutex> lock(sim.mutex);
  thread_of(sim, stream).pause_us = microseconds;
}

CountCalls::CountCalls(bool count) : before_(std::exchange(t_count_calls, count)) {}
CountCalls::~CountCalls() { t_count_calls = before_; }
Calls calls(int index) {
  DeviceState& sim = state(index);
  std::lock_guard<std::mutex> lock(sim.calls_mutex);
  return sim.calls;
}
void fail(int index, const Failures& failures) {
  DeviceState& sim = state(index);
  std::lock_guard<std::mutex> lock(sim.calls_mutex);
  sim.failures = failures;
  sim.calls = {};
}
std::string failed_launch(int index) {
  DeviceState& sim = state(index);
  std::lock_guard<std::mutex> lock(sim.calls_mutex);
  return sim.failed_launch;
}

void reset() {
  ++num_resets;
  for (int index = 0; index < kNumDevices; ++index) {
    DeviceState& sim = state(index);
    std::lock_guard<std::mutex> lock(sim.mutex);
    sim.threads.clear();
    sim.clocks.clear();
    sim.blocks.clear();
    sim.faulted = false;
    sim.calls = {};
    sim.failures = {};
    sim.failed_launch.clear();
  }
}

}  // namespace sim
