// What selects the noise of stochastic rounding.
#pragma once

#include <cstdint>

namespace fusedcomm {

// Which of the noise of fusedcomm/reference: the Philox key, and all of the counter but the element.
struct NoiseKey {
  uint64_t seed = 0;
  uint32_t parameter = 0;
  uint32_t step = 0;
  uint32_t source = 0;
};

// Sources: a rank that packs is its own number; then the hosts whose sums are encoded, and who encodes the mean.
inline constexpr uint32_t kFirstHostSource = 0x40000000;
inline constexpr uint32_t kReducerSource = 0xFFFFFFFF;

}  // namespace fusedcomm
