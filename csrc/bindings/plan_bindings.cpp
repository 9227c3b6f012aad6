// Binds the plans of buckets: how each bucket is summed, in which steps, with how many bytes.
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <variant>
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

void bind_steps(py::module_& m) {
  py::class_<Step>(m, "Step")
      .def_property_readonly("stage", [](const Step& step) { return stage_name(step.stage); })
      .def_property_readonly("operation", [](const Step& step) { return operation_name(step.operation); })
      .def_property_readonly("is_collective", [](const Step& step) { return is_collective(step.operation); })
      .def_property_readonly("channel", [](const Step& step) { return channel_name(step.channel); })
      .def_property_readonly("reads", [](const Step& step) { return buffer_name(step.from); })
      .def_property_readonly("writes", [](const Step& step) { return buffer_name(step.to); })
      .def_readonly("nbytes", &Step::nbytes)
      .def_readonly("num_ranks", &Step::num_ranks)
      .def_readonly("in_local_wire", &Step::in_local_wire)
      .def_readonly("begins_leg", &Step::begins_leg)
      .def("sent_nbytes", &Step::sent_nbytes, py::arg("num_chunks") = 1);

  py::class_<BucketPlan>(m, "BucketPlan")
      .def_property_readonly("sum",
                             [](const BucketPlan& plan) {
                               if (plan.packed_rows.empty()) return sum_name(plan.sum);
                               return std::string(plan.gathers ? "all-gather" : "reduce-scatter");
                             })
      .def_readonly("in_place", &BucketPlan::in_place)
      .def_readonly("layouts", &BucketPlan::layouts)
      .def_readonly("host_layouts", &BucketPlan::host_layouts)
      .def_property_readonly("layout", [](const BucketPlan& plan) { return plan.layouts.at(0); })
      .def_property_readonly("steps",
                             [](const BucketPlan& plan) { return plan.steps ? *plan.steps : std::vector<Step>{}; })
      .def_property_readonly("sums_codes", &BucketPlan::sums_codes)
      .def_property_readonly("encodes_sums", &BucketPlan::encodes_sums)
      .def_property_readonly("num_chunks", &BucketPlan::num_chunks)
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
  bind_steps(m);
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
