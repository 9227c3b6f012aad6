// The names of wire dtypes, for users and Python.
#pragma once

#include <stdexcept>
#include <string>

#include "wire/layout.h"

namespace fusedcomm {

// Throws std::invalid_argument if `wire` is none of kWires.
inline std::string wire_name(Wire wire) { return row_of(wire).name; }

// Returns "fp32, bf16, …", for messages. Never empty.
inline std::string wire_names() {
  std::string names;
  for (const WireRow& known : kWires) {
    names += std::string(names.empty() ? "" : ", ") + known.name;
  }
  return names;
}

// Throws std::invalid_argument for an unknown name.
inline Wire wire_from_name(const std::string& name) {
  for (const WireRow& known : kWires) {
    if (name == known.name) return known.wire;
  }
  throw std::invalid_argument("wire='" + name + "' is not possible: use one of " + wire_names());
}

}  // namespace fusedcomm
