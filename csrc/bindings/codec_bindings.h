// The codec and the wire layout as Python sees them: what tests, benchmarks and the oracle use.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fusedcomm {

void bind_codec(pybind11::module_& m);

}  // namespace fusedcomm
