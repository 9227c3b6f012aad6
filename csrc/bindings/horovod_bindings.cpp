// Binds the coordinator of Horovod's calls.
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "frontends/horovod/coordinator.h"
#include "transport/without_gil.h"

namespace fusedcomm {
namespace {

namespace py = pybind11;
using NoGil = py::call_guard<py::gil_scoped_release>;
using horovod::Coordinator;

// The end joins threads, which may be waiting for the GIL. A child of fork() has none of them, and the connections are
// its parent's.
void end_without_gil(Coordinator* coordinator) {
  if (coordinator->is_in_fork()) return;
  const WithoutGil no_gil;
  delete coordinator;
}

std::shared_ptr<Coordinator> make_coordinator(
    int rank, int size, std::vector<int> sockets, int64_t fusion_nbytes, double stall_warning_s,
    double stall_shutdown_s, Coordinator::Say say,
    std::function<std::shared_ptr<Synchronizer>(int, std::string)> open_engine) {
  Coordinator::Options options;
  options.rank = rank;
  options.size = size;
  options.sockets = std::move(sockets);
  options.negotiator = {fusion_nbytes, stall_warning_s, stall_shutdown_s};
  auto open_wire = [open = std::move(open_engine)](int set, const std::string& wire) {
    return std::make_shared<FusedSum>(open(set, wire));
  };
  return {new Coordinator(options, std::move(say), std::move(open_wire)), end_without_gil};
}

horovod::Signature make_signature(const std::string& kind, std::string name, int op, double prescale, double postscale,
                                  int root, std::vector<int64_t> splits, std::string wire,
                                  std::vector<std::string> tensor_names, std::string problem) {
  horovod::Signature as;
  as.kind = horovod::kind_of(kind);
  as.name = std::move(name);
  as.op = static_cast<horovod::Op>(op);
  as.prescale = prescale;
  as.postscale = postscale;
  as.root = root;
  as.wire = std::move(wire);
  as.splits = std::move(splits);
  as.tensor_names = std::move(tensor_names);
  as.problem = std::move(problem);
  return as;
}

int submit(Coordinator& coordinator, const horovod::Signature& signature, std::vector<at::Tensor> inputs,
           std::vector<at::Tensor> outputs, int set) {
  auto request = std::make_shared<horovod::Request>();
  request->signature = signature;
  horovod::describe(inputs, &request->signature);
  request->inputs = std::move(inputs);
  request->outputs = std::move(outputs);
  request->set = set;
  return coordinator.submit(std::move(request));
}

void bind_collective_results(py::module_& m) {
  py::class_<horovod::Result>(m, "CollectiveResult")
      .def_readonly("error", &horovod::Result::error)
      .def_readonly("outputs", &horovod::Result::outputs)
      .def_readonly("received_splits", &horovod::Result::received_splits)
      .def_readonly("number", &horovod::Result::number);
}

}  // namespace

void bind_horovod(pybind11::module_& m) {
  bind_collective_results(m);
  // The facts that ranks must agree on, without the tensors' shapes and dtypes, which submit() adds.
  py::class_<horovod::Signature>(m, "CollectiveSignature")
      .def(py::init(&make_signature), py::kw_only(), py::arg("kind"), py::arg("name"), py::arg("op") = 1,
           py::arg("prescale") = 1.0, py::arg("postscale") = 1.0, py::arg("root") = 0,
           py::arg("splits") = std::vector<int64_t>(), py::arg("wire") = "",
           py::arg("tensor_names") = std::vector<std::string>(), py::arg("problem") = "")
      .def_property_readonly("key", &horovod::Signature::key);
  py::class_<Coordinator, std::shared_ptr<Coordinator>>(m, "Coordinator")
      .def(py::init(&make_coordinator), py::kw_only(), py::arg("rank"), py::arg("size"), py::arg("sockets"),
           py::arg("fusion_nbytes"), py::arg("stall_warning_s"), py::arg("stall_shutdown_s"), py::arg("say"),
           py::arg("open_engine"))
      .def("add_set", &Coordinator::add_set, py::arg("set_id"), py::arg("ranks"), py::arg("backend"), NoGil())
      .def("remove_set", &Coordinator::remove_set, py::arg("set_id"), NoGil())
      .def("submit", &submit, py::arg("signature"), py::arg("inputs"), py::arg("outputs"), py::arg("set_id") = 0,
           NoGil())
      .def("poll", &Coordinator::poll, py::arg("handle"), NoGil())
      .def("wait", &Coordinator::wait, py::arg("handle"), NoGil())
      .def("shutdown", &Coordinator::shutdown, NoGil())
      .def("start_events", &Coordinator::start_events, py::arg("mark_cycles"), NoGil())
      .def("take_events",
           [](Coordinator& coordinator) {
             std::vector<std::tuple<std::string, std::string, int64_t, int64_t>> events;
             const py::gil_scoped_release no_gil;
             for (horovod::Event& event : coordinator.take_events()) {
               events.emplace_back(std::move(event.name), std::move(event.phase), event.begin_us, event.end_us);
             }
             return events;
           })
      .def_property_readonly("failure", py::cpp_function(&Coordinator::failure, NoGil()));
}

}  // namespace fusedcomm
