// The kernels of the CUDA path on the simulated accelerator: a driver (fake_cuda.cpp) whose launches are work of its
// streams.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "devices/cuda_device.h"

namespace sim {

// The product's device over this driver, with all kernels that sums of fp32 gradients over fp32 and bf16 need. Small
// buckets are those of at most 4096 bytes.
std::shared_ptr<fusedcomm::CudaDevice> cuda_device(c10::Device device, bool two_levels = false,
                                                   bool forced_sync = false);

}  // namespace sim
