// What ranks tell each other when one of them waits for too long or has failed, and what follows from it: fields in,
// fields out. The sentences for people are made from these fields in roll_call_text.h; the store and the threads are in
// watch.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "watch/congestion.h"
#include "watch/fields.h"
#include "watch/rank_state.h"
#include "watch/store_problem.h"

namespace fusedcomm {

// Ranks or connections of each kind that are spelled out: a thousand ranks that wait for one need no thousand lines.
inline constexpr size_t kMaxListed = 8;

// Who opened a roll call, and why.
struct Opening {
  static constexpr const char* kKind = "call";

  enum class Why : uint8_t {
    kStalled,   // its oldest job does not move
    kCrawling,  // its oldest job moves, but has been under way for long
    kFailed     // a stage of it threw
  };

  int64_t rank = 0;
  Why why = Why::kStalled;
  double stalled_s = 0;    // kStalled: since the job moved
  double under_way_s = 0;  // kCrawling: since it became the oldest
  int64_t step = 0;        // kCrawling
  std::string label;       // kCrawling: the job's, for people
  std::string failure;     // kFailed, for people

  template <typename Archive, typename Self>
  static void fields(Archive& archive, Self& self) {
    archive("rank", self.rank, Limits{0, kMaxCount});
    archive("why", self.why, Why::kFailed);
    archive("stalled_s", self.stalled_s);
    archive("under_way_s", self.under_way_s);
    archive("step", self.step, Limits{0, kMaxCount});
    archive("label", self.label);
    archive("failure", self.failure);
  }
};

// How a rank that sees another's roll call fares itself.
struct OwnWait {
  bool has_failed = false;
  bool has_job = false;    // is anything under way?
  double stalled_s = 0;    // since its oldest job moved
  double under_way_s = 0;  // since that job became the oldest
};

// What another rank's roll call is about for this rank.
enum class Concern : uint8_t {
  kNone,   // this rank has not waited for as long: it answers, and says nothing
  kStall,  // this rank stands still, too, or there is a failure
  kCrawl   // this rank's job moves slowly, too
};
Concern concern_of(const Opening& opening, const OwnWait& own, double stall_after_s);

// The result of a roll call. The rank that collects the answers writes it to the store for the others.
struct Finding {
  static constexpr const char* kKind = "report";

  bool is_conclusive = false;  // names a rank that is missing or has failed, and every rank's answer is known
  std::string text;            // for people
  // The store fell silent meanwhile, so there may be more to find. Does not travel: a report that arrives was written.
  bool store_is_silent = false;

  template <typename Archive, typename Self>
  static void fields(Archive& archive, Self& self) {
    archive("is_conclusive", self.is_conclusive);
    archive("text", self.text);
  }
};

struct RollCall {
  int64_t number = 0;
  int world_size = 0;
  std::optional<Opening> opening;  // empty: what the rank that opened it wrote cannot be read
  double waited_s = 0;
  std::map<int, RankState> answers;
  std::map<int, double> late_s;           // by rank: seconds until an answer that a running rank gives sooner
  std::map<int, std::string> absent;      // by rank: where and what its process is; empty if it never said
  std::map<int, std::string> unreadable;  // by rank: what is wrong with its answer
  std::vector<int> unread;                // ranks whose answers the store did not hand out in time
  std::optional<StoreProblem> store_problem;
};

// Collects answers as they are read, some at a time, so that neither a slow store nor a thousand ranks make any rank
// look absent or late. Times are seconds since the call was opened. For several threads, since a read may be late.
class Answers {
 public:
  explicit Answers(int world_size) : of_ranks_(static_cast<size_t>(world_size)) {}

  // Asks for the answers that are still missing, from where the last call stopped; stops at `until_s`, but asks for at
  // least one. `fetch` returns a rank's answer, or nothing if there is none yet. Returns whether the last rank was
  // reached.
  bool read(const std::function<std::optional<std::string>(int rank)>& fetch, const std::function<double()>& now_s,
            double until_s);
  // Whether every rank has answered, or was asked in vain at `deadline_s` or later.
  bool are_known(double deadline_s) const;
  // A rank is late if it was asked in vain at `late_s` or later, and absent if at `deadline_s` or later. Absent ranks
  // get no names.
  void put_into(RollCall* call, double late_s, double deadline_s) const;

 private:
  struct Answer {
    std::optional<std::string> text;
    double read_s = 0;
    double missed_s = -1;  // when it was last asked for in vain; -1: never
  };
  mutable std::mutex mutex_;
  std::vector<Answer> of_ranks_;
  size_t next_ = 0;
};

// Ranks that are at the same place of the same job.
struct RankGroup {
  std::vector<int> ranks;
  double longest_s = 0;  // since the hand-over, of the rank where that was first
  RankState state;       // of one of the ranks
};

// What follows from the answers.
struct Conclusion {
  // Why ranks wait although none is missing, failed, behind or busy.
  enum class Reason : uint8_t {
    kUnknown,  // there is such a rank, or not all answers are known
    kOver,     // no rank waits any more
    kCall,     // all ranks are in the collective call
    kAtWork,   // some pack, reduce or unpack, and the others wait for them
    kNetwork
  };
  struct Slow {
    int rank;
    enum class How : uint8_t {
      kLate,    // took long to answer
      kBehind,  // has not handed over what others wait for
      kBusy     // has been in a stage of its own for long
    } how;
  };

  std::optional<RankState> awaited;  // of a rank with the oldest job under way anywhere; empty: no rank waits
  std::vector<int> failed;           // empty if ranks are missing: losing a peer makes a rank fail, too
  std::vector<Slow> slow;
  std::vector<RankGroup> at_work, waiting;
  Reason reason = Reason::kUnknown;
  std::optional<Congestion> congestion;  // for kNetwork, if it was found where
  bool is_conclusive = false;            // as in Finding
};
Conclusion conclude(const RollCall& call);

}  // namespace fusedcomm
