// What a roll call concludes from answers made up here, for tests/watch/test_roll_call.py: prints the report of the
// scene named; or of a thousand answers that a slow store hands out, with the seconds that it takes for each as the
// second argument.
#include <cstdio>
#include <stdexcept>
#include <string>

#include "watch/roll_call.h"

using namespace fusedcomm;

namespace {

// Has handed over `num_handed` jobs, of which `num_ended` have ended, two to a step.
RankState at(int64_t num_handed, int64_t num_ended, const std::string& stage, bool on_wire) {
  RankState state;
  state.num_handed = num_handed;
  state.num_ended = num_ended;
  state.last_step = num_ended / 2 - 1;
  state.idle_s = 7.25;
  if (num_handed > num_ended) {
    state.bucket = "bucket " + std::to_string(num_ended % 2) + " (layer.weight;\n1 parameters, 1 MiB)";
    state.step = num_ended / 2;
    state.stage = stage;
    state.chunk = 2;
    state.num_chunks = 4;
    state.on_wire = on_wire;
    state.waits_s = 3;
  }
  return RankState::from_text("of a later version\n" + state.to_text());
}

RollCall scene(const std::string& name) {
  RollCall call;
  call.number = 5;
  call.world_size = name == "many" ? 40 : 4;
  call.opened = "opened by rank 0";
  call.waited_s = 2;
  for (int rank = 0; rank < call.world_size; ++rank) {
    call.answers[rank] = at(12, 10, "all-to-all", true);
    call.answers[rank].own = {"127.0.0.1", "10.0.0." + std::to_string(rank + 1)};
  }
  if (name == "busy") {
    call.answers[2] = at(12, 10, "pack", false);
    call.answers[2].stage_s = 2;
  } else if (name == "working" || name == "all working") {
    for (const int rank : {1, 2}) call.answers[rank] = at(12, 10, rank == 1 ? "pack" : "reduce", false);
    if (name == "all working") call.answers[0] = call.answers[3] = call.answers[1];
  } else if (name == "working crawl") {
    call.answers[1] = at(12, 10, "pack", false);
    call.answers[0].unsent = {{"10.0.0.3", 950'000}};
    call.answers[0].per_s = {{"10.0.0.3", 260'000}};
  } else if (name == "call" || name == "call of all") {
    for (auto& [rank, state] : call.answers) {
      if (name == "call" && rank == 2) {
        state = at(10, 10, "", false);
        continue;
      }
      state = at(11, 10, "", false);
      state.bucket = "state_dict()";
      state.num_chunks = 0;
    }
  } else if (name == "behind") {
    call.answers[1] = at(10, 10, "", false);
    call.answers[3] = at(11, 11, "", false);  // is through with what the others wait for
  } else if (name == "failed") {
    call.answers[3] = at(12, 12, "", false);
    call.answers[3].failure = "the reduce failed";
  } else if (name == "queued") {
    call.answers[1] = at(12, 10, "", false);
  } else if (name == "streams") {
    call.answers[1] = at(12, 10, "work on the device's streams", true);
  } else if (name == "many") {
    for (int rank = 20; rank < 40; ++rank) {
      call.answers.erase(rank);
      call.absent[rank] = rank == 20 ? "" : "process 1 on node";
    }
  } else if (name == "crawl" || name == "late crawl") {
    if (name == "late crawl") call.late_s[1] = 1.75;
    call.answers[0].unsent = {{"10.0.0.2", 20'000}, {"10.0.0.4", 9'000}};
    call.answers[1].unsent = {{"10.0.0.1", 130'000}, {"10.0.0.3", 950'000}, {"10.0.0.4", 140'000}};
    call.answers[1].per_s = {{"10.0.0.1", 300'000}, {"10.0.0.3", 260'000}, {"10.0.0.4", 150'000}};
  } else if (name == "crawl of a host") {
    for (const int rank : {0, 1}) {
      call.answers[rank].own = {"10.0.0.1", "10.0.1." + std::to_string(rank)};
      call.answers[rank].unsent = {{"10.0.0.1", 999'000}, {"10.0.0.3", 200'000}, {"10.0.0.4", 300'000}};
    }
    call.answers[3].unsent = {{"10.0.0.1", 8'000}};
  } else if (name == "crawl to one") {
    for (auto& [rank, state] : call.answers) {
      state.own = {"127.0.0.1", "fe80::" + std::to_string(rank + 1)};
      if (rank < 3) state.unsent = {{"fe80::4", 400'000}, {"fe80::1", 30'000}};
      if (rank < 3) state.per_s = {{"fe80::4", 200'000}};
    }
  } else if (name == "crawl to a host") {
    for (const int rank : {0, 1}) call.answers[rank].unsent = {{"10.0.0.3", 400'000}};
    for (const int rank : {2, 3}) call.answers[rank].own = {"10.0.0.3"};
  } else if (name == "crawl between two") {
    call.answers[1].unsent = {{"10.0.0.1", 900'000}, {"10.0.0.3", 30'000}};
    call.answers[1].per_s = {{"10.0.0.1", 12'000'000}, {"10.0.0.3", 40'000}};
    call.answers[3].unsent = {{"10.0.0.1", 20'000}};
  } else if (name == "crawl of one to many") {  // more of it to one than to others, and yet more of it from one
    call.answers[1].unsent = {{"10.0.0.1", 80'000}, {"10.0.0.3", 20'000}};
    call.answers[2].unsent = {{"10.0.0.1", 5'000}};
  } else if (name == "one host") {
    for (auto& [rank, state] : call.answers) state.own = {"127.0.0.1", "10.0.0.1"};
    call.answers[1].unsent = {{"127.0.0.1", 900'000}, {"10.0.0.1", 900'000}};
  } else if (name == "upload") {
    call.answers[1].unsent = {{"192.0.2.1", 900'000}};
  } else if (name == "passing") {
    call.answers[2] = at(12, 10, "pack", false);
    call.answers[2].stage_s = 0.1;
  } else if (name == "everywhere") {
    for (auto& [rank, state] : call.answers) {
      state.unsent = {{"10.0.0." + std::to_string((rank + 1) % 4 + 1), 300'000}};
    }
  } else if (name == "little") {
    call.answers[1].unsent = {{"10.0.0.1", 60'000}};
  } else if (name == "unsent and behind") {
    for (const int rank : {0, 2, 3}) call.answers[rank].unsent = {{"10.0.0.2", 950'000}};
    call.answers[1] = at(10, 10, "", false);
  } else if (name == "late") {
    call.late_s[2] = 1.75;
  } else if (name == "unread") {
    for (const int rank : {1, 3}) {
      call.answers.erase(rank);
      call.unread.push_back(rank);
    }
  } else if (name == "unread and missing") {
    call.answers.erase(1);
    call.unread.push_back(1);
    call.answers.erase(2);
    call.absent[2] = "process 1 on node";
  } else if (name == "over") {
    for (auto& [rank, state] : call.answers) state = at(12, 12, "", false);
  } else if (name != "network") {
    throw std::invalid_argument(name);
  }
  for (auto& [rank, state] : call.answers) state = RankState::from_text(state.to_text());  // as out of the store
  return call;
}

// Reads the answers of a thousand ranks from a store that takes so long for each, in simulated time: rank 800 answers
// after 1.5 s, rank 900 never, the others at once. Half a second at a time; ranks have 3 s, the store one more.
RollCall read_slowly(double store_s) {
  constexpr double kLate = 1, kDeadline = 3, kEnd = 4, kErrand = 0.5, kLook = 0.2;
  Answers answers(1000);
  double now_s = 0;
  const auto fetch = [&](int rank) {
    const bool is_there = rank != 900 && (rank != 800 || now_s >= 1.5);
    now_s += store_s;
    return is_there ? at(12, 10, "all-to-all", true).to_text() : std::string();
  };
  while (!answers.are_known(kDeadline) && now_s <= kEnd) {
    const double began_s = now_s;
    if (answers.read(fetch, [&] { return now_s; }, began_s + kErrand)) now_s += kLook;
    if (now_s > began_s + kErrand + store_s + kLook) throw std::runtime_error("an errand took too long");
  }
  RollCall call = scene("network");
  call.world_size = 1000;
  call.answers.clear();
  answers.put_into(&call, kLate, kDeadline);
  return call;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2) {
    const Finding finding = conclude(read_slowly(std::stod(argv[2])));
    std::printf("%s%s\n", finding.is_conclusive ? "conclusive\n" : "", finding.text.c_str());
    return 0;
  }
  const Finding finding = conclude(scene(argv[1]));
  std::printf("%s%s\n", finding.is_conclusive ? "conclusive\n" : "", finding.text.c_str());
  return 0;
}
