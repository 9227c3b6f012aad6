#include "devices/cpu_device.h"

#include <chrono>
#include <cstring>
#include <new>

#include "lanes/cpu_lane.h"
#include "lanes/inline_lane.h"

namespace fusedcomm {
namespace {

// The name of the thread that runs the role's stages. Empty for collectives: they are only started, so their lanes have
// no thread.
const char* worker_of(LaneRole role) {
  switch (role) {
    case LaneRole::kPack:
      return "fc-pack";
    case LaneRole::kReduce:
      return "fc-reduce";
    case LaneRole::kLocalReduce:
      return "fc-local-reduce";
    case LaneRole::kUnpack:
      return "fc-unpack";
    default:
      return "";
  }
}

class HostStamp : public Stamp {
 public:
  bool reached() const override { return true; }
  double ms_since(const Stamp& earlier) const override {
    return std::chrono::duration<double, std::milli>(time_ - static_cast<const HostStamp&>(earlier).time_).count();
  }

 private:
  const std::chrono::steady_clock::time_point time_ = std::chrono::steady_clock::now();
};

}  // namespace

StampPtr host_stamp() { return std::make_shared<HostStamp>(); }

StampPtr CpuDevice::stamp() { return host_stamp(); }

std::unique_ptr<Lane> CpuDevice::make_lane(LaneRole role) {
  if (forced_sync_) return std::make_unique<InlineLane>();
  return std::make_unique<CpuLane>(worker_of(role));
}

std::shared_ptr<std::byte> CpuDevice::allocate(int64_t nbytes) {
  constexpr std::align_val_t kCacheLine{64};
  auto* data = static_cast<std::byte*>(::operator new(static_cast<size_t>(nbytes), kCacheLine));
  std::memset(data, 0, static_cast<size_t>(nbytes));  // touches the pages, so that no step pays for page faults
  return {data, [](std::byte* p) { ::operator delete(p, kCacheLine); }};
}

}  // namespace fusedcomm
