// The CUDA path without a GPU: calls to the driver, launches and kernels that fail. See cuda_rank.h.
#include <atomic>
#include <barrier>
#include <chrono>
#include <future>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>

#include "cuda_rank.h"
#include "gradients/collective_calls.h"
#include "scenes.h"

using namespace cuda_scenes;

namespace {

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

// Each launch fails once in the first collectives, on all ranks; then, with one rank, on the device. The error says
// where.
void first_collectives() {
  for (const bool on_device : {false, true}) {
    Setup setup = setup_of(wire_config(Wire::kBf16, Sum::kTwoShot, on_device ? 1 : 2));
    if (on_device) setup.world_size = 1;
    std::set<std::string> errors;
    bool failed = true;
    for (int64_t failing = 1; failed; ++failing) {
      const auto body = [&](Rank& rank, int index) {
        sim::fail(index, {.launch = failing, .on_device = on_device});
        const sim::CountCalls counted(true);
        const auto error_of_warm_up = [&]() -> std::string {
          try {
            rank.connect();
          } catch (const std::exception& e) {
            return e.what();
          }
          return "";
        };
        const std::string error = error_of_warm_up();
        if (!error.empty()) {
          rank.hook().abort("this scene is over");  // nobody waits for what is under way
          const int64_t launched = sim::calls(index).launched;
          REQUIRE(
              error_of_warm_up().find("was given up") != std::string::npos && sim::calls(index).launched == launched,
              "a thread that is left behind goes on to enqueue collectives");
        }
        REQUIRE(!error.empty() || sim::calls(index).launched < failing, "nobody notices that launch %ld fails",
                static_cast<long>(failing));
        REQUIRE(sim::calls(index).on_default == 0, "the caller's stream would wait for a rank that is lost");
        if (index != 0) return;
        failed = !error.empty();
        if (failed) errors.insert(error.substr(0, error.find(" failed: ")));
      };
      with_ranks(setup, body, on_device);
    }
    // Small and large, among all ranks in three ways, within hosts and between them in two; one has one channel.
    REQUIRE(errors.size() == (on_device ? 6 : 14), "%zu errors, such as %s", errors.size(), errors.begin()->c_str());
    REQUIRE(errors.begin()->find("fusedcomm: rank 0 of ") == 0, "the error is: %s", errors.begin()->c_str());
  }
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

// A collective is not aborted while it is enqueued.
void aborted() {
  std::promise<void> inside;
  std::once_flag first;
  Setup setup = setup_of(wire_config(Wire::kBf16, Sum::kTwoShot));
  setup.backend.on_enqueue = [&](int rank) {
    if (rank != 0) return;
    std::call_once(first, [&] {
      inside.set_value();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // gives an abort that does not wait time to be seen
    });
  };
  with_ranks(setup, [&](Rank& rank, int index) {
    std::thread control([&] {
      if (index == 0) {
        inside.get_future().wait();
        rank.hook().abort("this scene is over");
      }
    });
    rank.backward(0);
    control.join();
    if (index != 0) rank.hook().abort("this scene is over");
  });
}

}  // namespace

const Scenes kCudaFailures = {{"failing_calls", failing_calls},
                              {"warm_up", warm_up},
                              {"first_collectives", first_collectives},
                              {"ordering_fails", ordering_fails},
                              {"failing", failing},
                              {"aborted", aborted},
                              {"faulted", faulted}};
