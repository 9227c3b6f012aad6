// Binds reduce-scatters and all-gathers of rows.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/future.h"
#include "gradients/rows.h"

namespace fusedcomm {

void bind_rows(pybind11::module_& m) {
  namespace py = pybind11;
  using NoGil = py::call_guard<py::gil_scoped_release>;
  // pieces: (name, numel in a row, number of the wire).
  py::class_<Rows, std::shared_ptr<Rows>>(m, "Rows")
      .def(py::init([](std::shared_ptr<Synchronizer> synchronizer, size_t index,
                       const std::vector<std::tuple<std::string, int64_t, int>>& pieces) {
             std::vector<Rows::Piece> all;
             for (const auto& [name, numel, wire] : pieces) all.push_back({name, numel, wire});
             return std::make_shared<Rows>(std::move(synchronizer), index, std::move(all));
           }),
           py::kw_only(), py::arg("synchronizer"), py::arg("index"), py::arg("pieces"), NoGil())
      .def("set_row", &Rows::set_row, py::arg("row"), NoGil())
      .def_property_readonly("row_numel", &Rows::row_numel)
      .def_property_readonly("sent_nbytes", [](const Rows& of) { return sent_nbytes(of.plan(/*gathers=*/false)); })
      .def("plan", &Rows::plan, py::arg("gathers"), py::return_value_policy::copy)
      .def_property_readonly("plan_of_again", &Rows::plan_of_again, py::return_value_policy::copy)
      .def(
          "reduce_scatter",
          [](Rows& of, const at::Tensor& rows, const at::Tensor& own, double factor, bool is_last) {
            return returned(&Rows::reduce_scatter, of, rows, own, factor, is_last);
          },
          py::kw_only(), py::arg("rows"), py::arg("own"), py::arg("factor"), py::arg("is_last"))
      .def(
          "all_gather",
          [](Rows& of, const at::Tensor& rows, const at::Tensor& own, bool is_last, bool keeps, bool again) {
            const Keeping keeping = again ? Keeping::kAgain : keeps ? Keeping::kKeeps : Keeping::kNothing;
            return returned(&Rows::all_gather, of, rows, own, is_last, keeping);
          },
          py::kw_only(), py::arg("rows"), py::arg("own"), py::arg("is_last"), py::arg("keeps") = false,
          py::arg("again") = false);
}

}  // namespace fusedcomm
