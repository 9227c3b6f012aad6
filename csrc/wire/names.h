// The names of the wire dtypes for users and Python. Only this file maps between names and values.
#pragma once

#include <iterator>
#include <stdexcept>
#include <string>

#include "wire/layout.h"

namespace fusedcomm {

struct NamedWire {
  Wire wire;
  const char* name;
};

// Every wire dtype, in the order in which texts list them.
inline constexpr NamedWire kWires[] = {{Wire::kFp32, "fp32"}, {Wire::kBf16, "bf16"}, {Wire::kFp16, "fp16"},
                                       {Wire::kInt8, "int8"}, {Wire::kFp8, "fp8"},   {Wire::kInt4, "int4"}};

// Throws std::invalid_argument if `wire` is none of kWires.
inline std::string wire_name(Wire wire) {
  for (const NamedWire& known : kWires) {
    if (known.wire == wire) return known.name;
  }
  throw std::invalid_argument("not a wire");
}

// Returns "fp32, bf16, …", for messages. Never empty.
inline std::string wire_names(bool with_scales_only = false) {
  std::string names;
  for (const NamedWire& known : kWires) {
    if (with_scales_only && !has_scales(known.wire)) continue;
    names += std::string(names.empty() ? "" : ", ") + known.name;
  }
  return names;
}

// Throws std::invalid_argument for an unknown name.
inline Wire wire_from_name(const std::string& name) {
  for (const NamedWire& known : kWires) {
    if (name == known.name) return known.wire;
  }
  throw std::invalid_argument("wire='" + name + "' is not possible: use one of " + wire_names());
}

// Indexed by ResidualFormat.
inline constexpr const char* kResidualFormatNames[] = {"fp32", "bf16"};

// Throws std::invalid_argument for an unknown name.
inline ResidualFormat residual_format_from_name(const std::string& name) {
  for (size_t i = 0; i < std::size(kResidualFormatNames); ++i) {
    if (name == kResidualFormatNames[i]) return static_cast<ResidualFormat>(i);
  }
  throw std::invalid_argument("a residual cannot be '" + name + "': use 'fp32' or 'bf16'");
}

}  // namespace fusedcomm
