// NCCL called directly: which collectives are, with which results, and what else there may be. See cuda_rank.h and
// sim_backend.h. All other scenes call it directly, too.
#include <barrier>
#include <string>
#include <thread>
#include <tuple>

#include "cuda_rank.h"
#include "scenes.h"

extern "C" void fake_capture(int status);

using namespace cuda_scenes;

namespace {

// On a thread whose current device is another one, perhaps.
std::string why_of(const Rank& rank) {
  std::string why;
  std::thread([&] { why = rank.hook().transport()->why_through_torch().value(); }).join();
  return why;
}

// What a pass of four buckets calls, of which the first has three chunks and the last goes through torch, in every kind
// of sum and where NCCL cannot be called. Means are right in all, which Rank checks.
void nccl_or_torch() {
  struct Case {
    int sum;
    std::string why;  // the beginning of the reason
    std::string calls;
    std::shared_ptr<const Nccl> nccl = sim::nccl();
    bool is_nccl = true;
  };
  for (const Case& c : {
           Case{0, "", "ncclAllGather 5 ncclAlltoAll 5 "},
           Case{1, "", "ncclAllGather 5 "},
           Case{2, "", "ncclAllReduce 3 "},
           Case{3, "", "ncclAllGather 10 ncclAlltoAll 10 "},
           // NCCL before 2.28.
           Case{0, "the simulated NCCL has no ncclAlltoAll", "", sim::nccl("ncclAlltoAll")},
           Case{0, "the simulated NCCL has no _ZN4c10d", "", sim::nccl("_ZN4c10d16ProcessGroupNCCL10getCommPtrEv")},
           // A library that lacks what another one has, which torch would call.
           Case{0, "torch calls the ncclGetErrorString of ", "",
                std::make_shared<Nccl>("libc.so.6", symbols_of("libc.so.6"))},
           Case{0, "a library is not loaded", "", std::make_shared<Nccl>("a library", symbols_of("a library"))},
           Case{0, "FUSEDCOMM_NCCL=torch", "", sim::nccl("", "FUSEDCOMM_NCCL=torch")},
           // A group that torch has wrapped.
           Case{0, "the group's backend is a sim::Backend", "", sim::nccl(), false},
       }) {
    Setup setup = sums()[static_cast<size_t>(c.sum)];
    setup.nccl = c.nccl;
    setup.backend.is_nccl = c.is_nccl;
    with_ranks(setup, [&](Rank& rank, int index) {
      const std::string early = why_of(rank);
      REQUIRE(!c.why.empty() || early == "the group has no communicator on this device", "early: %s", early.c_str());
      rank.connect();
      sim::take_nccl_calls(index);
      rank.train(0);
      const std::string why = why_of(rank);
      REQUIRE(why.rfind(c.why, 0) == 0 && why.empty() == c.why.empty(), "not %s: %s", c.why.c_str(), why.c_str());
      const std::string calls = sim::take_nccl_calls(index);
      REQUIRE(calls == c.calls, "%s: calls %s, not %s", why.c_str(), calls.c_str(), c.calls.c_str());
    });
  }
}

// A function fails on all ranks, or says that it is in progress. The error has its name, its result and the bucket, and
// ends all later ones.
void nccl_fails() {
  const std::string failed = "3 (internal error): the test made this call fail";
  const std::string in_progress = "7 (an error): The communicator does not block its callers: set FUSEDCOMM_NCCL=torch";
  for (const auto& [function, sum, result] : {std::tuple{"ncclAlltoAll", 0, failed},
                                              {"ncclAllGather", 1, failed},
                                              {"ncclAllGather", 1, in_progress},
                                              {"ncclAllReduce", 2, failed}}) {
    Setup setup = sums()[static_cast<size_t>(sum)];
    sim::fail_nccl("");
    std::barrier trained(setup.world_size);
    with_ranks(setup, [&, function = function, result = result](Rank& rank, int) {
      rank.train(0);
      rank.synchronize();
      trained.arrive_and_wait();
      sim::fail_nccl(function, result == failed ? 3 : 7);
      REQUIRE(rank.backward(1) == 0, "%s fails unnoticed", function);
      const std::string text = rank.error(), code = std::string(function) + " failed with code " + result;
      REQUIRE(text.find(code) != std::string::npos && text.find(" failed for bucket 0 (") != std::string::npos,
              "%s: %s", function, text.c_str());
      REQUIRE(rank.error_of_next() == text, "a bucket goes on after %s has failed", function);
      rank.hook().abort("this scene is over");
      rank.abandon();
    });
  }
}

// Nothing is called in a step that is captured, nor once the collectives were aborted.
void nccl_refused() {
  for (const bool captures : {true, false}) {
    const Setup setup = sums()[0];
    std::barrier over(setup.world_size);
    with_ranks(setup, [&](Rank& rank, int index) {
      rank.train(0);
      rank.synchronize();
      if (index != 0) return over.arrive_and_wait();
      sim::take_nccl_calls(0);
      fake_capture(captures ? 1 : 0);
      if (!captures) rank.hook().abort("this scene is over");
      bool was_refused = !rank.error_of_next().empty();
      try {
        if (!captures) rank.hook().transport()->all_gather(Channel::kGather, {}, {}, [](std::exception_ptr) {});
        was_refused &= captures;
      } catch (const std::runtime_error&) {
      }
      REQUIRE(was_refused, "%s, NCCL may be called", captures ? "While a step is captured" : "After an abort");
      const std::string calls = sim::take_nccl_calls(0);
      REQUIRE(calls.empty(), "called: %s", calls.c_str());
      fake_capture(0);
      over.arrive_and_wait();
    });
  }
}

}  // namespace

const Scenes kNcclScenes = {
    {"nccl_or_torch", nccl_or_torch}, {"nccl_fails", nccl_fails}, {"nccl_refused", nccl_refused}};
