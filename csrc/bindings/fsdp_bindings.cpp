// Binds the reduce-scatter of FSDP2.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

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
  using NoGil = py::call_guard<py::gil_scoped_release>;
  // pieces: (name, numel in a row, number of the wire).
  py::class_<ReduceScatter, std::shared_ptr<ReduceScatter>>(m, "ReduceScatter")
      .def(py::init([](std::shared_ptr<Synchronizer> synchronizer, size_t index,
                       const std::vector<std::tuple<std::string, int64_t, int>>& pieces) {
             std::vector<ReduceScatter::Piece> all;
             for (const auto& [name, numel, wire] : pieces) all.push_back({name, numel, wire});
             return std::make_shared<ReduceScatter>(std::move(synchronizer), index, std::move(all));
           }),
           py::kw_only(), py::arg("synchronizer"), py::arg("index"), py::arg("pieces"), NoGil())
      .def("set_row", &ReduceScatter::set_row, py::arg("row"), NoGil())
      .def_property_readonly("row_numel", &ReduceScatter::row_numel)
      .def_property_readonly("sent_nbytes", &ReduceScatter::sent_nbytes)
      .def_property_readonly("residual_nbytes", &ReduceScatter::residual_nbytes)
      .def(
          "run",
          [](ReduceScatter& of, const at::Tensor& output, const at::Tensor& input, double factor, uint32_t call,
             bool is_last) { return returned(&ReduceScatter::run, of, output, input, factor, call, is_last); },
          py::arg("output"), py::arg("input"), py::arg("factor"), py::arg("call"), py::arg("is_last"));
}

}  // namespace fusedcomm
