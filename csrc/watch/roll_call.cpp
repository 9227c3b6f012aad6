#include "watch/roll_call.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <sstream>
#include <utility>

namespace fusedcomm {
namespace {

constexpr const char* kOnStream = "work on the device's streams";

constexpr size_t kMaxFailure = 300;  // characters

// Less than that may be about to leave. How much of all that has not left stands out; and with what difference one
// rank's and what is for one end are as much, so that it is the same.
constexpr int64_t kUnsentNbytes = 64 << 10;
constexpr double kMostOfUnsent = 0.75, kAsMuch = 0.05;

// A rank that moves is in a short stage of its own now and then; in one that takes so long it keeps others waiting.
constexpr double kBusyS = 0.5;

bool is_call(const RankState& state) { return !state.bucket.empty() && state.num_chunks == 0; }

// "handed over 3.0 s ago"
std::string since_text(const RankState& state, double seconds) {
  return (is_call(state) ? "called " : "handed over ") + seconds_text(seconds) + " ago";
}

// "it has not handed over bucket 0 (…) of step 5"
std::string not_begun_text(const RankState& waiting) {
  if (is_call(waiting)) return "it has not called " + waiting.bucket + ", as every rank has to";
  return "it has not handed over " + waiting.bucket + " of step " + std::to_string(waiting.step);
}

// Where ranks are that answered, by a text that they share.
struct Group {
  std::vector<int> ranks;
  double longest_s = 0;
  const RankState* state = nullptr;
};

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

double seconds_since(Board::Clock::time_point then) {
  return std::chrono::duration<double>(Board::Clock::now() - then).count();
}

std::string behind_text(const RankState& state) {
  std::string text = "nothing under way for " + seconds_text(state.idle_s);
  return state.last_step < 0 ? text + ", since it attached" : text + ", since step " + std::to_string(state.last_step);
}

void add_line(std::string* text, const std::string& line) { *text += "\n  " + line; }

std::string to_text(const std::map<std::string, int64_t>& numbers) {
  std::string text;
  for (const auto& [name, number] : numbers) text += (text.empty() ? "" : " ") + name + " " + std::to_string(number);
  return text;
}

std::map<std::string, int64_t> numbers_from(const std::string& text) {
  std::map<std::string, int64_t> numbers;
  std::istringstream words(text);
  int64_t number = 0;
  for (std::string name; words >> name >> number;) numbers[name] = std::max<int64_t>(0, number);
  return numbers;
}

std::string to_text(const std::set<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : " ") + name;
  return text;
}

std::set<std::string> names_from(const std::string& text) {
  std::set<std::string> names;
  std::istringstream words(text);
  for (std::string name; words >> name;) names.insert(name);
  return names;
}

std::string kb_text(int64_t nbytes) { return std::to_string((nbytes + 500) / 1000) + " KB"; }

// Hosts, which are where ranks with a common address are, and the bytes that have not left from one for another.
class Ways {
 public:
  explicit Ways(const std::map<int, RankState>& answers) {
    for (const auto& [rank, state] : answers) place(rank, state.own);
    for (const auto& [rank, state] : answers) {
      for (const auto& [end, nbytes] : state.unsent) {
        const auto to = host_of_.find(end);  // else it is for somebody who has no part in this
        const size_t from = host_of_rank_[rank];
        if (to == host_of_.end() || to->second == from) continue;
        const auto per_s = state.per_s.find(end);
        for (Held* held : {&ways_[{from, to->second}], &from_[from], &to_[to->second], &all_}) {
          held->unsent += nbytes;
          held->per_s += per_s == state.per_s.end() ? 0 : per_s->second;
        }
      }
    }
  }

  // Where bytes pile up; empty if nowhere more than elsewhere. Who waits for a slow rank is late itself, and is waited
  // for in its turn: what ranks wait for does not tell where the network is slow. But there bytes pile up, and few get
  // through.
  std::string pile_text() const {
    if (all_.unsent < kUnsentNbytes) return "";
    const auto from = most_of(from_), to = most_of(to_);
    const double from_part = part_of(from->second), to_part = part_of(to->second);
    if (std::max(from_part, to_part) < kMostOfUnsent) return "";
    const std::string sender = ranks_text(ranks_[from->first]), receiver = ranks_text(ranks_[to->first]);
    const char* sends = ranks_[from->first].size() == 1 ? " sends" : " send";
    if (std::abs(from_part - to_part) < kAsMuch) {  // together more than all: some is from the one to the other
      return "what " + sender + sends + " to " + receiver + held_text(ways_.at({from->first, to->first}));
    }
    return from_part > to_part ? "what " + sender + sends + held_text(from->second)
                               : "what is sent to " + receiver + held_text(to->second);
  }

 private:
  struct Held {
    int64_t unsent = 0, per_s = 0;
  };

  static bool is_loopback(const std::string& address) { return address.rfind("127.", 0) == 0 || address == "::1"; }

  void place(int rank, const std::set<std::string>& own) {
    size_t host = ranks_.size();
    for (const std::string& address : own) {
      if (const auto known = host_of_.find(address); known != host_of_.end()) host = known->second;
    }
    if (host == ranks_.size()) ranks_.emplace_back();
    ranks_[host].push_back(rank);
    host_of_rank_[rank] = host;
    for (const std::string& address : own) {
      if (!is_loopback(address)) host_of_[address] = host;
    }
  }

  static std::map<size_t, Held>::const_iterator most_of(const std::map<size_t, Held>& held) {
    return std::max_element(held.begin(), held.end(),
                            [](const auto& one, const auto& other) { return one.second.unsent < other.second.unsent; });
  }

  double part_of(const Held& held) const { return static_cast<double>(held.unsent) / static_cast<double>(all_.unsent); }

  std::string held_text(const Held& held) const {
    std::ostringstream text;
    text << " piles up: " << kb_text(held.unsent) << " have not left, " << std::fixed << std::setprecision(1)
         << static_cast<double>(held.per_s) / 1e6 << " MB/s arrive; elsewhere " << kb_text(all_.unsent - held.unsent);
    return text.str();
  }

  std::vector<std::vector<int>> ranks_;    // by host
  std::map<std::string, size_t> host_of_;  // by address
  std::map<int, size_t> host_of_rank_;
  std::map<std::pair<size_t, size_t>, Held> ways_;  // by host: from, to
  std::map<size_t, Held> from_, to_;
  Held all_;
};

// All have answered and none is slow. `waiting`: a rank with the oldest job, null if there is none. `some_work`: on it
// some pack, reduce or unpack, so it need not be the network that the others wait for.
void add_network_line(const RollCall& call, const RankState* waiting, bool some_work, std::string* text) {
  const std::string pile = Ways(call.answers).pile_text();
  const std::string network = "they wait for the network" + (pile.empty() ? "" : ", where " + pile);
  const bool is_network = !pile.empty() || !some_work;
  if (!call.late_s.empty()) {
    if (!pile.empty()) add_line(text, network);
  } else if (!waiting) {
    add_line(text, "every rank answered, and none waits any more");
  } else if (is_call(*waiting)) {
    add_line(text, "every rank answered and none is behind");
  } else {
    add_line(text, "every rank answered and none is behind: " +
                       (is_network ? network : "some are at work, and the others wait for them"));
  }
}

}  // namespace

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
  if (is_call(state)) return "the others in " + state.bucket;
  const std::string chunk = "chunk " + std::to_string(state.chunk + 1) + "/" + std::to_string(state.num_chunks);
  if (state.stage.empty()) return "the next stage of " + state.bucket;
  if (state.stage == kOnStream) return state.stage + " of " + state.bucket;
  return "the " + state.stage + " of " + chunk + " of " + state.bucket;
}

std::string RankState::to_text() const {
  std::ostringstream text;
  text << "num_handed " << num_handed << "\nnum_ended " << num_ended << "\nlast_step " << last_step << "\nidle_s "
       << idle_s << "\nstep " << step << "\nchunk " << chunk << "\nnum_chunks " << num_chunks << "\non_wire " << on_wire
       << "\nwaits_s " << waits_s << "\nstage_s " << stage_s << "\nbucket " << one_line(bucket) << "\nstage "
       << one_line(stage) << "\nunsent " << fusedcomm::to_text(unsent) << "\nper_s " << fusedcomm::to_text(per_s)
       << "\nown " << fusedcomm::to_text(own) << "\nfailure " << one_line(failure) << "\n";
  return text.str();
}

RankState RankState::from_text(const std::string& text) {
  RankState state;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t space = line.find(' ');
    if (space == std::string::npos) continue;
    const std::string name = line.substr(0, space), value = line.substr(space + 1);
    std::istringstream number(value);
    if (name == "num_handed") number >> state.num_handed;
    if (name == "num_ended") number >> state.num_ended;
    if (name == "last_step") number >> state.last_step;
    if (name == "idle_s") number >> state.idle_s;
    if (name == "step") number >> state.step;
    if (name == "chunk") number >> state.chunk;
    if (name == "num_chunks") number >> state.num_chunks;
    if (name == "on_wire") number >> state.on_wire;
    if (name == "waits_s") number >> state.waits_s;
    if (name == "stage_s") number >> state.stage_s;
    if (name == "bucket") state.bucket = value;
    if (name == "stage") state.stage = value;
    if (name == "unsent") state.unsent = numbers_from(value);
    if (name == "per_s") state.per_s = numbers_from(value);
    if (name == "own") state.own = names_from(value);
    if (name == "failure") state.failure = value;
  }
  return state;
}

RankState state_of(const Board::View& view, const std::string& failure) {
  RankState state;
  state.num_handed = view.num_handed;
  state.num_ended = view.num_ended;
  state.last_step = view.last_step;
  state.idle_s = seconds_since(view.last_ended);
  state.failure = failure.substr(0, kMaxFailure);
  if (!view.label) return state;
  state.bucket = view.label->text;
  state.step = view.step;
  state.num_chunks = view.num_chunks;
  state.waits_s = seconds_since(view.handed);
  if (view.at == Board::View::At::kStream) {
    state.stage = kOnStream;
    state.on_wire = true;  // for all the host can tell
  } else if (view.at == Board::View::At::kStage) {
    state.stage = stage_name(view.stage);
    state.chunk = view.chunk;
    state.on_wire = is_on_wire(view.stage);
    state.stage_s = seconds_since(view.stage_began);
  }
  return state;
}

bool Answers::read(const std::function<std::string(int rank)>& fetch, const std::function<double()>& now_s,
                   double until_s) {
  std::unique_lock<std::mutex> lock(mutex_);
  bool has_asked = false;
  for (; next_ < of_ranks_.size(); ++next_) {
    const size_t rank = next_;
    if (!of_ranks_[rank].text.empty()) continue;
    lock.unlock();
    const double asked_s = now_s();
    if (has_asked && asked_s >= until_s) return false;
    std::string text = fetch(static_cast<int>(rank));
    lock.lock();
    has_asked = true;
    Answer& answer = of_ranks_[rank];
    if (text.empty()) {
      answer.missed_s = asked_s;
    } else {
      answer.text = std::move(text);
      answer.read_s = now_s();
    }
  }
  next_ = 0;
  return true;
}

bool Answers::are_known(double deadline_s) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::all_of(of_ranks_.begin(), of_ranks_.end(), [deadline_s](const Answer& answer) {
    return !answer.text.empty() || answer.missed_s >= deadline_s;
  });
}

void Answers::put_into(RollCall* call, double late_s, double deadline_s) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < of_ranks_.size(); ++i) {
    const Answer& answer = of_ranks_[i];
    const int rank = static_cast<int>(i);
    if (!answer.text.empty()) {
      call->answers[rank] = RankState::from_text(answer.text);
      if (answer.missed_s >= late_s) call->late_s[rank] = answer.read_s;
    } else if (answer.missed_s >= deadline_s) {
      call->absent[rank] = "";
    } else {
      call->unread.push_back(rank);
    }
  }
}

Finding conclude(const RollCall& call) {
  Finding finding;
  finding.text = "fusedcomm: roll call " + std::to_string(call.number) + " of " + std::to_string(call.world_size) +
                 " ranks, " + call.opened;
  size_t num_lines = 0;
  const auto list = [&](const std::string& line) {
    if (++num_lines <= kMaxListed) add_line(&finding.text, line);
  };
  const auto end_list = [&](const char* what) {
    if (num_lines > kMaxListed) {
      add_line(&finding.text, std::to_string(num_lines - kMaxListed) + " more ranks are " + what);
    }
    num_lines = 0;
  };

  for (const auto& [rank, who] : call.absent) {
    list("rank " + std::to_string(rank) + " (" + (who.empty() ? "which has no watch" : who) + ")" +
         " is missing: no answer within " + seconds_text(call.waited_s) +
         ". It is stopped, was killed, has left, or is cut off");
  }
  end_list("missing");
  if (!call.unread.empty()) {
    add_line(&finding.text, std::to_string(call.unread.size()) + (call.unread.size() == 1 ? " answer" : " answers") +
                                " not read in time, of " + ranks_text(call.unread) +
                                (call.store_problem.empty() ? ": the store is slow" : ""));
  }
  if (!call.store_problem.empty()) {
    add_line(&finding.text,
             (call.store_is_silent ? "then the store was silent: " : "then the store failed: ") + call.store_problem);
  }

  // A rank that lost its peer has failed, too, but is no reason.
  bool has_failed = false;
  for (const auto& [rank, state] : call.answers) {
    if (state.failure.empty() || !call.absent.empty()) continue;
    has_failed = true;
    list("rank " + std::to_string(rank) + " has failed: " + state.failure);
  }
  end_list("failed");

  // The oldest job that some rank waits for: whoever has not handed it over holds it up.
  int64_t oldest = -1;
  const RankState* waiting = nullptr;
  for (const auto& [rank, state] : call.answers) {
    if (state.bucket.empty() || (waiting && state.num_ended >= oldest)) continue;
    oldest = state.num_ended;
    waiting = &state;
  }
  bool has_slow = false;
  for (const auto& [rank, after_s] : call.late_s) {
    list("rank " + std::to_string(rank) + " is slow: it took " + seconds_text(after_s) +
         " to answer, as if its process had been stopped");
  }
  std::map<std::string, Group> at_work, waiters;  // by what they do or wait for
  for (const auto& [rank, state] : call.answers) {
    const bool is_oldest = state.num_ended == oldest && state.failure.empty();
    if (state.bucket.empty()) {
      if (!waiting || state.num_handed > oldest || !state.failure.empty()) continue;
      has_slow = true;
      list("rank " + std::to_string(rank) + " is slow: " + not_begun_text(*waiting) + "; " + behind_text(state));
    } else if (!state.on_wire && state.stage_s >= kBusyS && is_oldest) {
      has_slow = true;
      list("rank " + std::to_string(rank) + " is slow: in step " + std::to_string(state.step) + " busy with " +
           under_way_text(state) + ", " + since_text(state, state.waits_s));
    } else {
      const bool works = !state.on_wire && !state.stage.empty() && is_oldest;
      Group& group = (works ? at_work : waiters)["in step " + std::to_string(state.step) +
                                                 (works ? " with " : " for ") + under_way_text(state)];
      group.ranks.push_back(rank);
      group.longest_s = std::max(group.longest_s, state.waits_s);
      group.state = &state;
    }
  }
  end_list("slow");
  if (call.absent.empty() && call.unread.empty() && !has_failed && !has_slow) {
    add_network_line(call, waiting, !at_work.empty(), &finding.text);
  }
  for (const auto& [what, group] : at_work) {
    list(ranks_text(group.ranks) + (group.ranks.size() == 1 ? " is busy " : " are busy ") + what + ", " +
         since_text(*group.state, group.longest_s));
  }
  end_list("at work");
  for (const auto& [what, group] : waiters) {
    list(ranks_text(group.ranks) + (group.ranks.size() == 1 ? " waits " : " wait ") + what + ", " +
         since_text(*group.state, group.longest_s));
  }
  end_list("waiting elsewhere");
  finding.store_is_silent = call.store_is_silent;
  finding.is_conclusive = call.unread.empty() && (!call.absent.empty() || has_failed);
  return finding;
}

}  // namespace fusedcomm
