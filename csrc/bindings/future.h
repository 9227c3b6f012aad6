// Returns the future of a bucket's run to Python, as torch.futures.Future.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <utility>

#include "gradients/synchronizer.h"

// Declared here, because torch/csrc/jit/python/pybind_utils.h takes longer to compile than all bindings together.
namespace torch::jit {
TORCH_PYTHON_API pybind11::object toPyObject(c10::IValue ivalue);
}  // namespace torch::jit

namespace fusedcomm {

// Calls run(arguments…) without the GIL and converts its future.
template <typename Run, typename... Arguments>
pybind11::object returned(Run run, Arguments&... arguments) {
  FuturePtr future;
  {
    const pybind11::gil_scoped_release no_gil;
    future = std::invoke(run, arguments...);
  }
  return torch::jit::toPyObject(std::move(future));
}

}  // namespace fusedcomm
