// Binds what the optimizer of Horovod's calls needs.
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "gradients/parameter_gradient.h"

namespace fusedcomm {
namespace {

namespace py = pybind11;
using NoGil = py::call_guard<py::gil_scoped_release>;

// A parameter's dense gradient, or a copy (see bucket_gradient()), and a view of it whose dimensions are in the order
// of memory, which is contiguous.
std::pair<at::Tensor, at::Tensor> gradient_as_sent(const at::Tensor& parameter,
                                                   const std::optional<at::Tensor>& arriving) {
  const at::NoGradGuard no_grad;
  at::Tensor gradient =
      bucket_gradient(parameter, /*is_sparse=*/false, /*is_kept=*/false, arriving.value_or(at::Tensor())).tensor;
  if (gradient.is_contiguous()) return {gradient, gradient};
  std::vector<int64_t> dims(static_cast<size_t>(gradient.dim()));
  std::iota(dims.begin(), dims.end(), int64_t{0});
  std::stable_sort(dims.begin(), dims.end(),
                   [&](int64_t a, int64_t b) { return gradient.stride(a) > gradient.stride(b); });
  return {gradient, gradient.permute(dims).contiguous()};  // copies nothing
}

}  // namespace

void bind_horovod(pybind11::module_& m) {
  m.def("gradient_as_sent", &gradient_as_sent, py::arg("parameter"), py::arg("arriving"), NoGil());
}

}  // namespace fusedcomm
