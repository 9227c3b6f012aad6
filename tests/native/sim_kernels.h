// The kernels of the CUDA path on the simulated accelerator: a driver (fake_cuda.cpp) whose launches are work of its
// streams, which the CPU's codec does.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <vector>

#include "devices/cuda_device.h"

namespace sim {

// Those of all sums of fp32 gradients over these wires.
std::vector<fusedcomm::KernelKey> keys_of(const std::vector<fusedcomm::Wire>& wires);

// The product's device over this driver, with these kernels. Small buckets are those of at most 4096 bytes.
std::shared_ptr<fusedcomm::CudaDevice> cuda_device(
    c10::Device device, bool two_levels = false, bool forced_sync = false,
    const std::vector<fusedcomm::KernelKey>& keys = keys_of({fusedcomm::Wire::kFp32, fusedcomm::Wire::kBf16}));

}  // namespace sim
