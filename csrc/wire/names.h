// What users and Python call the wires: the one place that maps names and values.
#pragma once

#include <iterator>
#include <stdexcept>
#include <string>

#include "wire/layout.h"

namespace fusedcomm {

// Indexed by Wire.
inline constexpr const char* kWireNames[] = {"fp32", "bf16", "fp16", "int8", "fp8", "fp8_e5m2", "int4"};

inline std::string wire_name(Wire wire) { return kWireNames[static_cast<size_t>(wire)]; }

inline Wire wire_from_name(const std::string& name) {
  std::string choices;
  for (size_t i = 0; i < std::size(kWireNames); ++i) {
    if (name == kWireNames[i]) return static_cast<Wire>(i);
    choices += std::string(i ? ", " : "") + kWireNames[i];
  }
  throw std::invalid_argument("wire='" + name + "' is not possible: use one of " + choices);
}

// Indexed by ResidualFormat.
inline constexpr const char* kResidualFormatNames[] = {"fp32", "bf16", "int8"};

inline ResidualFormat residual_format_from_name(const std::string& name) {
  for (size_t i = 0; i < std::size(kResidualFormatNames); ++i) {
    if (name == kResidualFormatNames[i]) return static_cast<ResidualFormat>(i);
  }
  throw std::invalid_argument("a residual cannot be '" + name + "': use 'fp32', 'bf16' or 'int8'");
}

}  // namespace fusedcomm
