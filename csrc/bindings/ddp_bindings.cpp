// Binds the front end for DDP.
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/future.h"
#include "frontends/ddp/hook.h"

namespace fusedcomm {

void bind_ddp(pybind11::module_& m) {
  namespace py = pybind11;
  using NoGil = py::call_guard<py::gil_scoped_release>;
  using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

  py::class_<HookSwitch, std::shared_ptr<HookSwitch>>(m, "HookSwitch")
      .def(py::init<ProcessGroupPtr>(), py::arg("process_group"))
      .def("set", &HookSwitch::set, py::arg("hook"), py::arg("process_group"), NoGil())
      .def_property_readonly("observer", &HookSwitch::observer, py::return_value_policy::reference_internal)
      // join: returns 0 without Join, 1 or 2 under it: see HookSwitch::Join.
      .def(
          "ask",
          [](HookSwitch& target, std::function<int()> join) {
            target.ask([join = std::move(join)] { return static_cast<HookSwitch::Join>(join()); });
          },
          py::arg("join"), NoGil());

  py::class_<ReducerNodes>(m, "ReducerNodes")
      .def(py::init<std::vector<at::Tensor>>(), py::arg("parameters"))
      .def("missing", &ReducerNodes::missing)
      .def("replaced", &ReducerNodes::replaced);

  m.def(
      "register_ddp_hook",
      [](c10d::Reducer& reducer, std::shared_ptr<HookSwitch> target) {
        reducer.register_comm_hook(std::make_unique<DdpHook>(std::move(target)));
      },
      py::arg("reducer"), py::arg("target"));
  m.def("run_ddp_bucket", [](Synchronizer& hook, DdpBucket& bucket) {
    const bool is_shadow = false;
    return returned(&run_ddp_bucket, hook, bucket, is_shadow);
  });
  m.def("remove_hook", &remove_hook, py::arg("reducer"), NoGil());
}

}  // namespace fusedcomm
