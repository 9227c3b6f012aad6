// Binds the synchronizer with its engine and results, and sums of named tensors.
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/future.h"
#include "gradients/collective_calls.h"
#include "gradients/fused_sum.h"
#include "gradients/pass_observer.h"
#include "gradients/synchronizer.h"

namespace fusedcomm {
namespace {

namespace py = pybind11;
using NoGil = py::call_guard<py::gil_scoped_release>;

void bind_results(py::module_& m) {
  py::class_<EngineStats>(m, "EngineStats")
      .def_property_readonly("counts",
                             [](const EngineStats& stats) {
                               std::map<std::string, int64_t> counts;
                               for (const CountField& field : kCountFields) counts[field.name] = stats.*field.count;
                               return counts;
                             })
      .def_readonly("num_timed_steps", &EngineStats::num_timed_steps)
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
      .def_readonly("numel", &BucketRecord::numel)
      .def_readonly("passthrough", &BucketRecord::passthrough)
      .def_property_readonly("dtype", [](const BucketRecord& record) { return record.dtype; })
      .def_property_readonly("parameters", &BucketRecord::parameter_names);
}

double seconds_since(Board::Clock::time_point then) {
  return std::chrono::duration<double>(Board::Clock::now() - then).count();
}

void bind_watched(py::module_& m) {
  using View = Board::View;
  // From `label` on, the fields describe the oldest job; the label is empty if there is none. Times are seconds until
  // they are read. stage, is_on_wire, chunk and stage_s mean something only if `at` is "stage".
  py::class_<View>(m, "BoardView")
      .def_readonly("num_handed", &View::num_handed)
      .def_readonly("num_ended", &View::num_ended)
      .def_readonly("last_step", &View::last_step)
      .def_property_readonly("idle_s", [](const View& view) { return seconds_since(view.last_ended); })
      .def_property_readonly("label", [](const View& view) { return view.label ? view.label->text : std::string(); })
      .def_readonly("step", &View::step)
      .def_readonly("num_chunks", &View::num_chunks)
      .def_property_readonly("waits_s", [](const View& view) { return seconds_since(view.handed); })
      .def_property_readonly("under_way_s", [](const View& view) { return seconds_since(view.oldest_since); })
      .def_property_readonly("stalled_s", [](const View& view) { return seconds_since(view.moved); })
      .def_property_readonly("at",
                             [](const View& view) {
                               constexpr std::array<const char*, 3> kNames = {"queue", "stage", "stream"};
                               return kNames[static_cast<size_t>(view.at)];
                             })
      .def_property_readonly("stage", [](const View& view) { return stage_name(view.stage); })
      .def_property_readonly("is_on_wire", [](const View& view) { return is_on_wire(view.stage); })
      .def_readonly("chunk", &View::chunk)
      .def_property_readonly("stage_s", [](const View& view) { return seconds_since(view.stage_began); });

  py::class_<Watched, std::shared_ptr<Watched>>(m, "Watched")
      .def("enter_thread", &Watched::enter_thread, NoGil())
      .def(
          "view", [](const Watched& watched, double still_s) { return watched.view(Watched::Seconds(still_s)); },
          py::arg("still_s"), NoGil())
      .def(
          "wait",
          [](Watched& watched, double timeout_s, bool for_failure) {
            return watched.wait(Watched::Seconds(timeout_s), for_failure);
          },
          py::arg("timeout_s"), py::arg("for_failure"), NoGil())
      .def("failure", &Watched::failure, NoGil())
      .def("answer", &Watched::answer, py::arg("explanation"), NoGil())
      .def("end", &Watched::end, NoGil());
}

// The synchronizer owns it, because its end joins threads that may wait for the GIL.
void bind_engine(py::module_& m) {
  py::class_<Engine, std::unique_ptr<Engine, py::nodelete>>(m, "Engine")
      .def("free_workspaces", &Engine::free_workspaces, NoGil())
      .def("start_trace", &Engine::start_trace, NoGil())
      .def("stop_trace", &Engine::stop_trace, NoGil())
      .def_property_readonly("scratch_nbytes", &Engine::scratch_nbytes);
}

void bind_fused_sum(py::module_& m) {
  py::class_<FusedSum, std::shared_ptr<FusedSum>>(m, "FusedSum")
      .def(py::init<std::shared_ptr<Synchronizer>>(), py::arg("synchronizer"))
      // Returns the sum's torch.futures.Future.
      .def(
          "run",
          [](FusedSum& sum, const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors,
             double factor, bool ends_step) {
            FuturePtr future;
            {
              const py::gil_scoped_release no_gil;
              future = sum.run(names, tensors, factor, ends_step);
            }
            return torch::jit::toPyObject(std::move(future));
          },
          py::kw_only(), py::arg("names"), py::arg("tensors"), py::arg("factor") = 1.0, py::arg("ends_step") = false);
}

void bind_synchronizer(py::module_& m) {
  py::class_<Synchronizer, std::shared_ptr<Synchronizer>>(m, "Synchronizer")
      .def(py::init([](const WireConfig& config, std::shared_ptr<Device> device,
                       std::shared_ptr<TensorTransport> transport,
                       const std::vector<std::tuple<at::Tensor, std::string, int>>& parameters, int wire_1d,
                       at::Device grad_device) {
             auto engine = std::make_shared<Engine>(config, std::move(device), transport);
             std::vector<Parameters::Known> table;
             for (const auto& [tensor, name, wire] : parameters) table.push_back({tensor, name, wire});
             return std::make_shared<Synchronizer>(std::move(engine), std::move(transport), table, grad_device,
                                                   wire_1d);
           }),
           py::kw_only(), py::arg("config"), py::arg("device"), py::arg("transport"), py::arg("parameters"),
           py::arg("wire_1d"), py::arg("grad_device"), NoGil())
      .def("residuals", &Synchronizer::residuals, py::arg("names") = py::none(), NoGil())
      .def("residuals_of_encoders", &Synchronizer::residuals_of_encoders, NoGil())
      .def("restore_residuals", &Synchronizer::restore_residuals, py::arg("residuals"), py::arg("names") = py::none(),
           py::arg("of_encoders") = std::map<std::string, EncoderResiduals>(), NoGil())
      .def_property("step", py::cpp_function(&Synchronizer::step, NoGil()),
                    py::cpp_function(&Synchronizer::restore_step, NoGil()))
      .def("before_every", &Synchronizer::before_every, py::arg("every"), py::arg("call"))
      .def("begin_pass", &Synchronizer::begin_pass, NoGil())
      .def(
          "watch",
          [](Synchronizer& synchronizer, double limit_s) { return synchronizer.watch(Watched::Seconds(limit_s)); },
          py::arg("limit_s"), NoGil())
      .def("unwatch", &Synchronizer::unwatch, NoGil())
      .def("stop", &Synchronizer::stop, py::arg("reason"), NoGil())
      .def("abort", &Synchronizer::abort, py::arg("reason"), NoGil())
      .def("leave", &Synchronizer::leave, py::arg("reason"), NoGil())
      .def(
          "wait_until_idle",
          [](const Synchronizer& synchronizer, double timeout_s) {
            synchronizer.wait_until_idle(std::chrono::milliseconds(static_cast<int64_t>(1000 * timeout_s)));
          },
          py::arg("timeout_s"), NoGil())
      .def("max_over_ranks", &max_over_ranks, py::arg("value"), py::arg("what"), NoGil())
      // Every rank's `numbers`, int64 [world_size, n] on the CPU; waits for the other ranks. A collective call.
      .def(
          "gather",
          [](const Synchronizer& synchronizer, const at::Tensor& numbers, const std::string& what) {
            return gather(synchronizer, numbers, what)->get();
          },
          py::arg("numbers"), py::arg("what"), NoGil())
      .def("begin_call", &begin_call, py::arg("what"), NoGil())
      .def("end_call", &end_call, py::arg("call"), py::arg("all_took_part"), NoGil())
      .def("explain", &Synchronizer::explain, py::arg("failure"), NoGil())
      .def(
          "take_over", [](Synchronizer& synchronizer, Synchronizer& from) { synchronizer.take_over(from, false); },
          py::arg("source"), NoGil())
      .def(
          "missing_means", [](Synchronizer& synchronizer) { return synchronizer.kept().missing(); }, NoGil())
      .def(
          "complete_bucket",
          [](Synchronizer& synchronizer, size_t index, const at::Tensor& means) {
            synchronizer.kept().complete(synchronizer.engine(), index, means);
          },
          py::arg("index"), py::arg("means"), NoGil())
      .def(
          "end_kept_pass", [](Synchronizer& synchronizer) { synchronizer.kept().end(); }, NoGil())
      .def(
          "kept_means", [](Synchronizer& synchronizer, size_t index) { return synchronizer.kept().means(index); },
          py::arg("index"), NoGil())
      // (name, number of dimensions) → number of the wire.
      .def("choose_wires", &Synchronizer::choose_wires, py::arg("wire_of"), NoGil())
      .def("take_notices", &Synchronizer::take_notices, NoGil())
      .def_property_readonly(
          "weights", [](Synchronizer& synchronizer) -> PassWeights& { return synchronizer.weights(); },
          py::return_value_policy::reference_internal)
      .def_property_readonly("transport", &Synchronizer::transport)
      .def("stats", &Synchronizer::stats, NoGil())
      .def_property_readonly(
          "engine", [](Synchronizer& synchronizer) -> Engine& { return synchronizer.engine(); },
          py::return_value_policy::reference_internal)
      .def("nonfinite_by_parameter", &Synchronizer::nonfinite_by_parameter, NoGil())
      .def("restore_nonfinite", &Synchronizer::restore_nonfinite, NoGil())
      .def(
          "buckets",
          [](const Synchronizer& synchronizer) {
            std::vector<std::shared_ptr<BucketRecord>> records;
            for (const auto& record : synchronizer.buckets())
              records.push_back(std::const_pointer_cast<BucketRecord>(record));
            return records;
          },
          NoGil());
}

// Without the GIL, because a pass that begins on an accelerator holds its lock while it waits for the pass before.
void bind_weights(py::module_& m) {
  py::class_<PassWeights>(m, "PassWeights")
      .def("use", &PassWeights::use, py::arg("of_sums"), NoGil())
      .def("count_active", &PassWeights::count_active, py::arg("counts"), NoGil())
      .def("set", &PassWeights::set, py::arg("weight"), NoGil())
      .def("set_invalid", &PassWeights::set_invalid, NoGil())
      .def("fix_unit", &PassWeights::fix_unit, py::arg("unit"), NoGil())
      .def("take_over", &PassWeights::take_over, py::arg("source"), NoGil())
      .def_property_readonly("is_refused", &PassWeights::is_refused)
      .def("note_pass", &PassWeights::note_pass, NoGil())
      .def("forget_passes", &PassWeights::forget_passes, NoGil())
      .def("defer", &PassWeights::defer, py::arg("rank"), NoGil())
      .def("spread", &PassWeights::spread, py::arg("num_ranks"), py::arg("rank"), NoGil())
      .def("follow", &PassWeights::follow, py::arg("of_rows"), NoGil())
      .def_property_readonly("of_sums", py::cpp_function(&PassWeights::of_sums, NoGil()))
      .def_property_readonly("has_noted", py::cpp_function(&PassWeights::has_noted, NoGil()))
      .def_property_readonly("in_pass", py::cpp_function(&PassWeights::in_pass, NoGil()));
}

void bind_passes(py::module_& m) {
  py::class_<PassObserver>(m, "PassObserver")
      .def("watch", &PassObserver::watch, py::arg("device"), py::arg("begin_pass"), py::kw_only(), py::arg("times"),
           NoGil())
      .def("unwatch", &PassObserver::unwatch, NoGil())
      .def("take_pass_ends", &PassObserver::take_pass_ends, NoGil());
}

}  // namespace

void bind_gradients(pybind11::module_& m) {
  m.def(
      "bucket_label",
      [](size_t index, const std::vector<std::string>& parameters, int64_t nbytes) {
        return make_label(index, parameters, static_cast<double>(nbytes))->text;
      },
      py::arg("index"), py::arg("parameters"), py::arg("nbytes"));
  bind_results(m);
  bind_weights(m);
  bind_passes(m);
  bind_engine(m);
  bind_watched(m);
  bind_synchronizer(m);
  bind_fused_sum(m);
}

}  // namespace fusedcomm
