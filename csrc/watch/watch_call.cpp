// The roll calls of a watch: opening one, collecting the answers, and what is said if the store does not serve it.
#include <algorithm>
#include <atomic>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "watch/call_keys.h"
#include "watch/connections.h"
#include "watch/roll_call_text.h"
#include "watch/watch.h"

namespace fusedcomm {

std::optional<Finding> Watch::call_roll(Opening why, Seconds silence_timeout) {
  const int64_t number = next_call_;
  why.rank = options_.rank;
  const RankState asked = answer();
  auto opened = std::make_shared<std::string>();
  const auto open = [=, own = encode(why), text = encode(asked), rank = options_.rank](c10d::Store& store) {
    *opened = store.compareSet(call_key(number), "", own);
    store.set(answer_key(number, rank), text);
  };
  auto problem = send(open);
  const auto deadline = Clock::now() + silence_timeout;
  while (problem && problem->is_silence() && Clock::now() < deadline) {
    if (!sleep(roll_call_poll_)) return std::nullopt;
    if (state().failure != asked.failure) break;  // an error waits for its explanation
    problem = send(open);
  }
  if (problem) return without_store(*problem, why_text(why));
  ++next_call_;
  return take_part({number, decode_if_readable<Opening>(*opened)});
}

std::optional<Finding> Watch::take_part(const Call& call) {
  if (!call.opening) return collect(call);  // the opener is unknown, so no report can be waited for
  if (call.opening->rank != options_.rank) return wait_for_report(call);
  std::optional<Finding> finding = collect(call);
  if (!finding) return std::nullopt;
  const std::string slow = encode(SlowRanks{finding->slow});
  send([=, number = call.number, report = encode(*finding)](c10d::Store& store) {
    store.set(slow_key(number), slow);
    store.set(report_key(number), report);
  });
  return finding;
}

std::optional<Finding> Watch::wait_for_report(const Call& call) {
  const auto deadline = Clock::now() + roll_call_timeout_;
  auto report = std::make_shared<std::optional<std::string>>();
  auto slow = std::make_shared<std::optional<std::string>>();
  auto is_next_open = std::make_shared<bool>(false);
  while (Clock::now() < deadline) {
    const auto problem = send([=, number = call.number](c10d::Store& store) {
      *is_next_open = store.check({call_key(number + 1)});
      *report = read_key(store, report_key(number));
      if (*report) *slow = read_key(store, slow_key(number));
    });
    if (problem && problem->kind == StoreProblem::Kind::kFailed) break;
    if (!problem && *report) {
      std::optional<Finding> finding = decode_if_readable<Finding>(**report);
      if (!finding) break;
      if (*slow) {
        if (auto found = decode_if_readable<SlowRanks>(**slow)) finding->slow = std::move(found->ranks);
      }
      return finding;
    }
    // The opener could not write its report to a silent store, and now waits for answers to its next call.
    if (!problem && *is_next_open) return std::nullopt;
    if (!sleep(roll_call_poll_)) return std::nullopt;
  }
  return collect(call);
}

std::optional<Finding> Watch::collect(const Call& opened) {
  auto answers = std::make_shared<Answers>(options_.world_size);
  const auto now_s = [started = Clock::now()] { return Seconds(Clock::now() - started).count(); };
  // A rank that has not answered within timeout_s is missing. If the store cannot be asked for its answer by end_s, the
  // rank stays unread.
  const double timeout_s = answer_timeout_.count(), end_s = (answer_timeout_ + request_timeout_).count();
  RollCall call;
  for (;;) {
    auto were_all_asked = std::make_shared<std::atomic<bool>>(false);
    call.store_problem = send([=, number = opened.number, request_s = request_timeout_.count()](c10d::Store& store) {
      const auto fetch = [&](int rank) { return read_key(store, answer_key(number, rank)); };
      *were_all_asked = answers->read(fetch, now_s, now_s() + request_s / 2);
    });
    if (call.store_problem || answers->are_known(timeout_s) || now_s() > end_s) break;
    if (!sleep(*were_all_asked ? roll_call_poll_ : Seconds{0})) return std::nullopt;
  }
  if (!sleep(Seconds{0})) return std::nullopt;
  call.number = opened.number;
  call.world_size = options_.world_size;
  call.opening = opened.opening;
  call.waited_s = now_s();
  answers->put_into(&call, late_after_.count(), timeout_s);
  call.answers[options_.rank] = answer();
  call.absent.erase(options_.rank);
  call.unreadable.erase(options_.rank);
  call.unread.erase(std::remove(call.unread.begin(), call.unread.end(), options_.rank), call.unread.end());
  Connections own = connections(options_.store_port);
  call.heard_s = std::move(own.heard_s);
  call.open_ends = std::move(own.open_ends);
  if (!call.store_problem) {
    name_absent(&call);
  } else if (call.answers.size() == 1) {
    return without_store(*call.store_problem, opening_text(call.opening));
  } else {
    call.store_problem->text += ". The store is " + options_.store_text;
  }
  const Conclusion conclusion = conclude(call);
  Finding finding{conclusion.is_conclusive,
                  report_text(call, conclusion),
                  call.store_problem && call.store_problem->is_silence(),
                  {}};
  if (conclusion.missing.empty() && conclusion.failed.empty() && conclusion.cuts.empty() && !conclusion.congestion) {
    for (const Conclusion::Slow& slow : conclusion.slow) finding.slow.insert(std::to_string(slow.rank));
  }
  return finding;
}

void Watch::name_absent(RollCall* call) {
  struct Names {
    std::mutex mutex;
    std::map<int, std::string> by_rank;
    std::map<int, RankState> began;
  };
  auto names = std::make_shared<Names>();
  std::vector<int> ranks;
  for (const auto& [rank, unknown] : call->absent) {
    if (ranks.size() < kMaxListed) ranks.push_back(rank);
  }
  if (ranks.empty()) return;
  send([=](c10d::Store& store) {
    for (const int rank : ranks) {
      std::optional<std::string> text = read_key(store, who_key(rank));
      if (!text) continue;
      const std::optional<std::string> began = read_key(store, began_key(rank));
      std::lock_guard<std::mutex> lock(names->mutex);
      names->by_rank[rank] = std::move(*text);
      if (!began) continue;
      if (auto state = decode_if_readable<RankState>(*began)) names->began[rank] = std::move(*state);
    }
  });
  std::lock_guard<std::mutex> lock(names->mutex);
  for (const auto& [rank, text] : names->by_rank) call->absent[rank] = text;
  call->absent_began = std::move(names->began);
}

std::optional<Finding> Watch::without_store(const StoreProblem& problem, const std::string& why) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) return std::nullopt;
  }
  const RankState own = state();
  const bool is_silent = problem.is_silence();
  std::string text = "fusedcomm: rank " + std::to_string(options_.rank) + " of " + std::to_string(options_.world_size) +
                     " cannot call the roll (" + why + "): the store " + (is_silent ? "is silent (" : "fails (") +
                     problem.text + "). The store is " + options_.store_text +
                     ". The process that hosts it is stopped, was killed, has left, or is cut off" +
                     (is_silent ? ", or very slow" : "");
  if (own.job != RankState::Job::kNone) {
    text += "\n  rank " + std::to_string(options_.rank) + " waits in step " + std::to_string(own.step) + " for " +
            under_way_text(own) + ", handed over " + seconds_text(own.waits_s) + " ago";
  }
  for (const auto& [end, seconds] : connections().unacked_s) {
    text += "\n  " + end + " has not acknowledged for " + seconds_text(seconds) + " what this rank sent";
  }
  return Finding{/*is_conclusive=*/!is_silent, std::move(text), is_silent};
}

}  // namespace fusedcomm
