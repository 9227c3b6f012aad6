// What the engine is told: how gradients travel, in which pieces, and how they are rounded.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/sums.h"
#include "wire/layout.h"

namespace fusedcomm {

struct WireConfig {
  Wire wire = Wire::kBf16;
  Sum sum = Sum::kAuto;
  int64_t block_numel = kDefaultBlockNumel;
  double predivide = 0;  // fp16 only; 0: chosen here
  int64_t max_chunk_nbytes = 512 << 10;
  int64_t num_slots = 4;                   // chunks that may be under way at once
  bool rotate = false;                     // mix runs of elements before quantising, against outliers
  std::vector<StreamWire> others;          // that some parameters have instead of `wire`; numels are not used
  bool stochastic = false;                 // rounding; else to nearest
  uint64_t seed = 0;                       // of the noise
  std::optional<ResidualFormat> feedback;  // error feedback, if any
  int64_t ranks_per_host = 1;              // more than one: sums have two levels, first over the ranks of a host
  Wire local_wire = Wire::kBf16;           // within a host; without scales
};

// How a parameter travels: 0 in the configuration's wire, k > 0 in others[k - 1], kExact in fp32.
inline constexpr int kExactWire = -1;
// `number` ≥ 0.
StreamWire stream_wire(const WireConfig& config, int number);

// Throws std::invalid_argument naming the field, its value and what is possible.
void check_config(const WireConfig& config);

}  // namespace fusedcomm
