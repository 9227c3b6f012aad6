// Binds the plans of buckets: how each bucket is summed, in which steps, with how many bytes.
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/fields.h"
#include "engine/plan.h"
#include "gradients/grad_dtype.h"
#include "gradients/parameters.h"

namespace fusedcomm {
namespace {

namespace py = pybind11;

void bind_config(py::module_& m) {
  py::class_<WireConfig>(m, "WireConfig").def(py::init([](const py::kwargs& given) {
    WireConfig config = fields_of<WireConfig>(given);
    check_config(config);
    return config;
  }));
}

void bind_plans(py::module_& m) {
  py::class_<BucketPlan>(m, "BucketPlan")
      .def_property_readonly("sum",
                             [](const BucketPlan& plan) {
                               if (plan.encoded_rows.empty()) return sum_name(plan.sum);
                               return std::string(plan.gathers ? "all-gather" : "reduce-scatter");
                             })
      .def_readonly("layouts", &BucketPlan::layouts)
      .def_property_readonly("layout", [](const BucketPlan& plan) { return plan.layouts.at(0); })
      .def_property_readonly("sums_codes", &BucketPlan::sums_codes)
      .def_property_readonly("encodes_sums", &BucketPlan::encodes_sums)
      .def_property_readonly("num_chunks", &BucketPlan::num_chunks)
      .def_readonly("kept_nbytes", &BucketPlan::kept_nbytes)
      .def_readonly("pack_scale", &BucketPlan::pack_scale)
      .def_readonly("reduce_scale", &BucketPlan::reduce_scale)
      .def_readonly("unpack_scale", &BucketPlan::unpack_scale)
      .def_readonly("reason", &BucketPlan::reason)
      .def_property_readonly("sent_nbytes", &sent_nbytes)
      .def("sent_between_hosts_nbytes", &sent_between_hosts_nbytes, py::arg("ranks_on_host"), py::arg("links_of_host"));
}

}  // namespace

void bind_plan(pybind11::module_& m) {
  bind_config(m);
  bind_plans(m);
  m.def(
      "plan_bucket",
      [](const WireConfig& config, int world_size, const at::Tensor& like,
         const std::vector<std::pair<int64_t, int>>& slices, bool in_one_run) {
        const GradDtype dtype = grad_dtype_of(like.scalar_type());
        return plan_bucket(config, world_size, dtype, list_numels(slices, grad_nbytes(dtype), in_one_run));
      },
      py::arg("config"), py::arg("world_size"), py::arg("like"), py::arg("slices"), py::arg("in_one_run") = true);
  m.def("is_one_shot", &is_one_shot, py::arg("config"), py::arg("world_size"));
  m.def("workspace_nbytes", &workspace_nbytes, py::arg("config"), py::arg("world_size"));
  m.attr("SUMS") = sum_names();
  m.attr("SMALL_BUCKET_NBYTES") = kSmallBucketNbytes;
  m.attr("EXACT_WIRE") = kExactWire;
}

}  // namespace fusedcomm
