// Lanes on simulated streams, without an engine.
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "devices/stream_device.h"
#include "require.h"
#include "scenes.h"
#include "sim_accelerator.h"
#include "sim_kernels.h"

using namespace fusedcomm;

namespace {

// A wait is work, too: an end() from before the wait must not include the wait.
void lane_streams() {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
  const auto events = std::make_shared<StreamEvents>();
  const auto stream = [&] { return LaneStream(guard.getNewStream(sim::device(0), 0), events); };
  LaneStream first = stream(), second = stream(), third = stream();
  const sim::CountCalls counted(true);
  std::promise<void> gate;
  sim::launch(first.stream(), "gate", {}, [opened = gate.get_future().share()] { opened.wait(); });
  const EventPtr ready = second.end(), blocked = first.end();
  second.wait_for(static_cast<StreamEvent&>(*blocked));
  REQUIRE(sim::calls(0).recorded == 2, "an end() from before a wait is to be recorded before it");
  third.wait_for(static_cast<StreamEvent&>(*ready));
  third.stream().synchronize();  // does not return if the stream waits for the gate
  gate.set_value();
  second.stream().synchronize();
  sim::reset();
}

// A thread that only asks about events has the device as its current one.
void watching_thread() {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
  const auto device = sim::cuda_device(sim::device(1));
  std::thread watching([&] {
    device->enter_watching_thread();
    REQUIRE(guard.getDevice() == sim::device(1), "the watching thread's current device is %d",
            static_cast<int>(guard.getDevice().index()));
  });
  watching.join();
  sim::reset();
}

// A lane's later task does not delay those that wait for an earlier one. Times are known when both ends are reached.
void lane_tasks() {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
  const auto events = std::make_shared<StreamEvents>();
  const auto stream = [&] { return std::make_shared<LaneStream>(guard.getNewStream(sim::device(0), 0), events); };
  const auto of_first = stream(), of_second = stream();
  StreamLane first(of_first), second(of_second);
  const sim::CountCalls counted(true);
  const EventPtr end = first.run(nullptr, [] {});
  std::promise<void> gate;
  first.run(nullptr, [opened = gate.get_future().share()] {
    sim::launch(sim::current_stream(0), "gate", {}, [opened] { opened.wait(); });
  });
  REQUIRE(sim::calls(0).recorded == 1, "the next task did not record the end of the task before, which is still held");
  second.run(end, [] {});
  of_second->stream().synchronize();  // does not return if the lane waits for the gate

  const StreamEventPtr early = events->now(of_second->stream()), late = events->now(of_first->stream());
  REQUIRE(early->is_recorded() && late->is_recorded(), "now() did not record its event");
  std::thread opener([&gate] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    gate.set_value();
  });
  const double ms = early->ms_since(*late);
  opener.join();
  REQUIRE(ms < 0, "%g ms from a later moment to an earlier one", ms);
  sim::launch(of_first->stream(), "work", {}, [] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); });
  const StreamEventPtr last = events->now(of_first->stream());
  REQUIRE(last->ms_since(*early) > 0, "no time has passed");

  const EventPtr forgotten = first.start(nullptr, [](const Lane::Completion&) {});
  REQUIRE(static_cast<StreamEvent&>(*forgotten).error(), "a transfer that enqueues nothing and says nothing is taken");
  sim::reset();
}

// A device has streams of its own, which another one gets when it has ended and they are idle.
void kept_streams() {
  using Streams = std::vector<c10::Stream>;
  const auto shared = [](const Streams& a, const Streams& b) {
    return std::count_if(a.begin(), a.end(), [&](const auto& of_a) { return std::count(b.begin(), b.end(), of_a); });
  };
  auto first = sim::cuda_device(sim::device(0)), second = sim::cuda_device(sim::device(0));
  const Streams of_first = first->streams(), of_second = second->streams();
  REQUIRE(shared(of_first, of_second) == 0, "two devices share streams");
  std::promise<void> gate;
  sim::launch(of_first.back(), "gate", {}, [opened = gate.get_future().share()] { opened.wait(); });
  sim::count_queries(true);
  first = nullptr;
  const auto third = sim::cuda_device(sim::device(0)), elsewhere = sim::cuda_device(sim::device(1));
  REQUIRE(shared(third->streams(), of_first) == 2, "the idle streams are not used again, or one that works is");
  REQUIRE(shared(third->streams(), of_second) == 0 && elsewhere->streams()[0].device() == sim::device(1),
          "a device has streams of one that lives");
  gate.set_value();
}

}  // namespace

const Scenes kLaneScenes = {{"lane_streams", lane_streams},
                            {"lane_tasks", lane_tasks},
                            {"watching_thread", watching_thread},
                            {"kept_streams", kept_streams}};
