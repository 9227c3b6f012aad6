// The Python boundary: a table of contents, nothing else.
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <variant>

#include "bindings/codec_bindings.h"
#include "bindings/device_bindings.h"
#include "frontends/ddp/hook.h"
#include "gradients/grad_dtype.h"
#include "wire/names.h"

// Of torch/csrc/jit/python/pybind_utils.h, which would take as long to compile as all of this file.
namespace torch::jit {
TORCH_PYTHON_API pybind11::object toPyObject(c10::IValue ivalue);
}  // namespace torch::jit

namespace fusedcomm {
namespace {

namespace py = pybind11;
using NoGil = py::call_guard<py::gil_scoped_release>;
using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

void bind_plan(py::module_& m) {
  py::class_<WireConfig>(m, "WireConfig")
      .def(py::init([](const std::string& wire, const std::string& sum, int64_t block, double predivide,
                       int64_t chunk_nbytes, int64_t chunks_in_flight, bool rotate,
                       const std::vector<std::tuple<std::string, int64_t, bool>>& others, bool stochastic,
                       uint64_t seed, const std::optional<std::string>& error_feedback, int64_t ranks_per_host,
                       const std::string& local_wire) {
             WireConfig config{wire_from_name(wire), sum_from_name(sum), block, predivide,
                               chunk_nbytes,         chunks_in_flight,   rotate};
             for (const auto& [name, block_numel, rotated] : others) {
               config.others.push_back({wire_from_name(name), block_numel, rotated, 0});
             }
             config.stochastic = stochastic;
             config.seed = seed;
             if (error_feedback) config.feedback = residual_format_from_name(*error_feedback);
             config.ranks_per_host = ranks_per_host;
             config.local_wire = wire_from_name(local_wire);
             check_config(config);
             return config;
           }),
           py::kw_only(), py::arg("wire"), py::arg("sum"), py::arg("block"), py::arg("predivide"),
           py::arg("chunk_nbytes"), py::arg("chunks_in_flight"), py::arg("rotate"), py::arg("others"),
           py::arg("stochastic"), py::arg("seed"), py::arg("error_feedback"), py::arg("ranks_per_host") = 1,
           py::arg("local_wire") = "bf16");

  py::class_<BucketPlan>(m, "BucketPlan")
      .def_property_readonly("sum", [](const BucketPlan& plan) { return sum_name(plan.sum); })
      .def_readonly("in_place", &BucketPlan::in_place)
      .def_readonly("layouts", &BucketPlan::layouts)
      .def_readonly("host_layouts", &BucketPlan::host_layouts)
      .def_property_readonly("layout", [](const BucketPlan& plan) { return plan.layouts.at(0); })
      .def_readonly("num_messages", &BucketPlan::num_messages)
      .def_readonly("pack_scale", &BucketPlan::pack_scale)
      .def_readonly("reduce_scale", &BucketPlan::reduce_scale)
      .def_readonly("unpack_scale", &BucketPlan::unpack_scale)
      .def_readonly("reason", &BucketPlan::reason)
      .def("sent_nbytes", &sent_nbytes, py::arg("world_size"))
      .def("sent_between_hosts_nbytes", &sent_between_hosts_nbytes, py::arg("world_size"), py::arg("ranks_per_host"));

  m.def(
      "plan_bucket",
      [](const WireConfig& config, int world_size, const at::Tensor& like, int64_t exact_numel,
         const std::variant<int64_t, std::vector<int64_t>>& lossy_numel) {
        const auto* numels = std::get_if<std::vector<int64_t>>(&lossy_numel);
        return plan_bucket(config, world_size, grad_dtype_of(like.scalar_type()), exact_numel,
                           numels ? *numels : std::vector<int64_t>{std::get<int64_t>(lossy_numel)});
      },
      py::arg("config"), py::arg("world_size"), py::arg("like"), py::arg("exact_numel"), py::arg("lossy_numel"));
  m.def("is_one_shot", &is_one_shot, py::arg("config"), py::arg("world_size"));
  m.def("workspace_nbytes", &workspace_nbytes, py::arg("config"), py::arg("world_size"));
  m.attr("SMALL_BUCKET_NBYTES") = kSmallBucketNbytes;
  m.attr("EXACT_WIRE") = kExactWire;
}

void bind_hosts(py::module_& m) {
  m.def(
      "with_hosts",
      [](const C10dTransport& transport, int64_t local_rank, int64_t ranks_per_host, int64_t host, int64_t num_hosts,
         const BackendPtr& local_scatter, const BackendPtr& local_gather, const BackendPtr& cross_scatter,
         const BackendPtr& cross_gather) {
        return transport.with_hosts({local_rank, ranks_per_host, host, num_hosts},
                                    {local_scatter, local_gather, cross_scatter, cross_gather});
      },
      py::arg("transport"), py::kw_only(), py::arg("local_rank"), py::arg("ranks_per_host"), py::arg("host"),
      py::arg("num_hosts"), py::arg("local_scatter"), py::arg("local_gather"), py::arg("cross_scatter"),
      py::arg("cross_gather"));
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& known) {
    return known.what_without_backtrace();
  } catch (const std::exception& other) {
    return other.what();
  }
}

// A backend that ends joins its threads, and those may be waiting for the GIL.
struct DeleteWithoutGil {
  void operator()(PeerSentinels* sentinels) const {
    const py::gil_scoped_release no_gil;
    delete sentinels;
  }
};

void bind_peers(py::module_& m) {
  py::class_<PeerSentinels, std::unique_ptr<PeerSentinels, DeleteWithoutGil>>(m, "PeerSentinels")
      .def(py::init<BackendPtr, int>(), py::kw_only(), py::arg("backend"), py::arg("tag"), NoGil())
      .def(
          "look",
          [](PeerSentinels& sentinels) {
            std::map<int, std::string> lost;
            for (const auto& [peer, error] : sentinels.look()) lost[peer] = text_of(error);
            return lost;
          },
          NoGil());
}

void bind_hook(py::module_& m) {
  py::class_<EngineStats>(m, "EngineStats")
      .def_readonly("num_steps", &EngineStats::num_steps)
      .def_readonly("num_buckets", &EngineStats::num_buckets)
      .def_readonly("grad_nbytes", &EngineStats::grad_nbytes)
      .def_readonly("sent_nbytes", &EngineStats::sent_nbytes)
      .def_readonly("sent_between_hosts_nbytes", &EngineStats::sent_between_hosts_nbytes)
      .def_readonly("num_nonfinite", &EngineStats::num_nonfinite)
      .def_readonly("busy_ms", &EngineStats::busy_ms)
      .def_readonly("recent_exposed_ms", &EngineStats::recent_exposed_ms)
      .def_readonly("recent_busy_ms", &EngineStats::recent_busy_ms);

  py::class_<TraceSpan>(m, "TraceSpan")
      .def_property_readonly("bucket", [](const TraceSpan& span) { return span.label->name; })
      .def_property_readonly("text", [](const TraceSpan& span) { return span.label->text; })
      .def_property_readonly("stage", [](const TraceSpan& span) { return stage_name(span.stage); })
      .def_readonly("step", &TraceSpan::step)
      .def_readonly("chunk", &TraceSpan::chunk)
      .def_readonly("begin_ms", &TraceSpan::begin_ms)
      .def_readonly("end_ms", &TraceSpan::end_ms);

  py::class_<BucketRecord, std::shared_ptr<BucketRecord>>(m, "BucketRecord")
      .def_property_readonly("label", [](const BucketRecord& record) { return record.label->text; })
      .def_readonly("plan", &BucketRecord::plan)
      .def_property_readonly("wires",
                             [](const BucketRecord& record) {
                               // Of the parameters, in their order.
                               std::vector<int> wires;
                               for (const auto& member : record.members) wires.push_back(member.state->wire);
                               return wires;
                             })
      .def_readonly("numel", &BucketRecord::numel)
      .def_readonly("foreign", &BucketRecord::foreign)
      .def_property_readonly("dtype", [](const BucketRecord& record) { return record.dtype; })
      .def_property_readonly("parameters", [](const BucketRecord& record) {
        std::vector<std::string> names;
        for (const auto& member : record.members) names.push_back(member.state->name);
        return names;
      });

  py::class_<Verification>(m, "Verification")
      .def_readonly("step", &Verification::step)
      .def_property_readonly("bucket", [](const Verification& verification) { return verification.label->text; })
      .def_readonly("norms", &Verification::norms);

  py::class_<Measurement>(m, "Measurement")
      .def_readonly("step", &Measurement::step)
      .def_readonly("error_norm", &Measurement::error_norm)
      .def_readonly("norm", &Measurement::norm);

  py::class_<GradHook, std::shared_ptr<GradHook>>(m, "GradHook")
      .def(py::init([](const WireConfig& config, std::shared_ptr<Device> device,
                       std::shared_ptr<C10dTransport> transport,
                       const std::vector<std::tuple<at::Tensor, std::string, int>>& parameters, int wire_1d,
                       at::Device grad_device, int64_t verify_every, int64_t measure_every, double fallback_error,
                       int fallback_wire) {
             auto engine = std::make_shared<Engine>(config, std::move(device), transport);
             std::vector<Parameters::Known> table;
             for (const auto& [tensor, name, wire] : parameters) table.push_back({tensor, name, wire});
             const GradHook::Options options{wire_1d, {verify_every, measure_every, fallback_error}, fallback_wire};
             return std::make_shared<GradHook>(std::move(engine), std::move(transport), table, grad_device, options);
           }),
           py::kw_only(), py::arg("config"), py::arg("device"), py::arg("transport"), py::arg("parameters"),
           py::arg("wire_1d"), py::arg("grad_device"), py::arg("verify_every"), py::arg("measure_every"),
           py::arg("fallback_error"), py::arg("fallback_wire"), NoGil())
      .def(
          "verifications",
          [](const GradHook& hook) {
            hook.settle();
            return hook.guard().verifications();
          },
          NoGil())
      .def(
          "measurements",
          [](const GradHook& hook) {
            hook.settle();
            return hook.guard().measurements();
          },
          NoGil())
      .def("residuals", &GradHook::residuals, NoGil())
      .def("restore_residuals", &GradHook::restore_residuals, NoGil())
      .def_property("step", py::cpp_function(&GradHook::step, NoGil()),
                    py::cpp_function(&GradHook::restore_step, NoGil()))
      .def("run",
           [](GradHook& hook, c10d::GradBucket& bucket) {
             c10::intrusive_ptr<c10::ivalue::Future> future;
             {
               py::gil_scoped_release no_gil;
               future = hook.run(bucket);
             }
             return torch::jit::toPyObject(std::move(future));
           })
      .def(
          "watch",
          [](GradHook& hook, const StorePtr& store, double stall_after_s, double timeout_s,
             const std::string& store_text) {
            const int rank = hook.engine().rank(), world_size = hook.engine().world_size();
            hook.watch(store, {rank, world_size, stall_after_s, timeout_s, store_text});
          },
          py::kw_only(), py::arg("store"), py::arg("stall_after_s"), py::arg("timeout_s"), py::arg("store_text"),
          NoGil())
      .def("unwatch", &GradHook::unwatch, NoGil())
      .def("stop", &GradHook::stop, py::arg("reason"), NoGil())
      .def("leave", &GradHook::leave, py::arg("reason"), NoGil())
      .def(
          "free_workspaces", [](const GradHook& hook) { hook.engine().free_workspaces(); }, NoGil())
      .def("max_over_ranks", &GradHook::max_over_ranks, py::arg("value"), py::arg("what"), NoGil())
      .def("begin_call", &GradHook::begin_call, py::arg("what"), NoGil())
      .def("end_call", &GradHook::end_call, py::arg("call"), py::arg("all_took_part"), NoGil())
      .def("name_like", &GradHook::name_like, py::arg("other"), NoGil())
      .def("take_notices", &GradHook::take_notices, NoGil())
      .def_property_readonly("transport", &GradHook::transport)
      .def("stats", &GradHook::stats, NoGil())
      .def(
          "start_trace", [](const GradHook& hook) { hook.engine().start_trace(); }, NoGil())
      .def(
          "stop_trace", [](const GradHook& hook) { return hook.engine().stop_trace(); }, NoGil())
      .def_property_readonly("isa", [](const GradHook& hook) { return hook.engine().device().isa(); })
      .def_property_readonly("scratch_nbytes", [](const GradHook& hook) { return hook.engine().scratch_nbytes(); })
      .def("nonfinite_by_parameter", &GradHook::nonfinite_by_parameter, NoGil())
      .def("restore_nonfinite", &GradHook::restore_nonfinite, NoGil())
      .def(
          "buckets",
          [](const GradHook& hook) {
            std::vector<std::shared_ptr<BucketRecord>> records;
            for (const auto& record : hook.buckets()) records.push_back(std::const_pointer_cast<BucketRecord>(record));
            return records;
          },
          NoGil());

  py::class_<SeenBucket>(m, "SeenBucket")
      .def_readonly("nbytes", &SeenBucket::nbytes)
      .def_readonly("is_last", &SeenBucket::is_last)
      .def_readonly("handed_ms", &SeenBucket::handed_ms)
      .def_readonly("done_ms", &SeenBucket::done_ms);

  py::class_<HookTarget, std::shared_ptr<HookTarget>>(m, "HookTarget")
      .def(py::init<ProcessGroupPtr>(), py::arg("process_group"))
      .def("set", &HookTarget::set, py::arg("hook"), py::arg("process_group"), NoGil())
      .def(
          "watch",
          [](HookTarget& target, std::shared_ptr<Device> device, std::function<void()> begin_pass) {
            target.watch(std::make_shared<PassWatch>(std::move(device), std::move(begin_pass)));
          },
          py::arg("device"), py::arg("begin_pass"), NoGil())
      .def(
          "unwatch", [](HookTarget& target) { target.watch(nullptr); }, NoGil())
      .def("take_seen", &HookTarget::take_seen, NoGil());

  m.def(
      "register_ddp_hook",
      [](c10d::Reducer& reducer, std::shared_ptr<HookTarget> target) {
        reducer.register_comm_hook(std::make_unique<DdpHook>(std::move(target)));
      },
      py::arg("reducer"), py::arg("target"));
  m.def("take_ddp_hook", &take_ddp_hook, py::arg("reducer"), NoGil());
}

}  // namespace
}  // namespace fusedcomm

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  fusedcomm::bind_codec(m);
  fusedcomm::bind_plan(m);
  fusedcomm::bind_devices(m);
  fusedcomm::bind_hosts(m);
  fusedcomm::bind_peers(m);
  fusedcomm::bind_hook(m);
}
