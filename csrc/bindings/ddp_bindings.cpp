// The front end for DDP.
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/future.h"
#include "frontends/ddp/hook.h"

namespace fusedcomm {

void bind_ddp(pybind11::module_& m) {
  namespace py = pybind11;
  using NoGil = py::call_guard<py::gil_scoped_release>;
  using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

  py::class_<SeenBucket>(m, "SeenBucket")
      .def_readonly("nbytes", &SeenBucket::nbytes)
      .def_readonly("is_last", &SeenBucket::is_last)
      .def_readonly("handed_ms", &SeenBucket::handed_ms)
      .def_readonly("done_ms", &SeenBucket::done_ms);

  py::class_<HookTarget, std::shared_ptr<HookTarget>>(m, "HookTarget")
      .def(py::init<ProcessGroupPtr>(), py::arg("process_group"))
      .def("set", &HookTarget::set, py::arg("hook"), py::arg("process_group"), NoGil())
      .def(
          "watch",
          [](HookTarget& target, std::shared_ptr<Device> device, std::function<void()> begin_pass) {
            target.watch(std::make_shared<PassWatch>(std::move(device), std::move(begin_pass)));
          },
          py::arg("device"), py::arg("begin_pass"), NoGil())
      .def(
          "unwatch", [](HookTarget& target) { target.watch(nullptr); }, NoGil())
      .def("take_seen", &HookTarget::take_seen, NoGil());

  m.def(
      "register_ddp_hook",
      [](c10d::Reducer& reducer, std::shared_ptr<HookTarget> target) {
        reducer.register_comm_hook(std::make_unique<DdpHook>(std::move(target)));
      },
      py::arg("reducer"), py::arg("target"));
  m.def("run_ddp_bucket", [](GradHook& hook, DdpBucket& bucket) { return returned(&run_ddp_bucket, hook, bucket); });
  m.def("take_ddp_hook", &take_ddp_hook, py::arg("reducer"), NoGil());
}

}  // namespace fusedcomm
