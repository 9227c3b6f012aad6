// Binds FusedSum, which sums the copies' shards of FSDP2 too, and GradientSubmitter.
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/future.h"
#include "frontends/horovod/current.h"
#include "frontends/horovod/fused_sum.h"
#include "frontends/horovod/gradient_submitter.h"
#include "transport/error_text.h"

namespace fusedcomm {
namespace {

namespace py = pybind11;
using NoGil = py::call_guard<py::gil_scoped_release>;

void bind_submitter(py::module_& m) {
  using horovod::GradientSubmitter;
  using horovod::Submission;
  py::class_<Submission>(m, "Submission")
      .def_readonly("name", &Submission::name)
      .def_readonly("is_group", &Submission::is_group)
      .def_readonly("names", &Submission::names)
      .def_readonly("tensors", &Submission::tensors)
      .def_readonly("op", &Submission::op)
      .def_readonly("prescale", &Submission::prescale)
      .def_readonly("postscale", &Submission::postscale)
      .def_readonly("set_id", &Submission::set)
      .def_readonly("wire", &Submission::wire);

  // submit: None: to the coordinator that make_current() was called with. parameters: (tensor, name). units: (indices
  // of parameters, whether they are a group).
  py::class_<GradientSubmitter, std::shared_ptr<GradientSubmitter>>(m, "GradientSubmitter")
      .def(py::init([](const std::vector<std::tuple<at::Tensor, std::string>>& parameters,
                       const std::vector<std::tuple<std::vector<size_t>, bool>>& units, int op, double prescale,
                       double postscale, int set_id, std::string wire, int64_t passes,
                       GradientSubmitter::Submit submit) {
             std::vector<GradientSubmitter::Parameter> table;
             for (const auto& [tensor, name] : parameters) table.push_back({tensor, name});
             std::vector<GradientSubmitter::Unit> list;
             for (const auto& [indices, is_group] : units) list.push_back({indices, is_group});
             if (!submit) submit = horovod::submit_to_current;
             return GradientSubmitter::make(std::move(table), std::move(list),
                                            {op, prescale, postscale, set_id, std::move(wire), passes},
                                            std::move(submit));
           }),
           py::kw_only(), py::arg("parameters"), py::arg("units"), py::arg("op") = 0, py::arg("prescale") = 1.0,
           py::arg("postscale") = 1.0, py::arg("set_id") = 0, py::arg("wire") = "", py::arg("passes") = 1,
           py::arg("submit") = py::none())
      .def("outstanding", &GradientSubmitter::outstanding, NoGil())
      .def("missing", &GradientSubmitter::missing, NoGil())
      .def("submit_missing", &GradientSubmitter::submit_missing, NoGil())
      // (handle, indices of parameters) of each operation.
      .def(
          "take_handles",
          [](GradientSubmitter& submitter) {
            std::vector<std::pair<int, std::vector<size_t>>> taken;
            for (auto& each : submitter.take_handles()) taken.emplace_back(each.handle, std::move(each.parameters));
            return taken;
          },
          NoGil())
      .def("write_back", &GradientSubmitter::write_back, NoGil())
      .def("set_passes", &GradientSubmitter::set_passes, py::arg("passes"), NoGil())
      .def("reset", &GradientSubmitter::reset, NoGil())
      .def("detach", &GradientSubmitter::detach, NoGil());
}

}  // namespace

void bind_horovod_engine(py::module_& m) {
  using horovod::FusedSum;
  bind_submitter(m);
  py::class_<FusedSum, std::shared_ptr<FusedSum>>(m, "FusedSum")
      .def(py::init<std::shared_ptr<Synchroniser>>(), py::arg("synchroniser"))
      // done: gets the text of the error, empty if there is none. Returns the sum's torch.futures.Future.
      .def(
          "run",
          [](FusedSum& sum, const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors,
             double factor, std::function<void(std::string)> done, bool ends_step) {
            FuturePtr future;
            {
              const py::gil_scoped_release no_gil;
              future = sum.run(
                  names, tensors, factor,
                  [done = std::move(done)](const std::exception_ptr& error) {
                    if (done) done(error ? error_text(error) : std::string());
                  },
                  ends_step);
            }
            return torch::jit::toPyObject(std::move(future));
          },
          py::kw_only(), py::arg("names"), py::arg("tensors"), py::arg("factor") = 1.0, py::arg("done") = nullptr,
          py::arg("ends_step") = false);
}

}  // namespace fusedcomm
