// What selects the noise of stochastic rounding.
#pragma once

#include <cstdint>

namespace fusedcomm {

// Which of the noise of reference.py: the Philox key, and all of the counter but the element.
struct NoiseKey {
  uint64_t seed = 0;
  uint32_t parameter = 0;
  uint32_t step = 0;
  uint32_t source = 0;
};

}  // namespace fusedcomm
