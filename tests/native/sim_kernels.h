// The kernels of the CUDA path on the simulated accelerator: a driver (fake_cuda.cpp) whose launches are work of its
// streams.
#pragma once

#include <string>
#include <vector>

#include "devices/kernel_launch.h"

namespace sim {

// All kernels that a configuration with these wires needs, for fp32 gradients. Wires with scales are not supported.
fusedcomm::CudaKernels kernels(const std::vector<fusedcomm::Wire>& wires);

// The library with the driver's functions.
std::string driver_path();

// Whether kernels that are launched from now on fail on the device.
void fail_kernels(bool fail);

}  // namespace sim
