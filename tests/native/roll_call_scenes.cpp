// What a roll call concludes from prescribed answers, for tests/watch/test_roll_call.py. The arguments choose:
//   <scene>         prints the report of that scene
//   slowly <s>      prints the report on a thousand answers from a slow store, which takes <s> seconds for each
//   garbled         prints the report on answers of which two cannot be decoded
//   words <scene>   checks that conclusions do not depend on texts; prints nothing
//   round trip      checks that encoded values decode to the same values; prints nothing
//   unreadable      checks that damaged texts are refused; prints nothing
//   concern         checks which roll calls concern a rank; prints nothing
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "require.h"
#include "watch/roll_call.h"
#include "watch/roll_call_text.h"

using namespace fusedcomm;

namespace {

using At = Board::View::At;

// The state of a rank that has handed over `num_handed` jobs, `num_ended` of which have ended. A step has two jobs. If
// one is under way, it is at `place`.
RankState at(int64_t num_handed, int64_t num_ended, At place = At::kQueue) {
  RankState state;
  state.num_handed = num_handed;
  state.num_ended = num_ended;
  state.last_step = num_ended / 2 - 1;
  state.idle_s = 7.25;
  if (num_handed > num_ended) {
    state.job = RankState::Job::kBucket;
    state.label = "bucket " + std::to_string(num_ended % 2) + " (layer.weight;\n1 parameters, 1 MiB)";
    state.step = num_ended / 2;
    state.at = place;
    state.chunk = 2;
    state.num_chunks = 4;
    state.waits_s = 3;
  }
  return state;
}

RankState at(int64_t num_handed, int64_t num_ended, Stage stage) {
  RankState state = at(num_handed, num_ended, At::kStage);
  state.stage = stage;
  return state;
}

RollCall scene(const std::string& name) {
  RollCall call;
  call.number = 5;
  call.world_size = name == "many" || name == "pairs apart" ? 40 : name == "apart" ? 9 : 4;
  call.opening = Opening{};
  call.waited_s = 2;
  for (int rank = 0; rank < call.world_size; ++rank) {
    call.answers[rank] = at(12, 10, Stage::kAllToAll);
    call.answers[rank].own = {"127.0.0.1", "10.0.0." + std::to_string(rank + 1)};
  }
  if (name == "busy") {
    call.answers[2] = at(12, 10, Stage::kPack);
    call.answers[2].stage_s = 2;
  } else if (name == "working" || name == "all working") {
    for (const int rank : {1, 2}) call.answers[rank] = at(12, 10, rank == 1 ? Stage::kPack : Stage::kReduce);
    if (name == "all working") call.answers[0] = call.answers[3] = call.answers[1];
  } else if (name == "working crawl") {
    call.answers[1] = at(12, 10, Stage::kPack);
    call.answers[0].unsent = {{"10.0.0.3", 950'000}};
    call.answers[0].per_s = {{"10.0.0.3", 260'000}};
  } else if (name == "call" || name == "call of all" || name == "call of one") {
    for (auto& [rank, state] : call.answers) {
      if (name == "call" && rank == 2) {
        state = at(10, 10);
        continue;
      }
      if (name == "call of one" && rank != 2) continue;
      state = at(11, 10);
      state.job = RankState::Job::kCall;
      state.label = "state_dict()";
      state.num_chunks = 0;
    }
  } else if (name == "behind") {
    call.answers[1] = at(10, 10);
    call.answers[3] = at(11, 11);  // has finished the job that the others wait for
  } else if (name == "failed") {
    call.answers[3] = at(12, 12);
    call.answers[3].failure = "the reduce failed";
  } else if (name == "queued") {
    call.answers[1] = at(12, 10);
  } else if (name == "streams") {
    call.answers[1] = at(12, 10, At::kStream);
  } else if (name == "many") {
    for (int rank = 20; rank < 40; ++rank) {
      call.answers.erase(rank);
      call.absent[rank] = rank == 20 ? "" : "process 1 on node";
    }
  } else if (name == "pairs apart" || name == "apart") {  // two ranks, or one, wait for each chunk
    const int num_together = name == "apart" ? 1 : 2;
    for (auto& [rank, state] : call.answers) {
      state.chunk = rank / num_together;
      state.num_chunks = call.world_size / num_together;
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
  } else if (name == "crawl of one to many") {  // rank 0's share as a receiver is below rank 1's share as a sender
    call.answers[1].unsent = {{"10.0.0.1", 80'000}, {"10.0.0.3", 20'000}};
    call.answers[2].unsent = {{"10.0.0.1", 5'000}};
  } else if (name == "one host") {
    for (auto& [rank, state] : call.answers) state.own = {"127.0.0.1", "10.0.0.1"};
    call.answers[1].unsent = {{"127.0.0.1", 900'000}, {"10.0.0.1", 900'000}};
  } else if (name == "upload") {
    call.answers[1].unsent = {{"192.0.2.1", 900'000}};
  } else if (name == "passing") {
    call.answers[2] = at(12, 10, Stage::kPack);
    call.answers[2].stage_s = 0.1;
  } else if (name == "everywhere") {
    for (auto& [rank, state] : call.answers) {
      state.unsent = {{"10.0.0." + std::to_string((rank + 1) % 4 + 1), 300'000}};
    }
  } else if (name == "little") {
    call.answers[1].unsent = {{"10.0.0.1", 60'000}};
  } else if (name == "unsent and behind") {
    for (const int rank : {0, 2, 3}) call.answers[rank].unsent = {{"10.0.0.2", 950'000}};
    call.answers[1] = at(10, 10);
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
  } else if (name == "cut") {  // and rank 0's link drops a packet now and then
    call.answers[1].unacked_ms = {{"10.0.0.3", 4'210}, {"10.0.0.1", 1'900}};
    call.answers[2].unacked_ms = {{"10.0.0.2", 4'040}, {"127.0.0.1", 9'000}};
    call.answers[1].unsent = {{"10.0.0.3", 950'000}};
  } else if (name == "cut one way") {
    call.answers[3].unacked_ms = {{"10.0.0.1", 6'000}};
    call.answers[1] = at(12, 10, Stage::kPack);
  } else if (name == "host down" || name == "full link" || name == "full link, late" ||
             name == "full link, neighbours" || name == "neighbour heard" || name == "neighbour heard, killed") {
    for (const int rank : {0, 1})
      call.answers[rank].unacked_ms = {{"10.0.0.3", name == "host down" ? 6'100 + rank : 0}};
    call.answers.erase(2);
    call.absent[2] = "process 1 on node";
    call.absent_began[2].own = {"127.0.0.1", "10.0.0.3"};
    call.absent_began[2].own_ends = {"127.0.0.1:9", "10.0.0.3:7"};
    call.open_ends = {"10.0.0.3:8", name == "neighbour heard, killed" ? "10.0.0.3:6" : "10.0.0.3:7"};
    if (name != "host down") call.heard_s = {{"10.0.0.3", name == "full link, late" ? 2.5 : 1.5}, {"127.0.0.1", 0}};
    if (name == "neighbour heard") call.answers[3].own.insert("10.0.0.3");
    if (name == "full link, neighbours" || name == "neighbour heard, killed") {
      call.answers[3].own.insert("10.0.0.3");
      call.answers[3].unsent = {{"10.0.0.1", 95'000}};
    }
  } else if (name == "over") {
    for (auto& [rank, state] : call.answers) state = at(12, 12);
  } else if (name != "network") {
    throw std::invalid_argument(name);
  }
  for (auto& [rank, state] : call.answers) state = decode<RankState>(encode(state));  // as if read from the store
  return call;
}

// Reads the answers of a thousand ranks, in simulated time, from a store that takes `store_s` seconds for each. Rank
// 800 answers after 1.5 s, rank 900 never, the others at once. The store is read for half a second at a time. Ranks
// have 3 s to answer, and the store has one second more.
RollCall read_slowly(double store_s) {
  constexpr double kLate = 1, kDeadline = 3, kEnd = 4, kErrand = 0.5, kLook = 0.2;
  Answers answers(1000);
  double now_s = 0;
  const auto fetch = [&](int rank) {
    const bool is_there = rank != 900 && (rank != 800 || now_s >= 1.5);
    now_s += store_s;
    return is_there ? std::optional(encode(at(12, 10, Stage::kAllToAll))) : std::nullopt;
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

// A roll call in which rank 1's answer is cut off and rank 2's is a report instead of a state.
RollCall garbled() {
  const auto fetch = [](int rank) -> std::optional<std::string> {
    if (rank == 2) return encode(Finding{true, "fusedcomm: roll call 5 of 4 ranks", false});
    const std::string text = encode(at(12, 10, Stage::kAllToAll));
    return rank == 1 ? text.substr(0, text.size() - 1) : text;
  };
  Answers answers(4);
  answers.read(fetch, [] { return 0.0; }, 1);
  REQUIRE(answers.are_known(1), "an unreadable answer must count as an answer");
  RollCall call = scene("network");
  call.answers.clear();
  answers.put_into(&call, 1, 2);
  return call;
}

void print_report(const RollCall& call) {
  const Conclusion conclusion = conclude(call);
  std::printf("%s%s\n", conclusion.is_conclusive ? "conclusive\n" : "", report_text(call, conclusion).c_str());
}

// ---- texts

// Everything that a conclusion holds, except texts.
auto decisions(const Conclusion& found) {
  using Place = std::tuple<std::vector<int>, double, At, Stage, int64_t>;
  const auto places = [](const std::vector<RankGroup>& groups) {
    std::vector<Place> places;
    for (const RankGroup& group : groups) {
      places.emplace_back(group.ranks, group.longest_s, group.state.at, group.state.stage, group.state.chunk);
    }
    return places;
  };
  std::vector<std::pair<int, Conclusion::Slow::How>> slow;
  for (const Conclusion::Slow& rank : found.slow) slow.emplace_back(rank.rank, rank.how);
  const Congestion pile = found.congestion.value_or(Congestion{});
  return std::make_tuple(found.awaited ? found.awaited->num_ended : -1, found.failed, found.missing.size(),
                         found.cuts.size(), slow, places(found.at_work), places(found.waiting), found.reason,
                         found.congestion.has_value(), pile.senders, pile.receivers, pile.unsent_nbytes,
                         found.is_conclusive);
}

// Texts for people that could be mistaken for facts that fields hold; some are phrases of the reports.
const char* const kWords[] = {"after a failure: ",
                              " moves, but has been under way for ",
                              "conclusive\n",
                              "work on the device's streams",
                              "pack",
                              "opened by rank 2, ",
                              "failure x\nnum_ended 0\nstage pack\non_wire 0",
                              "state_dict()",
                              ""};

void check_words(const std::string& name) {
  const auto expected = decisions(conclude(scene(name)));
  for (const char* words : kWords) {
    RollCall call = scene(name);
    call.opening->label = call.opening->failure = words;
    for (auto& [rank, who] : call.absent) who = words;
    for (auto& [rank, state] : call.answers) {
      if (state.job != RankState::Job::kNone) state.label = words;
      if (state.failure) state.failure = words;
      state = decode<RankState>(encode(state));
    }
    REQUIRE(decisions(conclude(call)) == expected, "%s with \"%s\"", name.c_str(), words);
  }
}

// Whether another rank's roll call concerns this rank depends on its reason and this rank's wait, not on its texts.
void check_concern() {
  struct Case {
    Opening::Why why;
    OwnWait own;  // judged with stall_after_s 2
    Concern expected;
  };
  using Why = Opening::Why;
  const OwnWait idle, begun{false, true, 0.1, 0.1}, moves{false, true, 0.1, 1.5}, stands{false, true, 1.5, 1.5},
      failed{true, false, 0, 0}, failed_moving{true, true, 0.1, 0.1};
  const Case cases[] = {
      {Why::kStalled, idle, Concern::kNone},     {Why::kStalled, begun, Concern::kNone},
      {Why::kStalled, moves, Concern::kNone},    {Why::kStalled, stands, Concern::kStall},
      {Why::kStalled, failed, Concern::kStall},  {Why::kStalled, failed_moving, Concern::kStall},
      {Why::kCrawling, idle, Concern::kNone},    {Why::kCrawling, begun, Concern::kNone},
      {Why::kCrawling, moves, Concern::kCrawl},  {Why::kCrawling, stands, Concern::kStall},
      {Why::kCrawling, failed, Concern::kCrawl}, {Why::kCrawling, failed_moving, Concern::kCrawl},
      {Why::kFailed, idle, Concern::kNone},      {Why::kFailed, begun, Concern::kStall},
      {Why::kFailed, moves, Concern::kStall},    {Why::kFailed, stands, Concern::kStall},
      {Why::kFailed, failed, Concern::kStall},   {Why::kFailed, failed_moving, Concern::kStall},
      {Why::kCut, idle, Concern::kNone},         {Why::kCut, begun, Concern::kStall},
  };
  for (const Case& a : cases) {
    for (const char* words : kWords) {
      Opening opening;
      opening.why = a.why;
      opening.label = opening.failure = words;
      const Concern found = concern_of(decode<Opening>(encode(opening)), a.own, 2);
      REQUIRE(found == a.expected, "why %d, stalled for %g s, \"%s\": %d", static_cast<int>(a.why), a.own.stalled_s,
              words, static_cast<int>(found));
    }
  }
}

// ---- encoding

RankState with_every_field() {
  RankState state;
  state.num_handed = 11;
  state.num_ended = 10;
  state.last_step = 4;
  state.idle_s = 0.1;
  state.job = RankState::Job::kCall;
  state.label = std::string("bucket 0 (\n\0ü:3,)", 17);
  state.step = kMaxCount;
  state.num_chunks = 7;
  state.waits_s = 1.0 / 3;
  state.at = At::kStream;
  state.stage = Stage::kExposed;
  state.chunk = 5;
  state.stage_s = -0.0;
  state.own = {"", "10.0.0.1", "fe80::1"};
  state.own_ends = {"10.0.0.1:80"};
  state.unsent = {{"10.0.0.2", kMaxConnectionNbytes}, {"fe80::2", 0}};
  state.per_s = {{"10.0.0.2", 3}};
  state.unacked_ms = {{"10.0.0.3", 4}};
  state.failure = "";
  return state;
}

Opening opening_with_every_field() {
  return {3, Opening::Why::kFailed, 2.5, 1e300, 9, "bucket 1", "the all-to-all failed\nfor bucket 1"};
}

auto tied(const RankState& state) {
  return std::tie(state.num_handed, state.num_ended, state.last_step, state.idle_s, state.job, state.label, state.step,
                  state.num_chunks, state.waits_s, state.at, state.stage, state.chunk, state.stage_s, state.own,
                  state.own_ends, state.unsent, state.per_s, state.unacked_ms, state.failure);
}

auto tied(const Opening& opening) {
  return std::tie(opening.rank, opening.why, opening.stalled_s, opening.under_way_s, opening.step, opening.label,
                  opening.failure);
}

auto tied(const Finding& finding) { return std::tie(finding.is_conclusive, finding.text); }

template <typename Struct>
void check_round_trip(const Struct& value) {
  const Struct back = decode<Struct>(encode(value));
  REQUIRE(tied(back) == tied(value), "%s: %s", Struct::kKind, encode(value).c_str());
  REQUIRE(encode(back) == encode(value), "%s", Struct::kKind);
}

void check_round_trips() {
  check_round_trip(with_every_field());
  check_round_trip(RankState{});
  check_round_trip(opening_with_every_field());
  check_round_trip(Opening{});
  check_round_trip(Finding{true, "fusedcomm: roll call 1\n  rank 2", false});
  check_round_trip(Finding{});
}

// Why a text cannot be decoded; empty if it can.
template <typename Struct>
std::string problem_of(const std::string& text) {
  try {
    decode<Struct>(text);
    return "";
  } catch (const UnreadableError& error) {
    return error.what();
  }
}

template <typename Struct>
void check_damaged(const Struct& value) {
  const std::string text = encode(value);
  for (size_t length = 0; length < text.size(); ++length) {
    REQUIRE(!problem_of<Struct>(text.substr(0, length)).empty(), "%zu bytes of %s", length, text.c_str());
  }
  for (size_t i = 0; i < text.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string garbled = text;
      garbled[i] = static_cast<char>(garbled[i] ^ (1 << bit));
      REQUIRE(!problem_of<Struct>(garbled).empty(), "bit %d of byte %zu of %s", bit, i, text.c_str());
    }
  }
  REQUIRE(!problem_of<Struct>(text + "x").empty(), "longer than %s", text.c_str());
}

std::string field(const std::string& bytes) { return std::to_string(bytes.size()) + ":" + bytes + ","; }

void check_problem(const std::string& problem, const std::string& expected) {
  REQUIRE(problem == expected, "%s", problem.c_str());
}

void check_unreadable() {
  check_damaged(with_every_field());
  check_damaged(opening_with_every_field());
  check_damaged(Finding{true, "fusedcomm: roll call 1", false});

  check_problem(problem_of<Opening>("report 1 0123456789abcdef\n1:0,0:,and more"),
                "it does not begin with \"call 1 \" but is \"report 1 0123456789abcdef?1:0,0:,and mor…\"");
  check_problem(problem_of<Finding>("report 2 "), "it does not begin with \"report 1 \" but is \"report 2 \"");
  check_problem(problem_of<Finding>("report 1 0123"), "it is cut off or garbled: no checksum in \"report 1 0123\"");
  check_problem(problem_of<Finding>(""), "it does not begin with \"report 1 \" but is \"\"");
  // The checksum is right, but the fields are wrong.
  const auto sealed_problem = [](const std::string& fields) { return problem_of<Finding>(sealed("report", fields)); };
  check_problem(sealed_problem(""), "its field \"is_conclusive\" has no length");
  check_problem(sealed_problem("-1:1,"), "its field \"is_conclusive\" has no length");
  check_problem(sealed_problem("99999999999999999999:1,"), "its field \"is_conclusive\" has no length");
  check_problem(sealed_problem(field("2") + field("")), "its field \"is_conclusive\" is 2, not from 0 to 1");
  check_problem(sealed_problem(field("yes") + field("")), "its field \"is_conclusive\" is \"yes\", not an integer");
  check_problem(sealed_problem(field("1") + "4:abc,"), "its field \"text\" should have 4 bytes but does not end there");
  check_problem(sealed_problem(field("1") + "18446744073709551615:abc,"),
                "its field \"text\" should have 18446744073709551615 bytes but does not end there");
  check_problem(sealed_problem(field("1") + "2:abc,"), "its field \"text\" should have 2 bytes but does not end there");
  check_problem(sealed_problem(field("1") + field("abc") + field("d")),
                "it goes on after its last field with \"1:d,\"");
  const std::string none = field("0"), infinite = field("9218868437227405312");
  check_problem(problem_of<Opening>(sealed("call", none + field("4"))), "its field \"why\" is 4, not from 0 to 3");
  check_problem(problem_of<Opening>(sealed("call", none + none + infinite)),
                "its field \"stalled_s\" is not a finite number");
  const std::string to_own = none + none + none + none + none + none + none + none + none + none + none + none + none;
  check_problem(problem_of<RankState>(sealed("state", to_own + field("9223372036854775807"))),
                "its field \"own\" has no length");
  check_problem(problem_of<RankState>(sealed("state", to_own + none + none + field("1") + field("::1") + field("-1"))),
                "its field \"unsent\" is -1, not from 0 to 1099511627776");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argv[1];
  if (what == "slowly") {
    print_report(read_slowly(std::stod(argv[2])));
  } else if (what == "garbled") {
    print_report(garbled());
  } else if (what == "words") {
    REQUIRE(argc == 3, "words needs a scene");
    check_words(argv[2]);
  } else if (what == "round trip") {
    check_round_trips();
  } else if (what == "unreadable") {
    check_unreadable();
  } else if (what == "concern") {
    check_concern();
  } else {
    print_report(scene(what));
  }
  return 0;
}
