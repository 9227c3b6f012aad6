// Models, backward passes and optimizers on simulated devices, for scenes whose ranks are threads.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gradients/synchronizer.h"
#include "require.h"
#include "sim_accelerator.h"

namespace sim {

// A parameter.
struct Shape {
  int64_t numel;
  int wire = 0;  // the number of its wire
  at::ScalarType dtype = at::kFloat;
};

struct Model {
  Model(c10::Device device, const std::vector<std::vector<Shape>>& shapes) : parameters(shapes.size()) {
    for (size_t b = 0; b < shapes.size(); ++b) {
      for (const Shape& shape : shapes[b]) {
        const auto options = at::TensorOptions().dtype(shape.dtype).device(device);
        parameters[b].push_back(at::empty({shape.numel}, options));
        known.push_back({parameters[b].back(), "parameter " + std::to_string(known.size()), shape.wire});
      }
    }
  }
  std::vector<std::vector<at::Tensor>> parameters;  // by bucket
  std::vector<fusedcomm::Parameters::Known> known;
};

inline Access access(const at::Tensor& tensor, bool writes) {
  return {tensor.data_ptr(), static_cast<int64_t>(tensor.nbytes()), writes};
}

// Enqueues a backward pass, which writes the elements of gradients.
inline void backward(const at::Tensor& gradients, std::function<double(size_t)> element) {
  launch(current_stream(gradients.device().index()), "backward", {access(gradients, true)},
         [element = std::move(element), data = gradients.data_ptr(), numel = static_cast<size_t>(gradients.numel()),
          is_double = gradients.dtype() == at::kDouble] {
           for (size_t i = 0; i < numel; ++i) {
             const double value = element(i);
             is_double ? static_cast<double*>(data)[i] = value
                       : static_cast<float*>(data)[i] = static_cast<float>(value);
           }
         });
}

// Calls see(i, element) with each of the gradients.
inline void optimizer(const at::Tensor& gradients, std::function<void(size_t, double)> see) {
  launch(current_stream(gradients.device().index()), "optimizer", {access(gradients, false)},
         [see = std::move(see), data = gradients.data_ptr(), numel = static_cast<size_t>(gradients.numel()),
          is_double = gradients.dtype() == at::kDouble] {
           for (size_t i = 0; i < numel; ++i) {
             see(i, is_double ? static_cast<double*>(data)[i] : static_cast<float*>(data)[i]);
           }
         });
}

// Calls body(device) on a thread for each device.
inline void on_threads(const std::vector<int>& devices, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (const int index : devices) {
    threads.emplace_back([&body, index] {
      try {
        body(index);
      } catch (const std::exception& e) {
        REQUIRE(false, "rank %d: %s", index, e.what());
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

// Waits for all that the device has been given.
inline void finish(int index) {
  c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1)->synchronizeDevice(device(index).index());
}

}  // namespace sim
