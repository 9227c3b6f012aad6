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
    const char* in_progress = "";  // the function that leaves its communicator in progress
  };
  for (const Case& c : {
           Case{0, "", "ncclAllGather 5 ncclAlltoAll 5 "},
           Case{1, "", "ncclAllGather 5 "},
           Case{1, "", "ncclAllGather 5 ", sim::nccl(), true, "ncclAllGather"},
           Case{2, "", "ncclAllReduce 3 "},
           Case{3, "", "ncclAllGather 10 ncclAlltoAll 10 "},
           // NCCL before 2.28.
           Case{0, "", "ncclAllGather 5 ncclRecv 10 ncclSend 10 ", sim::nccl("ncclAlltoAll")},
           Case{0, "the simulated NCCL has no ncclAllGather", "", sim::nccl("ncclAllGather")},
           Case{0, "the simulated NCCL has no _ZN4c10d", "", sim::nccl("_ZN4c10d16ProcessGroupNCCL10getCommPtrEv")},
           Case{0, "a library is not loaded", "", std::make_shared<Nccl>("a library", nullptr)},
           Case{0, "FUSEDCOMM_NCCL=torch", "", nullptr},
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
      sim::fail_nccl(c.in_progress, 7);
      sim::take_nccl_calls(index);
      rank.train(0);
      const std::string why = why_of(rank);
      REQUIRE(why.rfind(c.why, 0) == 0 && why.empty() == c.why.empty(), "not %s: %s", c.why.c_str(), why.c_str());
      const std::string calls = sim::take_nccl_calls(index);
      REQUIRE(calls == c.calls, "%s: calls %s, not %s", why.c_str(), calls.c_str(), c.calls.c_str());
    });
  }
}

// A function fails on all ranks. The error has its name, its result and the bucket, and ends all later ones.
void nccl_fails() {
  const std::string of_group = "a group of ncclSend and ncclRecv";
  for (const auto& [function, hidden, named, sum] : {std::tuple{"ncclAlltoAll", "", std::string("ncclAlltoAll"), 0},
                                                     {"ncclAllGather", "", "ncclAllGather", 1},
                                                     {"ncclAllReduce", "", "ncclAllReduce", 2},
                                                     {"ncclRecv", "ncclAlltoAll", of_group, 0},
                                                     {"ncclGroupStart", "ncclAlltoAll", of_group, 0},
                                                     {"ncclGroupEnd", "ncclAlltoAll", of_group, 0}}) {
    Setup setup = sums()[static_cast<size_t>(sum)];
    setup.nccl = sim::nccl(hidden);
    sim::fail_nccl("");
    std::barrier trained(setup.world_size);
    with_ranks(setup, [&, function = function, named = named](Rank& rank, int) {
      rank.train(0);
      rank.synchronize();
      trained.arrive_and_wait();
      sim::fail_nccl(function, 3);
      REQUIRE(rank.backward(1) == 0, "%s fails unnoticed", function);
      const std::string text = rank.error(), code = named + " failed with code 3 (internal error): the test made this";
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
    with_ranks(sums()[0], [&](Rank& rank, int index) {
      rank.train(0);
      rank.synchronize();
      if (index != 0) return;
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
    });
  }
}

}  // namespace

const Scenes kNcclScenes = {
    {"nccl_or_torch", nccl_or_torch}, {"nccl_fails", nccl_fails}, {"nccl_refused", nccl_refused}};
