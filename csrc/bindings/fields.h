// Reads the fields of a struct of options from Python: those that its visit_fields() lists, each by its name.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

#include "engine/sums.h"
#include "wire/names.h"

namespace fusedcomm {

// How Python gives the value of a field.
template <class T>
void read_field(const pybind11::handle& given, T* field) {
  *field = given.cast<T>();
}
inline void read_field(const pybind11::handle& given, Wire* field) {
  *field = wire_from_name(given.cast<std::string>());
}
inline void read_field(const pybind11::handle& given, Sum* field) { *field = sum_from_name(given.cast<std::string>()); }
inline void read_field(const pybind11::handle& given, std::vector<Wire>* field) {
  for (const auto& name : given.cast<std::vector<std::string>>()) field->push_back(wire_from_name(name));
}

// Throws Python's KeyError if `given` lacks a field, and its TypeError if it has others.
template <class Options>
Options fields_of(const pybind11::kwargs& given) {
  Options options;
  pybind11::dict rest(given);
  Options::visit_fields([&](const char* name, auto field) { read_field(rest.attr("pop")(name), &(options.*field)); });
  if (!rest.empty()) {
    throw pybind11::type_error("no fields of these options: " + std::string(pybind11::str(pybind11::list(rest))));
  }
  return options;
}

}  // namespace fusedcomm
