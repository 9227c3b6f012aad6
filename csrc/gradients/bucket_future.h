// The future of a bucket's result, which the front end returns to its caller.
#pragma once

#include <ATen/core/ivalue.h>

#include <exception>
#include <utility>
#include <vector>

namespace fusedcomm {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// The future has a device: completing it records an event there, and waiting for it waits for that event.
inline FuturePtr make_future(c10::Device device) {
  std::vector<c10::Device> devices;
  if (!device.is_cpu()) devices.push_back(device);
  return c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), std::move(devices));
}

// With `error`, or with `result` if that is null.
inline void complete(c10::ivalue::Future& future, const at::Tensor& result, std::exception_ptr error) {
  if (error) {
    future.setError(std::move(error));
  } else {
    future.markCompleted(result);
  }
}

}  // namespace fusedcomm
