#include <cstring>
#include <new>

#include "cpu_lane.h"
#include "device.h"

namespace fusedcomm {

std::unique_ptr<Lane> CpuDevice::make_lane(const std::string& name) { return std::make_unique<CpuLane>(name); }

std::shared_ptr<std::byte> CpuDevice::allocate(int64_t nbytes) {
  constexpr std::align_val_t kCacheLine{64};
  auto* data = static_cast<std::byte*>(::operator new(static_cast<size_t>(nbytes), kCacheLine));
  std::memset(data, 0, static_cast<size_t>(nbytes));  // touched now, so that no step pays for the page faults
  return {data, [](std::byte* p) { ::operator delete(p, kCacheLine); }};
}

}  // namespace fusedcomm
