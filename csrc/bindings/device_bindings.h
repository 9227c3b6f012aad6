#pragma once

#include <torch/extension.h>

namespace fusedcomm {

// Devices, their kernels and the transports.
void bind_devices(pybind11::module_& m);

}  // namespace fusedcomm
