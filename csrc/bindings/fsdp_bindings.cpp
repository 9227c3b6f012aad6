// Binds the reduce-scatter of FSDP2.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/future.h"
#include "frontends/fsdp/reduce_scatter.h"

namespace fusedcomm {

void bind_fsdp(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<ReduceScatter, std::shared_ptr<ReduceScatter>>(m, "ReduceScatter")
      .def(py::init([](std::shared_ptr<Synchroniser> hook, size_t index,
                       const std::vector<std::tuple<std::string, int64_t, int>>& row) {
             std::vector<RowPiece> pieces;
             for (const auto& [name, numel, wire] : row) pieces.push_back({name, numel, wire});
             return std::make_shared<ReduceScatter>(std::move(hook), index, std::move(pieces));
           }),
           py::kw_only(), py::arg("hook"), py::arg("index"), py::arg("row"))
      .def_property_readonly("row_numel", &ReduceScatter::row_numel)
      .def_property_readonly("sent_nbytes", &ReduceScatter::sent_nbytes)
      .def_property_readonly("padding_numel", &ReduceScatter::padding_numel)
      .def_property_readonly("residual_nbytes", &ReduceScatter::residual_nbytes)
      .def("nonfinite", &ReduceScatter::nonfinite, py::call_guard<py::gil_scoped_release>())
      .def("residuals", &ReduceScatter::residuals, py::call_guard<py::gil_scoped_release>())
      .def("restore_residuals", &ReduceScatter::restore_residuals, py::arg("residuals"),
           py::call_guard<py::gil_scoped_release>())
      .def(
          "run",
          [](ReduceScatter& of, const at::Tensor& output, const at::Tensor& input, double factor, uint32_t call,
             bool is_last) {
            FuturePtr future;
            {
              const py::gil_scoped_release no_gil;
              future = of.run(output, input, factor, call, is_last);
            }
            return torch::jit::toPyObject(std::move(future));
          },
          py::arg("output"), py::arg("input"), py::arg("factor"), py::arg("call"), py::arg("is_last"));
}

}  // namespace fusedcomm
