// One function for each area of the engine. It binds what Python uses of that area.
#pragma once

#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

namespace fusedcomm {

void bind_layout(pybind11::module_& m);
void bind_codec(pybind11::module_& m);
void bind_plan(pybind11::module_& m);
void bind_devices(pybind11::module_& m);  // and their kernels and transports
void bind_transport(pybind11::module_& m);
void bind_gradients(pybind11::module_& m);
void bind_ddp(pybind11::module_& m);
void bind_reducer(pybind11::module_& m);
void bind_rows(pybind11::module_& m);
void bind_horovod(pybind11::module_& m);

}  // namespace fusedcomm
