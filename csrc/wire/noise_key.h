// The key of the noise of stochastic rounding.
#pragma once

#include <cstdint>

namespace fusedcomm {

// Selects noise as tests/helpers/reference defines it: the Philox key, and the whole Philox counter except the element.
struct NoiseKey {
  uint64_t seed = 0;
  uint32_t parameter = 0;
  uint32_t step = 0;
  uint32_t source = 0;
};

// Values of NoiseKey::source. A rank that packs uses its own number. The sum of host h uses kFirstHostSource + h. The
// mean uses kReducerSource.
inline constexpr uint32_t kFirstHostSource = 0x40000000;
inline constexpr uint32_t kReducerSource = 0xFFFFFFFF;

}  // namespace fusedcomm
