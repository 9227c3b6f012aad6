// Binds FusedSum, which Horovod's calls and FSDP2's all-reduce of shards use.
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/future.h"
#include "frontends/horovod/fused_sum.h"
#include "transport/error_text.h"

namespace fusedcomm {
namespace {

namespace py = pybind11;

}  // namespace

void bind_horovod_engine(py::module_& m) {
  using horovod::FusedSum;
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
