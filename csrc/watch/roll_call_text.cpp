#include "watch/roll_call_text.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

namespace fusedcomm {
namespace {

bool is_call(const RankState& state) { return state.job == RankState::Job::kCall; }

std::string rank_text(int64_t rank) { return "rank " + std::to_string(rank); }

std::string kb_text(int64_t nbytes) { return std::to_string((nbytes + 500) / 1000) + " KB"; }

// A label may contain line breaks, but each finding has one line.
std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

// "handed over 3.0 s ago"
std::string since_text(const RankState& state, double seconds) {
  return (is_call(state) ? "called " : "handed over ") + seconds_text(seconds) + " ago";
}

// "it has not handed over bucket 0 (…) of step 5; nothing under way for 7.2 s, since step 4"
std::string behind_text(const RankState& state, const RankState& awaited) {
  const std::string label = one_line(awaited.label);
  return (is_call(awaited) ? "it has not called " + label + ", as every rank has to"
                           : "it has not handed over " + label + " of step " + std::to_string(awaited.step)) +
         "; nothing under way for " + seconds_text(state.idle_s) +
         (state.last_step < 0 ? ", since it attached" : ", since step " + std::to_string(state.last_step));
}

// "rank 2 (process 12 on node)"
std::string absent_text(const RollCall& call, int rank) {
  const std::string& who = call.absent.at(rank);
  return rank_text(rank) + " (" + (who.empty() ? "which has no watch" : who) + ")";
}

std::string missing_text(const RollCall& call, const Conclusion::Missing& missing) {
  const std::string head =
      absent_text(call, missing.rank) + " is missing: no answer within " + seconds_text(call.waited_s);
  if (missing.unacked_s == 0) return head + ". It is stopped, was killed, has left, or is cut off";
  return head + ", and its host has not acknowledged for " + seconds_text(missing.unacked_s) +
         " what was sent to it. That host is down or cut off";
}

// "the link between rank 1 and rank 2 carries nothing: …"
std::string cut_text(const Cut& cut) {
  const std::string one = ranks_text(cut.one), other = ranks_text(cut.other);
  const auto unacked = [](const std::string& sender, double seconds) {
    return "what " + sender + " sent has not been acknowledged for " + seconds_text(seconds);
  };
  std::string text = "the link between " + one + " and " + other + " carries nothing: ";
  if (cut.by_one_s > 0) text += unacked(one, cut.by_one_s);
  if (cut.by_one_s > 0 && cut.by_other_s > 0) text += ", and ";
  return cut.by_other_s > 0 ? text + unacked(other, cut.by_other_s) : text;
}

std::string slow_text(const RollCall& call, const Conclusion& conclusion, const Conclusion::Slow& slow) {
  using How = Conclusion::Slow::How;
  if (slow.how == How::kHeard) {
    return absent_text(call, slow.rank) + " is slow: no answer within " + seconds_text(call.waited_s) +
           ", but bytes from its host still arrive. Its link may be full, so that its answer waits behind them";
  }
  const std::string head = rank_text(slow.rank) + " is slow: ";
  if (slow.how == How::kLate) {
    const auto answer = call.answers.find(slow.rank);  // an answer that cannot be read is late, too
    int64_t unsent = 0;
    if (answer != call.answers.end()) {
      for (const auto& [end, nbytes] : answer->second.unsent) unsent += nbytes;
    }
    return head + "it took " + seconds_text(call.late_s.at(slow.rank)) + " to answer, " +
           (unsent == 0 ? "as if its process had been stopped"
                        : "while " + kb_text(unsent) + " of what it sends had not left");
  }
  const RankState& state = call.answers.at(slow.rank);
  if (slow.how == How::kBehind) return head + behind_text(state, *conclusion.awaited);
  return head + "in step " + std::to_string(state.step) + " busy with " + under_way_text(state) + ", " +
         since_text(state, state.waits_s);
}

// "ranks 0, 2 wait in step 5 for the all-to-all of chunk 3/4 of bucket 0 (…), handed over 3.0 s ago"
std::string group_text(const RankGroup& group, bool is_at_work) {
  const bool is_one = group.ranks.size() == 1;
  const char* does = is_at_work ? (is_one ? " is busy" : " are busy") : (is_one ? " waits" : " wait");
  return ranks_text(group.ranks) + does + " in step " + std::to_string(group.state.step) +
         (is_at_work ? " with " : " for ") + under_way_text(group.state) + ", " +
         since_text(group.state, group.longest_s);
}

// "what rank 1 sends piles up: …"
std::string congestion_text(const Congestion& found) {
  std::ostringstream text;
  if (found.senders.empty()) {
    text << "what is sent to " << ranks_text(found.receivers);
  } else {
    text << "what " << ranks_text(found.senders) << (found.senders.size() == 1 ? " sends" : " send");
    if (!found.receivers.empty()) text << " to " << ranks_text(found.receivers);
  }
  text << " piles up: " << kb_text(found.unsent_nbytes) << " have not left, " << std::fixed << std::setprecision(1)
       << static_cast<double>(found.arriving_nbytes_per_s) / 1e6 << " MB/s arrive; elsewhere "
       << kb_text(found.elsewhere_nbytes);
  return text.str();
}

// Empty if the reason is kUnknown.
std::string reason_text(const RollCall& call, const Conclusion& conclusion) {
  const std::string all = call.late_s.empty() ? "every rank answered and none is behind: " : "";
  switch (conclusion.reason) {
    case Conclusion::Reason::kUnknown:
      return "";
    case Conclusion::Reason::kOver:
      return "every rank answered, and none waits any more";
    case Conclusion::Reason::kCall:
      return "every rank answered and none is behind";
    case Conclusion::Reason::kApart:
      return "the ranks are at different places, and wait for each other";
    case Conclusion::Reason::kAtWork:
      return all + "some are at work, and the others wait for them";
    case Conclusion::Reason::kNetwork:
      return all + "they wait for the network" +
             (conclusion.congestion ? ", where " + congestion_text(*conclusion.congestion) : "");
  }
  return "";
}

// A text of indented lines, with at most kMaxListed lines from list() for each kind. A line is about one or more ranks.
class Lines {
 public:
  explicit Lines(std::string head) : text_(std::move(head)) {}

  void add(const std::string& line) { text_ += "\n  " + line; }

  void list(const std::string& line, size_t num_ranks = 1) {
    if (++num_lines_ <= kMaxListed) {
      add(line);
    } else {
      num_ranks_left_ += num_ranks;
    }
  }

  // Ends a kind: adds a line that says of how many ranks there was no line, if any.
  void end_list(const char* what) {
    if (num_ranks_left_ != 0) {
      add(std::to_string(num_ranks_left_) + (num_ranks_left_ == 1 ? " more rank is " : " more ranks are ") + what);
    }
    num_lines_ = num_ranks_left_ = 0;
  }

  const std::string& text() const { return text_; }

 private:
  std::string text_;
  size_t num_lines_ = 0, num_ranks_left_ = 0;
};

// Adds a line for each rank whose answer is not known, with the reason.
void add_unknown(const RollCall& call, const Conclusion& conclusion, Lines* lines) {
  for (const Conclusion::Missing& missing : conclusion.missing) lines->list(missing_text(call, missing));
  lines->end_list("missing");
  for (const auto& [rank, problem] : call.unreadable) {
    lines->list(rank_text(rank) + " answered, but its answer cannot be read: " + problem);
  }
  lines->end_list("giving answers that cannot be read");
  if (!call.unread.empty()) {
    lines->add(std::to_string(call.unread.size()) + (call.unread.size() == 1 ? " answer" : " answers") +
               " not read in time, of " + ranks_text(call.unread) + (call.store_problem ? "" : ": the store is slow"));
  }
  if (call.store_problem) {
    lines->add((call.store_problem->is_silence() ? "then the store was silent: " : "then the store failed: ") +
               call.store_problem->text);
  }
}

}  // namespace

std::string report_text(const RollCall& call, const Conclusion& conclusion) {
  Lines lines("fusedcomm: roll call " + std::to_string(call.number) + " of " + std::to_string(call.world_size) +
              " ranks, " + opening_text(call.opening));
  add_unknown(call, conclusion, &lines);
  for (const int rank : conclusion.failed) {
    lines.list(rank_text(rank) + " has failed: " + one_line(*call.answers.at(rank).failure));
  }
  lines.end_list("failed");
  for (const Conclusion::Slow& slow : conclusion.slow) lines.list(slow_text(call, conclusion, slow));
  lines.end_list("slow");
  for (const Cut& cut : conclusion.cuts) lines.list(cut_text(cut));
  lines.end_list("without a link");
  if (const std::string reason = reason_text(call, conclusion); !reason.empty()) lines.add(reason);
  for (const RankGroup& group : conclusion.at_work) {
    lines.list(group_text(group, /*is_at_work=*/true), group.ranks.size());
  }
  lines.end_list("at work");
  for (const RankGroup& group : conclusion.waiting) {
    lines.list(group_text(group, /*is_at_work=*/false), group.ranks.size());
  }
  lines.end_list("waiting elsewhere");
  return lines.text();
}

std::string why_text(const Opening& opening) {
  switch (opening.why) {
    case Opening::Why::kStalled:
      return "where nothing has moved for " + seconds_text(opening.stalled_s);
    case Opening::Why::kCrawling:
      return "where " + opening.label + " of step " + std::to_string(opening.step) +
             " moves, but has been under way for " + seconds_text(opening.under_way_s);
    case Opening::Why::kCut:
      return "where nothing has moved for " + seconds_text(opening.stalled_s) +
             " and a host no longer acknowledges what it gets";
    case Opening::Why::kFailed:
      return "after a failure: " + opening.failure;
  }
  return "";
}

std::string opening_text(const std::optional<Opening>& opening) {
  if (!opening) return "opened by a rank whose reason cannot be read";
  return "opened by " + rank_text(opening->rank) + ", " + why_text(*opening);
}

std::string seconds_text(double seconds) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << seconds << " s";
  return text.str();
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < std::min(ranks.size(), kMaxListed); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return ranks.size() > kMaxListed ? text + " and " + std::to_string(ranks.size() - kMaxListed) + " more" : text;
}

std::string under_way_text(const RankState& state) {
  const std::string label = one_line(state.label);
  if (is_call(state)) return "the others in " + label;
  switch (state.at) {
    case Board::View::At::kQueue:
      return "the next stage of " + label;
    case Board::View::At::kStream:
      return "work on the device's streams of " + label;
    case Board::View::At::kStage:
      break;
  }
  return std::string("the ") + stage_name(state.stage) + " of chunk " + std::to_string(state.chunk + 1) + "/" +
         std::to_string(state.num_chunks) + " of " + label;
}

}  // namespace fusedcomm
