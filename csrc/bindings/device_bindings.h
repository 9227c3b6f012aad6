#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fusedcomm {

// Devices, their kernels and the transports.
void bind_devices(pybind11::module_& m);

}  // namespace fusedcomm
