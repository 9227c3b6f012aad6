// The CUDA path without a GPU: results and lifetimes, what the host waits for, times. See cuda_rank.h.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <future>
#include <map>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda_rank.h"
#include "gradients/collective_calls.h"
#include "gradients/rows.h"
#include "scenes.h"

extern "C" void fake_capture(int status);

using namespace cuda_scenes;

namespace {

// ---- results and lifetimes

// Every kind of sum, with what may go along with it.
std::vector<Setup> setups() {
  std::vector<Setup> all;
  const auto add = [&all](const WireConfig& config) -> Setup& { return all.emplace_back(setup_of(config)); };
  add(wire_config(Wire::kBf16, Sum::kTwoShot)).passes_float64 = true;
  Setup& apart = add(wire_config(Wire::kBf16, Sum::kOneShot));
  apart.config.feedback = true;
  apart.passes_float64 = apart.are_apart = true;
  Setup& exact = add(wire_config(Wire::kFp32, Sum::kExact));
  exact.passes_float64 = true;
  exact.backend.has_own_stream = true;
  add(wire_config(Wire::kBf16, Sum::kTwoShot)).config.feedback = true;
  add(wire_config(Wire::kBf16, Sum::kTwoShot, 1, 3)).backend.has_own_stream = true;
  add(wire_config(Wire::kBf16, Sum::kTwoShot, 2));
  add(wire_config(Wire::kBf16, Sum::kTwoShot, 2, 1)).num_synced = 4;
  add(wire_config(Wire::kFp32, Sum::kTwoShot, 1, 1)).world_size = 3;
  add(wire_config(Wire::kBf16, Sum::kTwoShot)).world_size = 1;
  return all;
}

// Training that waits for its buckets, and then looks at all that is counted.
void training_steps() {
  for (const Setup& setup : setups()) {
    with_ranks(setup, [&](Rank& rank, int) {
      constexpr int kNumSteps = 5;
      rank.observe();
      for (int step = 0; step < kNumSteps; ++step) rank.train(step);
      REQUIRE(rank.hook().stats().num_nonfinite == 0, "non-finite elements were counted");
      rank.synchronize();
      const size_t num_ends = rank.hook_switch().observer().take_pass_ends().size();
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

// A process that has never called torch.cuda.set_device: device 0 is current on the main thread. It calls what a
// training script may call behind a backward pass.
void other_device() {
  for (const Setup& setup : setups()) {
    with_ranks(setup, [&](Rank& rank, int index) {
      const c10::DeviceGuard first(sim::device(0));
      for (int step = 0; step < 3; ++step) rank.train(step);
      rank.hook().stats();
      const double largest = max_over_ranks(rank.hook(), index, "a call of this scene");
      REQUIRE(largest == setup.world_size - 1, "the largest value is %g", largest);
    });
  }
}

// Backends of fusedcomm's own end with the last transport that has them, after what is under way; others do not.
// Somebody captures a graph meanwhile, which nothing spoils.
void own_backends() {
  for (const int ranks_per_host : {1, 2}) {
    for (const bool owns : {false, true}) {
      std::atomic<int> ended{0};
      Setup setup = setup_of(wire_config(Wire::kBf16, Sum::kTwoShot, ranks_per_host));
      setup.owns_backend = owns;
      setup.backend.on_shutdown = [&] { ++ended; };
      std::barrier every_rank(setup.world_size);
      with_ranks(setup, [&](Rank& rank, int) {
        rank.train(0);
        rank.backward(1);
        every_rank.arrive_and_wait();
        fake_capture(1);
        rank.abandon();
        rank.detach();
        every_rank.arrive_and_wait();
        fake_capture(0);
      });
      const int expected = setup.world_size * ((ranks_per_host == 1 ? 0 : 3) + (owns ? 1 : 0));
      REQUIRE(ended == expected, "%d backends ended, not %d", ended.load(), expected);
    }
  }
}

// Sums of rows, and rows that every rank gets, as FSDP2's modules and a ShardedOptimizer's units have them.
void rows() {
  for (const int64_t ranks_per_host : {1, 2}) {
    const Setup setup = setup_of(wire_config(Wire::kBf16, Sum::kTwoShot, ranks_per_host));
    with_ranks(setup, [&](Rank& rank, int index) {
      constexpr int64_t kRowNumel = 1500;
      const int64_t world_size = setup.world_size;
      const auto options = at::TensorOptions().device(rank.hook().grad_device());
      Rows rows(rank.shared_hook(), 0, {{"a row", kRowNumel}});
      rows.set_row({0});
      for (int step = 0; step < 4; ++step) {
        const at::Tensor sent = at::empty({world_size * kRowNumel}, options), received = at::empty_like(sent);
        const at::Tensor own = at::empty({kRowNumel}, options);
        sim::backward(sent, [=](size_t i) { return gradient(index, step, 0, i); });
        rows.reduce_scatter(sent, own, 1.0 / static_cast<double>(world_size), /*is_last=*/false)->waitAndThrow();
        rows.all_gather(received, own, /*is_last=*/true)->waitAndThrow();
        sim::optimizer(received, [=](size_t i, double value) {
          const double mean = gradient(0, step, 0, i) * static_cast<double>(world_size + 1) / 2;
          REQUIRE(value == mean, "step %d element %zu of the rows: %g, not %g", step, i, value, mean);
        });
      }
      rank.synchronize();
    });
  }
}

// ---- the host, and times

// The shortest pass of some, in seconds, with buckets that go over the links of a host and those between hosts.
double seconds_of_a_pass(size_t num_buckets) {
  Setup setup = setup_of(wire_config(Wire::kBf16, Sum::kTwoShot, 2, 4));
  setup.buckets.assign(num_buckets, {{1500}});
  setup.pause_ms = 20;
  double shortest = 1e9;
  with_ranks(setup, [&](Rank& rank, int index) {
    for (int step = 0; step < 4; ++step) {
      const auto begin = std::chrono::steady_clock::now();
      rank.train(step);
      rank.synchronize();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      if (index == 0) shortest = std::min(shortest, took.count());
    }
  });
  return shortest;
}

// While a bucket is between hosts, the next one is summed within hosts, and the one before spreads there. A bucket
// takes three pauses; of four buckets the links have six, one after another.
void three_wires() {
  constexpr size_t kNumBuckets = 4;
  const double serial = static_cast<double>(kNumBuckets) * seconds_of_a_pass(1);
  const double found = seconds_of_a_pass(kNumBuckets) / serial;
  std::printf("three_wires: %zu buckets take %.3f of serial\n", kNumBuckets, found);
  REQUIRE(found < 0.62, "%zu buckets take %.3f of serial", kNumBuckets, found);
}

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
      std::promise<void> later;
      open(&later, rank.compute());
      rank.hook().stats();  // does not return if it waits for the caller's stream
      later.set_value();
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
// a microsecond. A collective through torch has an event for the watchdog more; only the last bucket's are, if NCCL is
// called directly.
void driver_calls() {
  constexpr size_t kNumBuckets = 8;
  struct Case {
    Wire wire;
    Sum sum;
    double num_collectives;  // of a chunk
    double of_several_chunks, of_one_chunk, of_a_small_one;
    int64_t ranks_per_host = 1;
    double num_chunks = 3;  // of several
  };
  for (const Case& c :
       {Case{Wire::kBf16, Sum::kTwoShot, 2, 50.5, 16.5, 11.5}, Case{Wire::kBf16, Sum::kOneShot, 1, 32.5, 14.5, 9.5},
        Case{Wire::kBf16, Sum::kDirect, 1, 32.5, 14.5, 9.5}, Case{Wire::kFp32, Sum::kExact, 1, 12.5, 12.5, 8.5, 1, 1},
        Case{Wire::kBf16, Sum::kTwoShot, 4, 77.5, 23.5, 23.5, 2, 4}}) {
    for (const auto& [numel, of_engine, num_chunks] :
         {std::tuple{5700, c.of_several_chunks, c.num_chunks}, std::tuple{1500, c.of_one_chunk, 1.0},
          std::tuple{700, c.of_a_small_one, 1.0}}) {
      for (const bool is_direct : {false, true}) {
        Setup setup = setup_of(wire_config(c.wire, c.sum, c.ranks_per_host));
        setup.buckets.assign(kNumBuckets, {{numel}});
        if (!is_direct) setup.nccl = sim::nccl("", "a reason");
        const sim::Calls pass = calls_of_a_pass(setup);
        const double found = static_cast<double>(pass.total()) / kNumBuckets;
        const double expected = of_engine + c.num_collectives * num_chunks / (is_direct ? kNumBuckets : 1);
        REQUIRE(pass.on_default == 0, "%ld launches on the caller's stream", static_cast<long>(pass.on_default));
        REQUIRE(found == expected, "%g calls a bucket of %d elements, not %g", found, numel, expected);
      }
    }
  }
}

}  // namespace

const Scenes kCudaScenes = {{"training_steps", training_steps},
                            {"dropped", dropped},
                            {"own_backends", own_backends},
                            {"other_device", other_device},
                            {"rows", rows},
                            {"three_wires", three_wires},
                            {"host_never_waits", host_never_waits},
                            {"end_in_order", end_in_order},
                            {"traced", traced},
                            {"driver_calls", driver_calls}};
