#include "watch/roll_call.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace fusedcomm {
namespace {

// Seconds. A running rank spends short times in stages of its own. A rank that stays in one for this long keeps the
// others waiting.
constexpr double kBusyS = 0.5;

// Returns a state with the oldest job of all ranks, which holds up all later jobs; null if no rank has a job.
const RankState* find_awaited(const std::map<int, RankState>& answers) {
  const RankState* oldest = nullptr;
  for (const auto& [rank, state] : answers) {
    if (state.job == RankState::Job::kNone) continue;
    if (!oldest || state.num_ended < oldest->num_ended) oldest = &state;
  }
  return oldest;
}

// Groups ranks by their place in a job. The groups are in the order of the jobs.
class Groups {
 public:
  void add(int rank, const RankState& state) {
    RankGroup& group =
        groups_[{state.step, state.label, state.job, state.num_chunks, state.at, state.stage, state.chunk}];
    group.ranks.push_back(rank);
    group.longest_s = std::max(group.longest_s, state.waits_s);
    group.state = state;
  }

  std::vector<RankGroup> take() {
    std::vector<RankGroup> groups;
    for (auto& [place, group] : groups_) groups.push_back(std::move(group));
    return groups;
  }

 private:
  using Place = std::tuple<int64_t, std::string, RankState::Job, int64_t, Board::View::At, Stage, int64_t>;
  std::map<Place, RankGroup> groups_;
};

bool any_of(const std::set<std::string>& of, const std::set<std::string>& others) {
  return std::any_of(of.begin(), of.end(), [&](const std::string& each) { return others.count(each) != 0; });
}

// Fills in `missing` and those of `slow` that have not answered.
void sort_absent(const RollCall& call, Conclusion* conclusion) {
  for (const auto& [rank, who] : call.absent) {
    const auto began = call.absent_began.find(rank);
    const RankState said = began == call.absent_began.end() ? RankState{} : began->second;
    // A rank that was killed or has left has no connections, but other ranks of its host may still send.
    const bool is_open = any_of(said.own_ends, call.open_ends);
    int64_t unacked_ms = 0;
    bool is_heard = false;
    for (const std::string& address : said.own) {
      bool is_shared = false, is_free = false;
      for (const auto& [other, state] : call.answers) {
        if (state.own.count(address) == 0) continue;
        is_shared = true;
        // A rank of that host that answered in time, and has nothing unsent, shows that its link is not full.
        is_free = is_free || (call.late_s.count(other) == 0 && state.unsent.empty());
      }
      const auto heard = call.heard_s.find(address);
      // Bytes that came since the roll was called.
      is_heard = is_heard || (is_open && !is_free && heard != call.heard_s.end() && heard->second <= call.waited_s);
      for (const auto& [other, state] : call.answers) {
        const auto unacked = state.unacked_ms.find(address);
        if (!is_shared && unacked != state.unacked_ms.end()) unacked_ms = std::max(unacked_ms, unacked->second);
      }
    }
    if (is_heard) {
      conclusion->slow.push_back({rank, Conclusion::Slow::How::kHeard});
    } else {
      conclusion->missing.push_back({rank, static_cast<double>(unacked_ms) * 1e-3});
    }
  }
}

// Fills in `slow`, `at_work` and `waiting`.
void sort_ranks(const RollCall& call, const RankState* awaited, Conclusion* conclusion) {
  using How = Conclusion::Slow::How;
  Groups at_work, waiting;
  for (const auto& [rank, after_s] : call.late_s) conclusion->slow.push_back({rank, How::kLate});
  for (const auto& [rank, state] : call.answers) {
    if (state.job == RankState::Job::kNone) {
      const bool is_behind = awaited && state.num_handed <= awaited->num_ended;
      if (is_behind && !state.failure) conclusion->slow.push_back({rank, How::kBehind});
      continue;
    }
    // A rank that works on a later job, or that has failed, does not hold up the others by this work.
    const bool holds_up = state.is_at_work() && state.num_ended == awaited->num_ended && !state.failure;
    if (holds_up && state.stage_s >= kBusyS) {
      conclusion->slow.push_back({rank, How::kBusy});
    } else {
      (holds_up ? at_work : waiting).add(rank, state);
    }
  }
  conclusion->at_work = at_work.take();
  conclusion->waiting = waiting.take();
}

// Whether a rank is in a collective call, and another one has a bucket in its place in the order of jobs.
bool are_apart(const RollCall& call, const RankState& awaited) {
  return std::any_of(call.answers.begin(), call.answers.end(), [&awaited](const auto& answer) {
    const RankState& state = answer.second;
    return state.job != RankState::Job::kNone && state.num_ended == awaited.num_ended && state.job != awaited.job;
  });
}

// Fills in `reason` and `congestion`.
void find_reason(const RollCall& call, Conclusion* conclusion) {
  using Reason = Conclusion::Reason;
  const bool is_all_known = call.absent.empty() && call.unread.empty() && call.unreadable.empty();
  const auto is_late = [](const Conclusion::Slow& slow) { return slow.how == Conclusion::Slow::How::kLate; };
  if (!is_all_known || !conclusion->failed.empty() ||
      !std::all_of(conclusion->slow.begin(), conclusion->slow.end(), is_late)) {
    return;
  }
  // Bytes that pile up before a cut say nothing more.
  if (conclusion->cuts.empty()) conclusion->congestion = find_congestion(call.answers);
  if (!call.late_s.empty()) {
    // A late rank may be the only reason. The network is named only if bytes pile up as well.
    if (conclusion->congestion || !conclusion->cuts.empty()) conclusion->reason = Reason::kNetwork;
  } else if (!conclusion->awaited) {
    conclusion->reason = Reason::kOver;
  } else if (are_apart(call, *conclusion->awaited)) {
    conclusion->reason = Reason::kApart;
  } else if (conclusion->awaited->job == RankState::Job::kCall) {
    conclusion->reason = Reason::kCall;
  } else {
    const bool is_network = conclusion->congestion || !conclusion->cuts.empty() || conclusion->at_work.empty();
    conclusion->reason = is_network ? Reason::kNetwork : Reason::kAtWork;
  }
}

}  // namespace

Concern concern_of(const Opening& opening, const OwnWait& own, double stall_after_s) {
  const double half_s = stall_after_s / 2;
  const bool is_crawl = opening.why == Opening::Why::kCrawling;
  const bool is_sure = opening.why == Opening::Why::kFailed || opening.why == Opening::Why::kCut;
  const bool waits = own.has_job && (is_sure || (is_crawl ? own.under_way_s : own.stalled_s) > half_s);
  if (!own.has_failed && !waits) return Concern::kNone;
  return is_crawl && own.stalled_s < half_s ? Concern::kCrawl : Concern::kStall;
}

bool Answers::read(const std::function<std::optional<std::string>(int rank)>& fetch,
                   const std::function<double()>& now_s, double until_s) {
  std::unique_lock<std::mutex> lock(mutex_);
  bool has_asked = false;
  for (; next_ < of_ranks_.size(); ++next_) {
    const size_t rank = next_;
    if (of_ranks_[rank].text) continue;
    lock.unlock();
    const double asked_s = now_s();
    if (has_asked && asked_s >= until_s) return false;
    std::optional<std::string> text = fetch(static_cast<int>(rank));
    lock.lock();
    has_asked = true;
    Answer& answer = of_ranks_[rank];
    if (text) {
      answer.text = std::move(text);
      answer.read_s = now_s();
    } else {
      answer.missed_s = asked_s;
    }
  }
  next_ = 0;
  return true;
}

bool Answers::are_known(double timeout_s) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::all_of(of_ranks_.begin(), of_ranks_.end(),
                     [timeout_s](const Answer& answer) { return answer.text || answer.missed_s >= timeout_s; });
}

void Answers::put_into(RollCall* call, double late_s, double timeout_s) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < of_ranks_.size(); ++i) {
    const Answer& answer = of_ranks_[i];
    const int rank = static_cast<int>(i);
    if (answer.text) {
      try {
        call->answers[rank] = decode<RankState>(*answer.text);
      } catch (const UnreadableError& error) {
        call->unreadable[rank] = error.what();
      }
      if (answer.missed_s >= late_s) call->late_s[rank] = answer.read_s;
    } else if (answer.missed_s >= timeout_s) {
      call->absent[rank] = "";
    } else {
      call->unread.push_back(rank);
    }
  }
}

Conclusion conclude(const RollCall& call) {
  Conclusion conclusion;
  for (const auto& [rank, state] : call.answers) {
    if (state.failure && call.absent.empty()) conclusion.failed.push_back(rank);
  }
  const RankState* awaited = find_awaited(call.answers);
  if (awaited) conclusion.awaited = *awaited;
  sort_absent(call, &conclusion);
  sort_ranks(call, awaited, &conclusion);
  conclusion.cuts = find_cuts(call.answers);
  find_reason(call, &conclusion);
  const bool is_all_read = call.unread.empty() && call.unreadable.empty();
  const bool is_heard = conclusion.missing.size() < call.absent.size();
  conclusion.is_conclusive = is_all_read && !is_heard && (!conclusion.missing.empty() || !conclusion.failed.empty());
  return conclusion;
}

}  // namespace fusedcomm
