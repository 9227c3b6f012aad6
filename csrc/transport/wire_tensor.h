// Wire bytes as tensors, which is what c10d takes.
#pragma once

#include <ATen/ATen.h>

#include "transport/transport.h"

namespace fusedcomm {

// Returns a 1-D view of wire bytes as `dtype`. It keeps them alive for as long as the backend holds it.
inline at::Tensor as_tensor(const WireSpan& span, at::ScalarType dtype, c10::Device device = c10::kCPU) {
  const int64_t numel = span.nbytes / static_cast<int64_t>(c10::elementSize(dtype));
  return at::for_blob(span.data, {numel})
      .deleter([owner = span.owner](void*) {})
      .options(at::TensorOptions().dtype(dtype).device(device))
      .target_device(device)
      .make_tensor();
}

}  // namespace fusedcomm
