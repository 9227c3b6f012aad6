// Binds the reducer.
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "frontends/reducer/reducer.h"

namespace fusedcomm {

void bind_reducer(pybind11::module_& m) {
  namespace py = pybind11;
  using NoGil = py::call_guard<py::gil_scoped_release>;

  // refuse(failure) and failure_of_job() → str; see Steps.
  py::class_<Steps>(m, "ReducerSteps")
      .def(py::init([](int64_t passes, bool sums, bool sends_dense, std::function<void(const std::string&)> refuse,
                       std::function<std::string()> failure_of_job) {
             return Steps{passes, sums, sends_dense, std::move(refuse), std::move(failure_of_job)};
           }),
           py::kw_only(), py::arg("passes"), py::arg("sums"), py::arg("sends_dense"), py::arg("refuse"),
           py::arg("failure_of_job"));
  py::class_<GradReducer, std::shared_ptr<GradReducer>>(m, "GradReducer")
      .def(py::init([](const std::optional<std::shared_ptr<Synchronizer>>& synchronizer,
                       const std::vector<std::tuple<at::Tensor, std::string, bool>>& parameters,
                       int64_t first_bucket_nbytes, int64_t bucket_nbytes, bool find_unused,
                       const std::optional<StorePtr>& store, GradReducer::Say say, std::optional<Steps> steps) {
             std::vector<GradReducer::Parameter> table;
             for (const auto& [tensor, name, is_sparse] : parameters) table.push_back({tensor, name, is_sparse});
             const GradReducer::Options options{{first_bucket_nbytes, bucket_nbytes}, find_unused, std::move(steps)};
             return GradReducer::make(synchronizer.value_or(nullptr), std::move(table), options,
                                      store.value_or(StorePtr()), std::move(say));
           }),
           py::kw_only(), py::arg("synchronizer"), py::arg("parameters"), py::arg("first_bucket_nbytes"),
           py::arg("bucket_nbytes"), py::arg("find_unused"), py::arg("store"), py::arg("say"),
           py::arg("steps") = py::none())
      .def_property("is_on", py::cpp_function(&GradReducer::is_on, NoGil()),
                    py::cpp_function(&GradReducer::turn, NoGil()))
      // As HookSwitch has it, whose process group is asked where there is no engine.
      .def(
          "set",
          [](GradReducer& reducer, std::shared_ptr<Synchronizer> synchronizer, const py::object&) {
            reducer.set_synchronizer(std::move(synchronizer));
          },
          py::arg("synchronizer"), py::arg("process_group") = py::none(), NoGil())
      .def("set_ranks", &GradReducer::set_ranks, py::arg("synchronizer"), py::arg("store"), NoGil())
      // finish() → bool and recover(failure) → Synchronizer or None; see Membership.
      .def(
          "use",
          [](GradReducer& reducer, std::function<bool()> finish,
             std::function<std::optional<std::shared_ptr<Synchronizer>>(const std::string&)> recover) {
            reducer.use({std::move(finish), [recover = std::move(recover)](const std::string& failure) {
                           return recover(failure).value_or(nullptr);
                         }});
          },
          py::kw_only(), py::arg("finish"), py::arg("recover"), NoGil())
      // begin() → int, why_unequal() → str, take(indices, gradients) and end(used); see Taker.
      .def(
          "give_to",
          [](GradReducer& reducer, std::function<int64_t()> begin, std::function<std::string()> why_unequal,
             std::function<void(const std::vector<size_t>&, const std::vector<at::Tensor>&)> take,
             std::function<void(const std::vector<size_t>&)> end) {
            reducer.give_to({std::move(begin), std::move(why_unequal), std::move(take), std::move(end)});
          },
          py::kw_only(), py::arg("begin"), py::arg("why_unequal"), py::arg("take"), py::arg("end"), NoGil())
      .def_property_readonly("num_passes", py::cpp_function(&GradReducer::num_passes, NoGil()))
      .def("buckets_now", &GradReducer::buckets_now, NoGil())
      .def("check", &GradReducer::check, NoGil())
      .def_property_readonly("observer", &GradReducer::observer, py::return_value_policy::reference_internal)
      .def("turn_on_once", &GradReducer::turn_on_once, NoGil())
      // With the GIL: a tensor's hooks are read by Python's garbage collector, on whichever thread collects.
      .def("synchronize_passes_of", &GradReducer::synchronize_passes_of, py::arg("outputs"))
      .def("refuse_local_passes", &GradReducer::refuse_local_passes, py::arg("refuse"), NoGil())
      .def("waits_for_pass", &GradReducer::waits_for_pass, NoGil())
      .def("lost_parameter", &GradReducer::lost_parameter, NoGil())
      .def("refuse", &GradReducer::refuse, py::arg("why"), NoGil())
      .def("detach", &GradReducer::detach, NoGil())
      .def("end_step", &GradReducer::end_step, NoGil())
      .def("end_step_without_gradients", &GradReducer::end_step_without_gradients, NoGil())
      .def("agree_on_number", &GradReducer::agree_on_number, py::arg("num_parameters"), NoGil())
      .def_property_readonly("has_begun_step", py::cpp_function(&GradReducer::has_begun_step, NoGil()))
      .def("set_passes", &GradReducer::set_passes, py::arg("passes"), NoGil())
      .def("set_layout", &GradReducer::set_layout, py::kw_only(), py::arg("group_of"), py::arg("order"), NoGil())
      .def("leave_ranks", &GradReducer::leave_ranks, NoGil())
      .def_property_readonly("num_copied", py::cpp_function(&GradReducer::num_copied, NoGil()));
  m.def("synchronized_by", &synchronized_by, py::arg("parameter"));
}

}  // namespace fusedcomm
