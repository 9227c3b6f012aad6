// Binds what Horovod's front end does with the engine, for tests.
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "frontends/horovod/fused_sum.h"

namespace fusedcomm {
namespace {

namespace py = pybind11;
using NoGil = py::call_guard<py::gil_scoped_release>;

// The text of an error; empty for null.
std::string error_text(const std::exception_ptr& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& known) {
    return known.what_without_backtrace();
  } catch (const std::exception& other) {
    return other.what();
  }
}

}  // namespace

void bind_horovod_engine(py::module_& m) {
  using horovod::FusedSum;
  py::class_<FusedSum, std::shared_ptr<FusedSum>>(m, "FusedSum")
      .def(py::init<std::shared_ptr<Synchroniser>>(), py::arg("synchroniser"))
      // done: gets the text of the error, empty if there is none.
      .def(
          "run",
          [](FusedSum& sum, const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors,
             double factor, FusedSum::IsVoid is_void, std::function<void(std::string)> done) {
            sum.run(names, tensors, factor, std::move(is_void),
                    [done = std::move(done)](const std::exception_ptr& error) { done(error_text(error)); });
          },
          py::kw_only(), py::arg("names"), py::arg("tensors"), py::arg("factor") = 1.0, py::arg("is_void") = nullptr,
          py::arg("done"), NoGil());
}

}  // namespace fusedcomm
