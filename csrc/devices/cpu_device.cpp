#include "devices/cpu_device.h"

#include <array>
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

void CpuDevice::add_heads(const std::byte* heads, int64_t stride, int64_t num_heads, std::byte* sums,
                          int64_t stride_of_sums, int64_t num_sums) {
  std::array<float, kHeadNbytes / sizeof(float)> sum{};
  for (int64_t i = 0; i < num_heads; ++i) {
    const auto* const head = reinterpret_cast<const float*>(heads + i * stride);
    for (size_t k = 0; k < sum.size(); ++k) sum[k] += head[k];
  }
  for (int64_t i = 0; i < num_sums; ++i) std::memcpy(sums + i * stride_of_sums, sum.data(), kHeadNbytes);
}

std::shared_ptr<std::byte> CpuDevice::allocate(int64_t nbytes) {
  constexpr std::align_val_t kCacheLine{64};
  auto* data = static_cast<std::byte*>(::operator new(static_cast<size_t>(nbytes), kCacheLine));
  std::memset(data, 0, static_cast<size_t>(nbytes));  // touches the pages, so that no step pays for page faults
  return {data, [](std::byte* p) { ::operator delete(p, kCacheLine); }};
}

}  // namespace fusedcomm
