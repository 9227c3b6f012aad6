// For what joins threads: such a thread may need the GIL, to release a tensor that has a Python object.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

namespace fusedcomm {

// Releases the GIL while it lives, if the calling thread holds it.
class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) released_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> released_;
};

}  // namespace fusedcomm
