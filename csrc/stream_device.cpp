#include "stream_device.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "inline_lane.h"

namespace fusedcomm {

StreamDevice::StreamDevice(c10::Device device, bool forced_sync) : device_(device), forced_sync_(forced_sync) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  constexpr int kHighPriority = -1;
  for (int i = 0; i < 3; ++i) streams_.push_back(guard.getNewStream(device, kHighPriority));
}

std::unique_ptr<Lane> StreamDevice::make_lane(LaneRole role) {
  if (!on_streams()) return std::make_unique<InlineLane>();
  switch (role) {
    case LaneRole::kPack:
      return std::make_unique<StreamLane>(streams_[0], events_);
    // One stream for all collectives, of whichever communicator: so every rank runs them in one order.
    case LaneRole::kScatter:
    case LaneRole::kGather:
    case LaneRole::kCrossScatter:
    case LaneRole::kCrossGather:
      return std::make_unique<StreamLane>(streams_[1], events_);
    // Sums and unpack share a stream: each waits for the wire, in the same order as the wire works.
    default:
      return std::make_unique<StreamLane>(streams_[2], events_);
  }
}

c10::Stream StreamDevice::current_stream() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

EventPtr StreamDevice::caller_event() { return on_streams() ? events_->record(current_stream()) : nullptr; }

StampPtr StreamDevice::stamp() { return on_streams() ? std::make_shared<StreamStamp>(current_stream()) : host_stamp(); }

void StreamDevice::enter_watching_thread() const {
  // Or asking about an event would make a context on the first device.
  if (on_streams()) c10::impl::VirtualGuardImpl(device_.type()).setDevice(device_);
}

void StreamDevice::settle() {
  if (forced_sync_ && on_streams()) current_stream().synchronize();
}

}  // namespace fusedcomm
