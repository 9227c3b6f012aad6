#include "devices/stream_device.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "devices/cpu_device.h"
#include "lanes/inline_lane.h"

namespace fusedcomm {

StreamDevice::StreamDevice(c10::Device device, bool two_levels, bool forced_sync)
    : device_(device), forced_sync_(forced_sync) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  constexpr int kHighPriority = -1;
  const int num_streams = two_levels ? 5 : 3;
  for (int i = 0; i < num_streams; ++i) {
    streams_.push_back(guard.getNewStream(device, kHighPriority));
    lane_streams_.push_back(std::make_shared<LaneStream>(streams_.back(), events_));
  }
}

std::unique_ptr<Lane> StreamDevice::make_lane(LaneRole role) {
  if (!on_streams()) return std::make_unique<InlineLane>();
  switch (role) {
    case LaneRole::kPack:
      return std::make_unique<StreamLane>(lane_streams_[0]);
    // The collectives of a communicator share one stream, so every rank runs them in the same order.
    case LaneRole::kScatter:
    case LaneRole::kGather:
    case LaneRole::kLocalReduce:
      return std::make_unique<StreamLane>(lane_streams_[1]);
    case LaneRole::kCrossScatter:
    case LaneRole::kCrossGather:
      return std::make_unique<StreamLane>(lane_streams_.at(3));
    case LaneRole::kLocalGather:
      return std::make_unique<StreamLane>(lane_streams_.at(4));
    // Sums and unpack share a stream, because both wait for the wire, in the wire's order.
    default:
      return std::make_unique<StreamLane>(lane_streams_[2]);
  }
}

c10::Stream current_stream_of(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

c10::Stream StreamDevice::current_stream() const { return current_stream_of(device_); }

Moment StreamDevice::moment() {
  if (!on_streams()) return {nullptr, host_stamp()};
  const c10::Stream stream = current_stream();
  StreamEventPtr now;
  for (const auto& ours : lane_streams_) {
    if (ours->stream() == stream) now = ours->stamp();
  }
  if (!now) now = events_->now(stream);
  return {now, now};
}

void StreamDevice::enter_watching_thread() const {
  // Otherwise asking about an event would create a context on the first device.
  if (on_streams()) c10::impl::VirtualGuardImpl(device_.type()).setDevice(device_);
}

void StreamDevice::wait_for_lanes() const {
  for (const c10::Stream& stream : streams_) stream.synchronize();
}

void StreamDevice::settle() {
  if (forced_sync_ && on_streams()) current_stream().synchronize();
}

}  // namespace fusedcomm
