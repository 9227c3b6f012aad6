// Runs the CUDA path without a GPU, from DDP's hook to the launches of kernels. The hook, the synchronizer, the engine,
// CudaDevice and StreamTransport are the product's. The accelerator is simulated (sim_accelerator.h), and so are
// torch's tensors on it (sim_torch.cpp), the driver and its kernels (sim_kernels.h) and the process group
// (sim_backend.h). Ranks are threads. The backward pass writes gradients on a compute stream, and the optimizer reads
// them there after the wait for the bucket's future.
//
// The program is a library, because its objects need Python's symbols: run(scene, seed) is called from Python.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <functional>
#include <future>
#include <map>
#include <numeric>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "devices/cuda_device.h"
#include "frontends/ddp/hook.h"
#include "gradients/collective_calls.h"
#include "scenes.h"
#include "sim_backend.h"
#include "sim_kernels.h"
#include "sim_training.h"
#include "transport/c10d_transport.h"

using namespace fusedcomm;

namespace {

struct Setup {
  WireConfig config;  // its ranks_per_host determines which ranks share a host
  int world_size = 2;
  // Of several chunks, of one, small, and of one again.
  std::vector<std::vector<sim::Shape>> buckets = {
      {{5700}, {40, kExactWire}}, {{1500}}, {{700}}, {{64, kExactWire}, {3000}, {9}}};
  bool passes_float64 = false;  // whether one more bucket comes first, of float64
  bool are_apart = false;       // whether each gradient is a tensor of its own; otherwise they are DDP's buckets
  int num_synced = 0;           // the ranks, from 0 on, with forced synchronization
  int64_t measure_every = 0;
  sim::BackendOptions backend;
};

// Gradients are small signed integers times a power of two, so every wire of these scenes has the exact mean.
double gradient(int rank, int step, size_t bucket, size_t i) {
  const int value = static_cast<int>((i * 7 + bucket * 5 + static_cast<size_t>(step) * 3) % 15) - 7;
  return value * (rank + 1) * 0.25;
}

// ---- one rank's training

class Rank {
 public:
  // Call it on the rank's thread.
  Rank(const Setup& setup, sim::Groups& groups, int rank)
      : setup_(setup), rank_(rank), device_(sim::device(rank)), on_device_(device_), model_(device_, shapes_of(setup)) {
    // Attaching may happen on another stream than training.
    const c10::StreamGuard on_side(c10::impl::VirtualGuardImpl(device_.type()).getNewStream(device_, 0));
    cuda_ = sim::cuda_device(device_, rank < setup.num_synced);
    cuda_->warm_up();
    const auto transport = make_transport(groups);
    hook_ = std::make_shared<Synchronizer>(std::make_shared<Engine>(setup.config, cuda_, transport), transport,
                                           model_.known, device_, Synchronizer::Options{0, setup.measure_every});
    switch_.set(hook_, nullptr);
    for (int stream = 0; stream < kNumStreams; ++stream) {
      sim::set_pause(rank, stream, stream == rank % kNumStreams ? 400 : 40);
    }
  }

  // Makes new gradients of a bucket.
  void allocate(size_t b) {
    gradients_.resize(num_buckets());
    gradients_[b].clear();
    int64_t numel = 0;
    for (const at::Tensor& parameter : model_.parameters[b]) {
      if (setup_.are_apart) gradients_[b].push_back(at::empty_like(parameter));
      numel += parameter.numel();
    }
    if (!setup_.are_apart) gradients_[b].push_back(at::empty({numel}, model_.parameters[b][0].options()));
  }

  // Makes them, and enqueues the backward pass that writes them.
  void fill(int step, size_t b) {
    allocate(b);
    size_t first = 0;
    for (const at::Tensor& gradients : gradients_[b]) {
      sim::backward(gradients, [=, rank = rank_](size_t i) { return gradient(rank, step, b, first + i); });
      first += static_cast<size_t>(gradients.numel());
    }
  }

  // The last bucket ends a pass.
  void hand_over(size_t b) {
    futures_.resize(num_buckets());
    next_ = (b + 1) % num_buckets();
    const std::vector<at::Tensor>& parameters = model_.parameters[b];
    const sim::CountCalls counts(true);
    if (setup_.are_apart) {
      const Bucket bucket(b, b + 1 == num_buckets(), parameters, std::make_shared<const Gradients>(gradients_[b]));
      futures_[b] = hook_->run(bucket);
      return;
    }
    std::vector<size_t> offsets, lengths;
    std::vector<c10::IntArrayRef> sizes;
    for (const at::Tensor& parameter : parameters) {
      offsets.push_back(offsets.empty() ? 0 : offsets.back() + lengths.back());
      lengths.push_back(static_cast<size_t>(parameter.numel()));
      sizes.push_back(parameter.sizes());
    }
    c10d::GradBucket bucket(b, num_buckets(), gradients_[b][0], offsets, lengths, sizes, parameters, std::nullopt);
    futures_[b] = switch_.run(bucket);
  }

  // Why a bucket cannot be handed over, or has failed; empty if neither.
  std::string error_of(size_t b) {
    try {
      hand_over(b);
      return futures_[b]->hasError() ? futures_[b]->tryRetrieveErrorMessage() : "";
    } catch (const std::exception& e) {
      return e.what();
    }
  }

  // The same of the next bucket, whose gradients no backward pass writes.
  std::string error_of_next() {
    allocate(next_);
    return error_of(next_);
  }

  // Enqueues a backward pass. Returns the index of the bucket that failed, after which none is handed over; the number
  // of buckets if none did.
  size_t backward(int step) {
    for (size_t b = 0; b < num_buckets(); ++b) {
      fill(step, b);
      error_ = error_of(b);
      if (!error_.empty()) return b;
    }
    return num_buckets();
  }

  // Enqueues the waits for the buckets of the pass, or only for the last, and the optimizer.
  void take_results(int step, bool waits_for_all = true) {
    if (!waits_for_all) futures_.back()->waitAndThrow();
    for (size_t b = 0; b < num_buckets(); ++b) {
      if (waits_for_all) futures_[b]->waitAndThrow();
      size_t first = 0;
      for (const at::Tensor& gradients : gradients_[b]) {
        sim::optimizer(gradients, [=, this](size_t i, double value) { check(value, step, b, first + i); });
        first += static_cast<size_t>(gradients.numel());
      }
    }
    abandon();
  }

  // A step that must not fail. The host does not wait for it.
  void train(int step, bool waits_for_all = true) {
    REQUIRE(backward(step) == num_buckets(), "step %d: %s", step, error_.c_str());
    take_results(step, waits_for_all);
  }

  // Drops the buckets without waiting for them, as after a backward pass that failed.
  void abandon() {
    gradients_.clear();
    futures_.clear();
  }
  // Drops all that detaching drops.
  void detach() {
    switch_.set(nullptr, nullptr);
    switch_.watch(nullptr);
    hook_ = nullptr;
    cuda_ = nullptr;
  }

  c10::Stream compute() const { return sim::current_stream(rank_); }
  void synchronize() const { sim::synchronize(compute(), /*counts=*/false); }
  Synchronizer& hook() const { return *hook_; }
  Engine& engine() const { return hook_->engine(); }
  CudaDevice& cuda() const { return *cuda_; }
  HookSwitch& hook_switch() { return switch_; }
  void observe() {
    switch_.watch(std::make_shared<PassObserver>(cuda_, [] {}));
  }
  size_t num_buckets() const { return model_.parameters.size(); }
  const std::string& error() const { return error_; }

 private:
  static constexpr int kNumStreams = 5;  // the default one, the one of attaching, and the device's

  static std::vector<std::vector<sim::Shape>> shapes_of(const Setup& setup) {
    std::vector<std::vector<sim::Shape>> shapes = setup.buckets;
    if (setup.passes_float64) shapes.insert(shapes.begin(), {{500, 0, at::kDouble}, {20, 0, at::kDouble}});
    return shapes;
  }

  // Ranks are on hosts in order: the first `ranks_per_host` are on the first one.
  std::shared_ptr<C10dTransport> make_transport(sim::Groups& groups) {
    const int64_t on_host = setup_.config.ranks_per_host;
    const auto backend = [&](const std::string& name, int64_t rank, int64_t size) {
      return sim::make_backend(groups.get(name, size), static_cast<int>(rank), static_cast<int>(size), setup_.backend);
    };
    const auto transport = std::make_shared<StreamTransport>(backend("all", rank_, setup_.world_size), device_);
    if (on_host == 1) return transport;
    const Place place{rank_ % on_host, on_host, rank_ / on_host, setup_.world_size / on_host};
    const auto local = backend("host " + std::to_string(place.host), place.local_rank, on_host);
    const auto cross = backend("cross " + std::to_string(place.local_rank), place.host, place.num_hosts);
    return transport->with_hosts(place, {local, local, cross, cross});
  }

  // Called on a stream's thread.
  void check(double value, int step, size_t b, size_t i) const {
    double mean = 0;
    for (int rank = 0; rank < setup_.world_size; ++rank) mean += gradient(rank, step, b, i) / setup_.world_size;
    REQUIRE(std::fabs(value - mean) <= 1e-6, "rank %d: step %d bucket %zu element %zu: %g, not %g", rank_, step, b, i,
            value, mean);
  }

  const Setup setup_;
  const int rank_;
  const c10::Device device_;
  const c10::DeviceGuard on_device_;
  const sim::Model model_;
  std::shared_ptr<CudaDevice> cuda_;
  std::shared_ptr<Synchronizer> hook_;
  HookSwitch switch_{nullptr};
  std::vector<std::vector<at::Tensor>> gradients_;  // of this pass, by bucket
  std::vector<FuturePtr> futures_;                  // the same
  std::string error_;                               // of the pass's last bucket that was handed over
  size_t next_ = 0;                                 // the bucket that is to be handed over
};

// Calls body(rank, index) on a thread for each rank. When it returns, all enqueued work has ended, unless rank 0's
// device `is_faulted`.
void with_ranks(const Setup& setup, const std::function<void(Rank&, int)>& body, bool is_faulted = false) {
  sim::Groups groups;
  std::vector<int> indices(static_cast<size_t>(setup.world_size));
  std::iota(indices.begin(), indices.end(), 0);
  sim::on_threads(indices, [&](int index) {
    Rank rank(setup, groups, index);
    body(rank, index);
    if (index != 0 || !is_faulted) sim::finish(index);
  });
  sim::reset();
}

// ---- scenes: results and lifetimes

WireConfig wire_config(Wire wire, Sum sum, int64_t ranks_per_host = 1, int64_t num_slots = 2) {
  WireConfig config;
  config.ranks_per_host = ranks_per_host;
  config.wire = wire;
  config.sum = sum;
  config.max_chunk_nbytes = 4096;
  config.num_slots = num_slots;
  return config;
}

Setup setup_of(const WireConfig& config) {
  Setup setup;
  setup.config = config;
  setup.world_size = 2 * static_cast<int>(config.ranks_per_host);
  return setup;
}

// Every kind of sum, with what may go along with it.
std::vector<Setup> setups() {
  std::vector<Setup> all;
  const auto add = [&all](const WireConfig& config) -> Setup& { return all.emplace_back(setup_of(config)); };
  add(wire_config(Wire::kBf16, Sum::kTwoShot)).passes_float64 = true;
  Setup& apart = add(wire_config(Wire::kBf16, Sum::kOneShot));
  apart.config.feedback = ResidualFormat::kFp32;
  apart.passes_float64 = apart.are_apart = true;
  Setup& exact = add(wire_config(Wire::kFp32, Sum::kExact));
  exact.passes_float64 = true;
  exact.backend.has_own_stream = true;
  Setup& checked = add(wire_config(Wire::kBf16, Sum::kTwoShot));
  checked.config.feedback = ResidualFormat::kFp32;
  checked.measure_every = 1;
  Setup& measured = add(wire_config(Wire::kBf16, Sum::kTwoShot, 1, 3));
  measured.measure_every = 1;
  measured.backend.has_own_stream = true;
  add(wire_config(Wire::kBf16, Sum::kTwoShot, 2)).measure_every = 2;
  add(wire_config(Wire::kBf16, Sum::kTwoShot, 2, 1)).num_synced = 4;
  add(wire_config(Wire::kFp32, Sum::kTwoShot, 1, 1)).world_size = 3;
  add(wire_config(Wire::kBf16, Sum::kTwoShot)).world_size = 1;
  return all;
}

// One of each kind of sum.
std::vector<Setup> sums() {
  return {setup_of(wire_config(Wire::kBf16, Sum::kTwoShot)), setup_of(wire_config(Wire::kBf16, Sum::kOneShot)),
          setup_of(wire_config(Wire::kFp32, Sum::kExact)), setup_of(wire_config(Wire::kBf16, Sum::kTwoShot, 2))};
}

// Training that waits for its buckets, and then looks at all that is counted and measured.
void training_steps() {
  for (const Setup& setup : setups()) {
    with_ranks(setup, [&](Rank& rank, int) {
      constexpr int kNumSteps = 5;
      rank.observe();
      for (int step = 0; step < kNumSteps; ++step) rank.train(step);
      REQUIRE(rank.hook().stats().num_nonfinite == 0, "non-finite elements were counted");
      rank.hook().settle();
      for (const auto& [name, measurement] : rank.hook().monitor().measurements()) {
        REQUIRE(measurement.error_norm.item<double>() == 0 && measurement.norm.item<double>() > 0,
                "%s has the error %g", name.c_str(), measurement.error_norm.item<double>());
      }
      rank.synchronize();
      const size_t num_ends = rank.hook_switch().take_pass_ends().size();
      REQUIRE(setup.are_apart || num_ends == kNumSteps, "%zu passes were observed", num_ends);
      rank.detach();
    });
  }
}

// Nobody waits for the last pass, and all is dropped while the streams still work.
void dropped() {
  for (const Setup& setup : setups()) {
    for (const bool detaches_first : {false, true}) {
      with_ranks(setup, [&](Rank& rank, int) {
        rank.observe();
        for (int step = 0; step < 2; ++step) rank.train(step);
        rank.backward(2);
        if (detaches_first) rank.detach();
        rank.abandon();
        if (!detaches_first) rank.detach();
      });
    }
  }
}

// What a training script may call after a backward pass, without having waited for its buckets.
void calls() {
  Setup setup = setup_of(wire_config(Wire::kBf16, Sum::kTwoShot));
  setup.measure_every = 1;
  with_ranks(setup, [&](Rank& rank, int index) {
    for (int step = 0; step < 6; ++step) {
      rank.backward(step);
      if (step % 2 == 0) {
        REQUIRE(rank.hook().stats().num_nonfinite == 0, "non-finite elements were counted");
      } else {
        rank.hook().settle();
        for (const auto& [name, measurement] : rank.hook().monitor().measurements()) {
          REQUIRE(measurement.error_norm.item<double>() == 0, "%s has an error", name.c_str());
        }
      }
      rank.take_results(step);
      const double largest = max_over_ranks(rank.hook(), index + step, "a call of this scene");
      REQUIRE(largest == step + 1, "the largest value is %g", largest);
    }
  });
}

// A bucket that is passed through in stages, each on its own lane, and summed twice.
void staged_passthrough() {
  with_ranks(setup_of(wire_config(Wire::kBf16, Sum::kTwoShot)), [](Rank& rank, int index) {
    for (int step = 0; step < 4; ++step) {
      const at::Tensor values = at::full({300}, index + 1.0, at::TensorOptions().device(rank.hook().grad_device()));
      const auto times = [values](double factor) { return [=] { at::Tensor(values).mul_(factor); }; };
      const auto sum = [&](Channel channel) {
        return [values, channel, transport = rank.hook().transport()](Lane::Completion done) {
          transport->all_reduce_tensor(channel, values, std::move(done));
        };
      };
      const auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(),
                                                                   std::vector<c10::Device>{rank.hook().grad_device()});
      auto job = std::make_shared<BucketJob>();
      job->owner = std::make_shared<at::Tensor>(values);
      job->label = std::make_shared<const BucketLabel>("bucket 0", "bucket 0 of this scene");
      job->is_last = true;
      job->on_done = [future, values](std::exception_ptr error) {
        error ? future->setError(std::move(error)) : future->markCompleted(values);
      };
      rank.hook().engine().device().will_use(values);
      rank.engine().submit_passthrough(
          std::move(job), {times(0.5), sum(Channel::kScatter), times(3), sum(Channel::kGather), times(0.25)});
      future->waitAndThrow();
      sim::optimizer(values, [](size_t, double value) { REQUIRE(value == 2.25, "%g, not 2.25", value); });
    }
  });
}

// ---- scenes: the host, and times

void open(std::promise<void>* gate, const c10::Stream& stream) {
  sim::launch(stream, "gate", {}, [opened = gate->get_future().share()] { opened.wait(); });
}

// The times of the last `num_steps` of a number of steps.
void check_times(const EngineStats& stats, size_t num_steps) {
  REQUIRE(stats.recent_exposed_ms.size() == num_steps && stats.recent_busy_ms.size() == num_steps,
          "%zu and %zu times of %zu steps", stats.recent_exposed_ms.size(), stats.recent_busy_ms.size(), num_steps);
  for (size_t i = 0; i < num_steps; ++i) {
    const float exposed = stats.recent_exposed_ms[i], busy = stats.recent_busy_ms[i];
    REQUIRE(exposed > 0 && exposed <= busy * 1.0001F && busy < 60000, "exposed %g ms, busy %g ms", exposed, busy);
  }
}

// Although the gradients are not ready, all work is enqueued. Times are known only afterwards.
void host_never_waits() {
  std::vector<Setup> all = sums();
  all.push_back(all[0]);
  all.back().buckets = {{{0}}, {{2000}}};
  for (const Setup& setup : all) {
    with_ranks(setup, [&](Rank& rank, int) {
      rank.train(0);  // makes the buckets' tables
      rank.synchronize();
      check_times(rank.engine().stats(), 1);
      std::promise<void> gate;
      open(&gate, rank.compute());
      for (int step = 1; step < 4; ++step) rank.train(step);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));  // gives wrongly ordered work time to run
      const EngineStats early = rank.engine().stats();
      REQUIRE(early.num_steps == 4 && early.recent_exposed_ms.size() == 1, "times are known before anything was done");
      gate.set_value();
      rank.synchronize();
      check_times(rank.engine().stats(), 4);
    });
  }
}

// A bucket ends after the bucket before it, on whichever streams they end.
void end_in_order() {
  for (const auto& buckets : {std::vector<std::vector<sim::Shape>>{{{5700}}, {{1}}}, {{{900}}, {{0}}}}) {
    Setup setup = setup_of(wire_config(Wire::kBf16, Sum::kTwoShot));
    setup.buckets = buckets;
    with_ranks(setup, [&](Rank& rank, int) {
      for (int step = 0; step < 3; ++step) rank.train(step, /*waits_for_all=*/false);
    });
  }
}

// The stages of a chunk, in order.
std::vector<Stage> stages_of(const Setup& setup, bool is_passed_through) {
  if (is_passed_through) return {Stage::kAllReduce};
  if (setup.config.sum == Sum::kExact) return {Stage::kPack, Stage::kAllReduce};
  if (setup.config.sum == Sum::kOneShot) return {Stage::kPack, Stage::kAllGather, Stage::kUnpack};
  if (setup.config.ranks_per_host == 1) {
    return {Stage::kPack, Stage::kAllToAll, Stage::kReduce, Stage::kAllGather, Stage::kUnpack};
  }
  return {Stage::kPack,   Stage::kLocalAllToAll, Stage::kLocalReduce,    Stage::kAllToAll,
          Stage::kReduce, Stage::kAllGather,     Stage::kLocalAllGather, Stage::kUnpack};
}

void traced() {
  for (Setup setup : sums()) {
    setup.passes_float64 = true;
    with_ranks(setup, [&](Rank& rank, int) {
      rank.train(0);
      rank.engine().start_trace();
      for (int step = 1; step < 4; ++step) rank.train(step);
      const std::vector<TraceSpan> spans = rank.engine().stop_trace();  // waits for the device
      rank.train(4);
      REQUIRE(rank.engine().stop_trace().empty(), "stages were recorded after the trace");

      std::map<std::tuple<int64_t, std::string, int64_t>, std::vector<const TraceSpan*>> chunks;
      std::map<std::pair<int64_t, std::string>, const TraceSpan*> buckets;
      int num_exposed = 0;
      for (const TraceSpan& span : spans) {
        REQUIRE(0 <= span.begin_ms && span.begin_ms < span.end_ms, "%s of %s from %g to %g ms", stage_name(span.stage),
                span.label->name.c_str(), span.begin_ms, span.end_ms);
        if (span.stage == Stage::kExposed) {
          ++num_exposed;
        } else if (span.stage == Stage::kBucket) {
          buckets[{span.step, span.label->name}] = &span;
        } else {
          chunks[{span.step, span.label->name, span.chunk}].push_back(&span);
        }
      }
      REQUIRE(buckets.size() == 3 * rank.num_buckets(), "%zu buckets", buckets.size());
      REQUIRE(num_exposed == 3, "%d steps waited for their last bucket", num_exposed);
      for (const auto& [key, bucket] : buckets) {
        REQUIRE(chunks.count({key.first, key.second, 0}) != 0, "no stage of %s was recorded", key.second.c_str());
      }
      for (const auto& [key, stages] : chunks) {
        const auto& [step, name, chunk] = key;
        const TraceSpan& bucket = *buckets.at({step, name});
        double before = bucket.begin_ms;
        std::vector<Stage> order;
        for (const TraceSpan* stage : stages) {
          REQUIRE(before <= stage->begin_ms, "%s of %s chunk %ld began too early", stage_name(stage->stage),
                  name.c_str(), static_cast<long>(chunk));
          before = stage->end_ms;
          order.push_back(stage->stage);
        }
        REQUIRE(before <= bucket.end_ms, "%s ended before its last stage", name.c_str());
        REQUIRE(order == stages_of(setup, name == "bucket 0"), "%s chunk %ld has %zu stages", name.c_str(),
                static_cast<long>(chunk), order.size());
      }
    });
  }
}

// The calls to the driver that handing over a pass's buckets takes on rank 0, after earlier passes have made events
// that can be reused. While the pass is handed over, none of its events is reached, and every event of the pass before
// is.
sim::Calls calls_of_a_pass(const Setup& setup) {
  sim::Calls counted;
  with_ranks(setup, [&](Rank& rank, int index) {
    for (int step = 0; step < 5; ++step) {
      std::promise<void> gate;
      if (step != 0) open(&gate, rank.compute());
      sim::fail(index, {});  // counts anew
      rank.train(step);
      if (index == 0) counted = sim::calls(index);
      if (step != 0) gate.set_value();
      rank.synchronize();
    }
  });
  return counted;
}

// The number of calls for a bucket, those of torch's future included: each takes the thread of the backward pass about
// a microsecond.
void driver_calls() {
  constexpr size_t kNumBuckets = 8;
  struct Case {
    Wire wire;
    Sum sum;
    double of_several_chunks, of_one_chunk, of_a_small_one;
  };
  for (const Case& c :
       {Case{Wire::kBf16, Sum::kTwoShot, 50.5, 16.5, 11.5}, Case{Wire::kBf16, Sum::kOneShot, 32.5, 14.5, 9.5},
        Case{Wire::kBf16, Sum::kDirect, 32.5, 14.5, 9.5}, Case{Wire::kFp32, Sum::kExact, 12.5, 12.5, 8.5}}) {
    for (const auto& [numel, expected] :
         {std::pair{5700, c.of_several_chunks}, std::pair{1500, c.of_one_chunk}, std::pair{700, c.of_a_small_one}}) {
      Setup setup = setup_of(wire_config(c.wire, c.sum));
      setup.buckets.assign(kNumBuckets, {{numel}});
      const sim::Calls pass = calls_of_a_pass(setup);
      const double found = static_cast<double>(pass.total()) / kNumBuckets;
      REQUIRE(pass.on_default == 0, "%ld launches on the caller's stream", static_cast<long>(pass.on_default));
      REQUIRE(found == expected, "%g calls a bucket of %d elements, not %g", found, numel, expected);
    }
  }
}

// ---- scenes: failures

// Each call to the device fails once in max_over_ranks(), on all ranks. Its memory may still be under way then.
void failing_calls() {
  int64_t num_calls = 0;
  for (int64_t failing = 0; failing <= num_calls; ++failing) {
    with_ranks(setup_of(wire_config(Wire::kBf16, Sum::kTwoShot)), [&](Rank& rank, int index) {
      sim::fail(index, {.ordering = failing});
      const sim::CountCalls counted(true);
      bool failed = false;
      try {
        max_over_ranks(rank.hook(), 1, "a call of this scene");
      } catch (const std::exception&) {
        failed = true;
      }
      REQUIRE(failed == (failing != 0), "call %ld fails, and max_over_ranks() %s", static_cast<long>(failing),
              failed ? "throws" : "does not throw");
      if (failing == 0 && index == 0) num_calls = sim::calls(index).ordering();
    });
  }
  REQUIRE(num_calls > 3, "only %ld calls", static_cast<long>(num_calls));
}

// A kernel that fails on this device is found before training.
void warm_up() {
  Setup setup;
  setup.world_size = 1;
  const auto body = [](Rank& rank, int) {
    sim::fail(0, {.launch = 1, .on_device = true});
    const sim::CountCalls counted(true);
    bool failed = false;
    try {
      rank.cuda().warm_up();
    } catch (const std::exception&) {
      failed = true;
    }
    REQUIRE(failed, "warm_up() does not notice that a kernel fails");
  };
  with_ranks(setup, body, /*is_faulted=*/true);
}

// Each call that records an event or makes a stream wait fails once, on all ranks. A bucket then either ends with an
// error or has the right result.
void ordering_fails() {
  for (const auto& [ranks_per_host, num_slots, traces] :
       {std::tuple{1, 1, false}, std::tuple{1, 3, true}, std::tuple{2, 3, false}}) {
    Setup setup = setup_of(wire_config(Wire::kBf16, Sum::kTwoShot, ranks_per_host, num_slots));
    setup.buckets = {{{5700}}, {{1500}}};
    setup.passes_float64 = true;
    int64_t num_calls = 0;
    for (int64_t failing = 0; failing <= num_calls; ++failing) {
      std::atomic<int> num_failed{0};
      with_ranks(setup, [&](Rank& rank, int index) {
        sim::fail(index, {.ordering = failing});
        if (traces) rank.engine().start_trace();
        const size_t failed = rank.backward(0);
        if (failing == 0 && index == 0) num_calls = sim::calls(index).ordering();
        if (failed == rank.num_buckets()) return rank.take_results(0);
        ++num_failed;
        REQUIRE(rank.error().find("bucket " + std::to_string(failed) + " (") != std::string::npos,
                "call %ld: the error of bucket %zu is: %s", static_cast<long>(failing), failed, rank.error().c_str());
      });
      REQUIRE(num_failed == (failing == 0 ? 0 : setup.world_size), "call %ld failed, and %d ranks noticed",
              static_cast<long>(failing), num_failed.load());
    }
    REQUIRE(num_calls > 20, "only %ld calls", static_cast<long>(num_calls));
  }
}

// Trains until a launch on rank 0 fails and its bucket ends with an error. Then calls check(rank 0, that bucket).
void fail_once(const Setup& setup, const sim::Failures& failures, const std::function<void(Rank&, size_t)>& check) {
  std::barrier every_rank(setup.world_size);
  std::atomic<bool> is_over{false};
  const auto train = [&](Rank& rank, int index) {
    rank.train(0);  // makes the buckets' tables
    rank.synchronize();
    if (index == 0) sim::fail(0, failures);
    for (int step = 1;; ++step) {
      REQUIRE(step < 1000, "nothing fails");
      size_t failed = rank.num_buckets();
      try {
        failed = rank.backward(step);
        if (index == 0 && failed == rank.num_buckets()) {
          rank.take_results(step);
          rank.synchronize();
        }
      } catch (const std::exception& e) {  // this scene's own calls to the device may notice a fault first
        REQUIRE(index == 0 && setup.num_synced == 0, "the engine does not notice: %s", e.what());
        is_over = true;
      }
      if (index == 0 && failed != rank.num_buckets()) is_over = true;
      if (index == 0 && is_over) check(rank, failed);
      every_rank.arrive_and_wait();
      const bool ends = is_over;
      every_rank.arrive_and_wait();
      if (ends) break;
    }
    rank.hook().abort("this scene is over");  // ends what waits for rank 0
  };
  with_ranks(setup, train, failures.on_device);
}

// A stage of rank 0 fails, on the host or, with forced synchronization, on the device. Its bucket ends with an error,
// nothing is launched any more, and every later bucket ends at once with the same error.
void failing() {
  for (const bool on_device : {false, true}) {
    for (Setup setup : sums()) {
      setup.num_synced = on_device ? 1 : 0;
      for (const int64_t launch : {1, 4, 14, 24}) {
        fail_once(setup, {.launch = launch, .on_device = on_device}, [&](Rank& rank, size_t failed) {
          const std::string text = rank.error(), what = sim::failed_launch(0);
          const std::string stage = what == "scale" ? "pack" : what;
          for (const std::string& part :
               {stage + " of chunk ", " failed for bucket " + std::to_string(failed) + " ("}) {
            REQUIRE(text.find(part) != std::string::npos, "\"%s\" of bucket %zu fails, and the error is: %s",
                    what.c_str(), failed, text.c_str());
          }
          for (size_t later = 0; later < rank.num_buckets(); ++later) {
            const std::string of_later = rank.error_of_next();
            REQUIRE(of_later == text, "after %s\na later bucket ended with: %s", text.c_str(), of_later.c_str());
          }
        });
      }
    }
  }
}

// A kernel fails on the device while the host does something else. Whichever call notices it, every later bucket ends,
// and ends with an error.
void faulted() {
  for (const Setup& setup : sums()) {
    for (int64_t launch = 1; launch < 20; launch += 2) {
      fail_once(setup, {.launch = launch, .on_device = true}, [&](Rank& rank, size_t) {
        for (size_t later = 0; later < rank.num_buckets(); ++later) {
          const std::string text = rank.error_of_next();
          REQUIRE(text.find(" for bucket ") != std::string::npos && text.find("simulated fault") != std::string::npos,
                  "after the fault a bucket ends with: %s", text.c_str());
        }
      });
    }
  }
}

}  // namespace

const Scenes kCudaScenes = {{"training_steps", training_steps},
                            {"dropped", dropped},
                            {"calls", calls},
                            {"staged_passthrough", staged_passthrough},
                            {"host_never_waits", host_never_waits},
                            {"end_in_order", end_in_order},
                            {"traced", traced},
                            {"driver_calls", driver_calls},
                            {"failing_calls", failing_calls},
                            {"warm_up", warm_up},
                            {"ordering_fails", ordering_fails},
                            {"failing", failing},
                            {"faulted", faulted}};
