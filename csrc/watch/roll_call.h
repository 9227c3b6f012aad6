// A roll call: what ranks tell each other when one of them has waited too long or has failed, and what follows from
// their answers. Everything here is typed fields. roll_call_text.h makes the sentences for people from them; the store
// and the threads are in watch.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "watch/congestion.h"
#include "watch/fields.h"
#include "watch/rank_state.h"
#include "watch/store_problem.h"

namespace fusedcomm {

// At most this many ranks or connections of a kind are listed: a report on a thousand ranks must stay readable.
inline constexpr size_t kMaxListed = 8;

// The rank that opened a roll call, and its reason.
struct Opening {
  static constexpr const char* kKind = "call";

  enum class Why : uint8_t {
    kStalled,   // its oldest job does not move
    kCrawling,  // its oldest job moves, but has been under way for long
    kFailed,    // one of its stages threw
    kCut        // its oldest job does not move, and some host acknowledges nothing
  };

  int64_t rank = 0;
  Why why = Why::kStalled;
  double stalled_s = 0;    // kStalled, kCut: seconds since the job last moved
  double under_way_s = 0;  // kCrawling: seconds since the job became the oldest
  int64_t step = 0;        // kCrawling: the job's step
  std::string label;       // kCrawling: the job's label, for people
  std::string failure;     // kFailed: the error's text, for people

  template <typename Archive, typename Self>
  static void fields(Archive& archive, Self& self) {
    archive("rank", self.rank, Limits{0, kMaxCount});
    archive("why", self.why, Why::kCut);
    archive("stalled_s", self.stalled_s);
    archive("under_way_s", self.under_way_s);
    archive("step", self.step, Limits{0, kMaxCount});
    archive("label", self.label);
    archive("failure", self.failure);
  }
};

// How long a rank has been waiting itself when it sees another rank's roll call.
struct OwnWait {
  bool has_failed = false;
  bool has_job = false;    // whether a job is under way
  double stalled_s = 0;    // seconds since its oldest job last moved
  double under_way_s = 0;  // seconds since that job became the oldest
};

// What another rank's roll call means for this rank.
enum class Concern : uint8_t {
  kNone,   // this rank has not waited long enough: it answers, but does not warn
  kStall,  // this rank stands still as well, or either rank has failed
  kCrawl   // this rank's job moves slowly as well
};
// A wait counts from half of `stall_after_s` on. If the opener has failed or is cut off, any job under way counts.
Concern concern_of(const Opening& opening, const OwnWait& own, double stall_after_s);

// The result of a roll call. The opener collects the answers and writes the result to the store for the others.
struct Finding {
  static constexpr const char* kKind = "report";

  // Another roll call would tell no more: every answer is known and the text names a missing or failed rank, or the
  // store has failed.
  bool is_conclusive = false;
  std::string text;  // for people
  // The store fell silent during the roll call, so another one may find more. Not serialized: a report that other ranks
  // read was written to the store.
  bool store_is_silent = false;
  // The slow ranks, if the call has found nothing else. Not serialized: see SlowRanks.
  std::set<std::string> slow;

  template <typename Archive, typename Self>
  static void fields(Archive& archive, Self& self) {
    archive("is_conclusive", self.is_conclusive);
    archive("text", self.text);
  }
};

// The numbers of a finding's slow ranks, which the opener writes beside it.
struct SlowRanks {
  static constexpr const char* kKind = "slow";
  std::set<std::string> ranks;

  template <typename Archive, typename Self>
  static void fields(Archive& archive, Self& self) {
    archive("ranks", self.ranks);
  }
};

struct RollCall {
  int64_t number = 0;
  int world_size = 0;
  std::optional<Opening> opening;     // nothing if the opener's text cannot be decoded
  double waited_s = 0;                // seconds spent collecting answers
  std::map<int, RankState> answers;   // by rank
  std::map<int, double> late_s;       // by rank: seconds until its answer was read, only for late answers
  std::map<int, std::string> absent;  // by rank: what its process is and where; empty if it has no watch
  // By absent rank: what it said when its watch began. Of the rank that collects (connections.h): by address, seconds
  // since it has last got bytes from there; and the remote ends of its open connections.
  std::map<int, RankState> absent_began;
  std::map<std::string, double> heard_s;
  std::set<std::string> open_ends;
  std::map<int, std::string> unreadable;  // by rank: why its answer cannot be decoded
  std::vector<int> unread;                // ranks whose answers were not read from the store in time
  std::optional<StoreProblem> store_problem;
};

// Collects answers as they are read. It reads some at a time, so that neither a slow store nor a thousand ranks make a
// rank look absent or late. Times are seconds since collecting began. Thread-safe, because a read may end late.
class Answers {
 public:
  explicit Answers(int world_size) : of_ranks_(static_cast<size_t>(world_size)) {}

  // Asks for the answers that are still missing, starting where the last call stopped. Stops at `until_s`, but asks for
  // at least one. `fetch` returns a rank's answer, or nothing if there is none yet. Returns whether the last rank was
  // reached.
  bool read(const std::function<std::optional<std::string>(int rank)>& fetch, const std::function<double()>& now_s,
            double until_s);
  // Whether every rank has either answered or had no answer when asked at `timeout_s` or later.
  bool are_known(double timeout_s) const;
  // Fills in `answers`, `unreadable`, `late_s`, `absent` and `unread`. A rank is late if it had no answer yet when
  // asked at `late_s` or later. It is absent if it still has none and was asked at `timeout_s` or later. The texts of
  // absent ranks stay empty.
  void put_into(RollCall* call, double late_s, double timeout_s) const;

 private:
  struct Answer {
    std::optional<std::string> text;
    double read_s = 0;     // when `text` was read
    double missed_s = -1;  // when the rank was last asked and had no answer; -1: never
  };
  mutable std::mutex mutex_;
  std::vector<Answer> of_ranks_;
  size_t next_ = 0;  // the rank at which read() continues
};

// Ranks that are at the same place of the same job.
struct RankGroup {
  std::vector<int> ranks;
  double longest_s = 0;  // seconds since the earliest hand-over on any of the ranks
  RankState state;       // of one of the ranks
};

// What follows from the answers.
struct Conclusion {
  // Why ranks wait although no rank is missing, failed, behind or busy.
  enum class Reason : uint8_t {
    kUnknown,  // such a rank exists, not all answers are known, or a late rank may be the reason
    kOver,     // no rank waits any more
    kCall,     // all ranks are in the collective call
    kApart,    // some ranks are in a collective call, and others wait for something else
    kAtWork,   // some ranks pack, reduce or unpack, and the others wait for them
    kNetwork   // ranks wait for the network
  };
  struct Slow {
    int rank;
    enum class How : uint8_t {
      kHeard,   // has not answered, but bytes from its host still come
      kLate,    // took long to answer
      kBehind,  // has not handed over the job that others wait for
      kBusy     // has been in a stage of its own for long
    } how;
  };

  std::optional<RankState> awaited;  // state of a rank that has the oldest job of all ranks; nothing: no rank waits
  std::vector<int> failed;           // empty if ranks are missing, because losing a peer makes other ranks fail
  // Ranks that have not answered. Those from which bytes still come are slow instead.
  struct Missing {
    int rank;
    double unacked_s;  // seconds for which its host has acknowledged nothing; 0: that is not known
  };

  std::vector<Missing> missing;
  std::vector<Slow> slow;
  std::vector<Cut> cuts;
  std::vector<RankGroup> at_work, waiting;
  Reason reason = Reason::kUnknown;
  std::optional<Congestion> congestion;  // for kNetwork: where the network is slow; nothing if that was not found
  bool is_conclusive = false;            // every answer is known, and a rank is missing or has failed
};
Conclusion conclude(const RollCall& call);

}  // namespace fusedcomm
