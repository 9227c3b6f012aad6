#include "devices/stream_device.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <exception>
#include <mutex>

#include "devices/cpu_device.h"
#include "lanes/inline_lane.h"

namespace fusedcomm {
namespace {

constexpr int kHighPriority = -1;

std::mutex spare_mutex;
std::vector<c10::Stream>& spare() {
  static auto* const streams = new std::vector<c10::Stream>();  // never destroyed: devices may end later
  return *streams;
}

// Whether its next user would not have to wait: work may wait for a lost rank.
bool is_idle(const c10::Stream& stream) {
  try {
    return stream.query();
  } catch (const std::exception&) {  // an error of earlier work
    return false;
  }
}

c10::Stream take_stream(c10::Device device) {
  const std::lock_guard<std::mutex> lock(spare_mutex);
  const auto is_free = [&](const c10::Stream& stream) { return stream.device() == device && is_idle(stream); };
  const auto found = std::find_if(spare().begin(), spare().end(), is_free);
  const c10::Stream stream =
      found != spare().end() ? *found : c10::impl::VirtualGuardImpl(device.type()).getNewStream(device, kHighPriority);
  // Torch has few streams, which it hands out in turn: perhaps one that works here.
  spare().erase(std::remove(spare().begin(), spare().end(), stream), spare().end());
  return stream;
}

}  // namespace

StreamDevice::StreamDevice(c10::Device device, bool two_levels, bool forced_sync)
    : device_(device), forced_sync_(forced_sync) {
  if (device.is_cpu()) return;
  const int num_streams = two_levels ? 5 : 3;
  for (int i = 0; i < num_streams; ++i) {
    streams_.push_back(take_stream(device));
    lane_streams_.push_back(std::make_shared<LaneStream>(streams_.back(), events_));
  }
}

StreamDevice::~StreamDevice() {
  const std::lock_guard<std::mutex> lock(spare_mutex);
  for (const c10::Stream& stream : streams_) {
    // Torch may have handed it out twice.
    if (std::find(spare().begin(), spare().end(), stream) == spare().end()) spare().push_back(stream);
  }
}

std::unique_ptr<Lane> StreamDevice::make_lane(LaneRole role) {
  if (!on_streams()) return std::make_unique<InlineLane>();
  return std::make_unique<StreamLane>(lane_streams_.at(index_of(role)));
}

size_t StreamDevice::index_of(LaneRole role) {
  switch (role) {
    case LaneRole::kPack:
      return 0;
    // The collectives of a communicator share one stream, so every rank runs them in the same order.
    case LaneRole::kScatter:
    case LaneRole::kGather:
    case LaneRole::kLocalReduce:
      return 1;
    case LaneRole::kCrossScatter:
    case LaneRole::kCrossGather:
      return 3;
    case LaneRole::kLocalGather:
      return 4;
    // Sums and unpack share a stream, because both wait for the wire, in the wire's order.
    default:
      return 2;
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
