#include "watch/watch.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

#include "lanes/threads.h"
#include "watch/call_keys.h"
#include "watch/connections.h"
#include "watch/roll_call_text.h"

namespace fusedcomm {
namespace {

using Seconds = std::chrono::duration<double>;

// All watches together poll the store at most this many times a second.
constexpr double kMaxPollsPerSecond = 500;
// Seconds between two polls, unless kMaxPollsPerSecond makes them longer.
constexpr double kMaxPollS = 1;

// A wait that takes this much longer than twice the time asked for shows that the process or the machine was stopped.
constexpr Seconds kPause{0.5};

// Bytes that are unsent at the beginning and at the end of this time wait for the network or for the receiver: a link
// of 1 Gbit/s carries 25 MB in it.
constexpr Seconds kMoment{0.2};

// A job that has not moved for this long is looked at: does a host no longer acknowledge what it gets?
constexpr double kCutS = 5;

// On a slow link every bucket crawls. A bucket is reported only if it takes this many times as long as any bucket
// reported before.
constexpr double kSlower = 2;

// Seconds between two polls.
double poll_s(const WatchOptions& options) {
  const double wanted = std::min({kMaxPollS, options.stall_after_s / 4, options.timeout_s / 12});
  return std::max(options.world_size / kMaxPollsPerSecond, wanted);
}

// Seconds within which every rank has polled `num_polls` times and answered, whatever its stall_after_s is.
double after_polls_s(WatchOptions options, int num_polls) {
  options.stall_after_s = options.timeout_s;
  return num_polls * poll_s(options) + std::min(1.0, options.timeout_s / 6);
}

int64_t clamped_nbytes(double nbytes) {
  return static_cast<int64_t>(std::clamp(nbytes, 0.0, static_cast<double>(kMaxConnectionNbytes)));
}

// Milliseconds by address, the kMaxListed longest.
std::map<std::string, int64_t> longest_unacked(const Connections& found) {
  std::vector<std::pair<double, std::string>> longest;
  for (const auto& [end, seconds] : found.unacked_s) longest.emplace_back(seconds, end);
  std::sort(longest.rbegin(), longest.rend());
  std::map<std::string, int64_t> milliseconds;
  for (size_t i = 0; i < std::min(longest.size(), kMaxListed); ++i) {
    milliseconds[longest[i].second] = static_cast<int64_t>(longest[i].first * 1e3);
  }
  return milliseconds;
}

}  // namespace

Watch::Watch(std::shared_ptr<Board> board, std::shared_ptr<const Device> device, const StorePtr& store,
             WatchOptions options)
    : board_(std::move(board)),
      device_(std::move(device)),
      options_(std::move(options)),
      poll_(poll_s(options_)),
      roll_call_poll_(poll_ / 5),
      answer_timeout_(after_polls_s(options_, 2)),
      late_after_(after_polls_s(options_, 1)),
      request_timeout_(1 + options_.world_size / 1e3),
      silence_timeout_(2 * request_timeout_),
      roll_call_timeout_(answer_timeout_ + 6 * request_timeout_),
      courier_(store) {
  const auto problem = send([](c10d::Store&) {});
  if (problem && !problem->is_silence()) throw std::runtime_error("no connection to the store: " + problem->text);
  thread_ = start_thread("fc-watch", [this] { loop(); });
}

void Watch::stop() {
  std::lock_guard<std::mutex> one_at_a_time(stop_mutex_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  courier_.stop();
  if (thread_.joinable()) thread_.join();
}

std::string Watch::explain(const std::string& failure) {
  // Enough for a roll call under way and one more. A watch that is stuck must not hold back the error.
  const Seconds timeout = 2 * roll_call_timeout_;
  std::unique_lock<std::mutex> lock(mutex_);
  if (!failure_) failure_ = failure;
  changed_.notify_all();
  changed_.wait_for(lock, timeout, [this] { return stopping_ || explanation_; });
  return explanation_.value_or("");
}

bool Watch::sleep(Seconds duration) {
  std::unique_lock<std::mutex> lock(mutex_);
  return !changed_.wait_for(lock, duration, [this] { return stopping_; });
}

void Watch::loop() {
  try {
    device_->enter_watching_thread();
  } catch (const std::exception&) {  // the watch works without it: the call only avoids disturbing other threads
  }
  try {
    RankState began = answer();
    began.own_ends = connections().own_ends;
    send([text = encode(began), rank = options_.rank](c10d::Store& store) { store.set(began_key(rank), text); });
  } catch (const std::exception&) {  // reports then do not tell whether bytes of this rank arrive
  }
  for (;;) {
    bool must_explain;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const auto failed = [this] { return failure_ && !explanation_; };
      const auto began = Clock::now();
      changed_.wait_for(lock, poll_, [&] { return stopping_ || failed(); });
      if (stopping_) return;
      if (Clock::now() - began > 2 * poll_ + kPause) awake_since_ = Clock::now();
      must_explain = failed();
    }
    try {
      answer_others();
      must_explain ? explain_failure() : report_stall();
      warn_of_loss();
    } catch (const std::exception& error) {
      // Nothing above is expected to throw. If it does, only the watch ends.
      std::lock_guard<std::mutex> lock(mutex_);
      explanation_ = std::string("The other ranks could not be asked: ") + error.what();
      changed_.notify_all();
      return;
    }
  }
}

RankState Watch::state() const {
  std::optional<std::string> failure;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    failure = failure_;
  }
  return state_of(board_->view(Clock::now()), failure);
}

RankState Watch::answer() {
  const auto began = Clock::now();
  const Connections before = connections();
  if (!before.unsent.empty()) sleep(kMoment);
  Connections now = connections();
  const double passed_s = Seconds(Clock::now() - began).count();
  RankState answer = state();
  answer.own = std::move(now.own);
  answer.unacked_ms = longest_unacked(now);
  if (!answer.waits_for_others()) return answer;
  std::vector<std::pair<int64_t, std::string>> held;
  for (const auto& [end, nbytes] : now.unsent) {
    const auto earlier = before.unsent.find(end);
    if (earlier != before.unsent.end()) held.emplace_back(std::min(nbytes, earlier->second), end);
  }
  std::sort(held.rbegin(), held.rend());
  for (size_t i = 0; i < std::min(held.size(), kMaxListed); ++i) {
    const auto& [nbytes, end] = held[i];
    answer.unsent[end] = clamped_nbytes(static_cast<double>(nbytes));
    // Negative if one of several connections to that address was closed in between.
    const auto arrived = static_cast<double>(now.arrived.at(end) - before.arrived.at(end));
    answer.per_s[end] = clamped_nbytes(arrived / passed_s);
  }
  return answer;
}

OwnWait Watch::own_wait(const Board::View& view) const {
  OwnWait own;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    own.has_failed = failure_.has_value();
  }
  own.has_job = view.label != nullptr;
  if (!own.has_job) return own;
  const auto seconds_since = [now = Clock::now(), this](Clock::time_point then) {
    return Seconds(now - std::max(then, awake_since_)).count();
  };
  own.stalled_s = seconds_since(view.moved);
  own.under_way_s = seconds_since(view.oldest_since);
  return own;
}

void Watch::answer_others() {
  while (!courier_.loss()) {
    const int64_t number = next_call_;
    struct Seen {
      std::optional<std::string> opening;
      bool is_over = false;
    };
    auto seen = std::make_shared<Seen>();
    const auto problem = send([=](c10d::Store& store) {
      if (!store.check({call_key(number)})) return;
      seen->is_over = store.check({report_key(number)});
      seen->opening = store.get_to_str(call_key(number));
    });
    if (problem || !seen->opening) return;
    const std::string own = encode(answer());
    send([=, rank = options_.rank](c10d::Store& store) { store.set(answer_key(number, rank), own); });
    ++next_call_;
    const Call call{number, decode_if_readable<Opening>(*seen->opening)};
    // A call that is over says nothing about the present: this rank itself may have been stopped during it.
    if (seen->is_over || !call.opening) continue;
    const Board::View view = board_->view(Clock::now());
    const OwnWait wait = own_wait(view);
    const Concern concern = concern_of(*call.opening, wait, options_.stall_after_s);
    if (concern == Concern::kNone) continue;
    const bool is_stall = concern == Concern::kStall;
    const bool is_new = is_stall || wait.under_way_s >= kSlower * crawled_s_;
    std::optional<Finding> finding = take_part(call);
    if (!finding) return;
    keep(std::move(*finding), view, is_stall, wait.under_way_s);
    if (!wait.has_failed && is_new && reported_job_ != view.num_ended) warn_of_stall();
  }
}

void Watch::warn_of_loss() {
  const std::optional<std::string> loss = courier_.loss();
  if (!loss || has_warned_of_loss_) return;
  has_warned_of_loss_ = true;
  {
    // After a failure the error's text has already said what is known.
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_ || failure_) return;
  }
  TORCH_WARN("fusedcomm: rank ", options_.rank, " of ", options_.world_size,
             " has lost the store and could not reconnect to it (", *loss,
             "). From now on this rank does not answer roll calls, and it reports its own stalls without the other "
             "ranks' states. Training goes on. The store is ",
             options_.store_text);
}

void Watch::report_stall() {
  // The device is asked only about a job that has not moved for stall_after.
  const auto stall_after = std::chrono::duration_cast<Clock::duration>(Seconds(options_.stall_after_s));
  const Board::View view = board_->view(Clock::now() - stall_after);
  if (!view.label || reported_job_ == view.num_ended) return;
  const OwnWait wait = own_wait(view);
  const bool is_stall = wait.stalled_s >= options_.stall_after_s;
  // A job that has not moved for half of stall_after may be stalling, so it is not reported as a crawl. A job on
  // streams last moved when it was enqueued, so it is never reported as a crawl.
  const bool is_crawl = view.at != Board::View::At::kStream && wait.stalled_s < options_.stall_after_s / 2 &&
                        wait.under_way_s >= std::max(options_.stall_after_s, kSlower * crawled_s_);
  const bool is_cut = !is_stall && cut_job_ != view.num_ended && wait.stalled_s >= kCutS && sees_a_cut();
  if (!is_stall && !is_crawl && !is_cut) return;
  Opening why;
  if (is_stall || is_cut) {
    why.why = is_stall ? Opening::Why::kStalled : Opening::Why::kCut;
    why.stalled_s = wait.stalled_s;
  } else {
    why.why = Opening::Why::kCrawling;
    why.under_way_s = wait.under_way_s;
    why.step = view.step;
    why.label = view.label->text;
  }
  std::optional<Finding> finding = call_roll(std::move(why), silence_timeout_);
  if (!finding) return;
  keep(std::move(*finding), view, is_stall || is_cut, wait.under_way_s);
  warn_of_stall();
  if (is_cut && !known_->finding.store_is_silent) {
    cut_job_ = view.num_ended;
    // The link may recover. If the job then still does not move, that has another reason, and is reported.
    if (!known_->finding.is_conclusive) reported_job_ = -1;
  }
}

bool Watch::sees_a_cut() {
  const Connections found = connections();
  return std::any_of(found.unacked_s.begin(), found.unacked_s.end(),
                     [](const auto& end) { return end.second >= kCutS - kMaxPollS; });
}

void Watch::warn_of_stall() {
  if (!known_->is_stall) crawled_s_ = std::max({crawled_s_, known_->under_way_s, options_.stall_after_s});
  if (!known_->finding.store_is_silent) {
    // A job that crawls because a rank is lost will stall as well. Reporting it again would add nothing.
    if (known_->is_stall || known_->finding.is_conclusive) reported_job_ = known_->job;
  } else if (std::exchange(silent_job_, known_->job) == known_->job) {
    // A silent store is reported once for each job. When the store answers again, the next poll finds out more.
    return;
  }
  if (!names_the_same()) TORCH_WARN(known_->finding.text);
}

bool Watch::names_the_same() {
  const std::set<std::string>& slow = known_->finding.slow;
  if (slow.empty()) return false;
  if (known_->job >= named_until_) {
    named_.clear();
    named_until_ = known_->num_handed;
  }
  const size_t num_named = named_.size();
  named_.insert(slow.begin(), slow.end());
  return named_.size() == num_named;
}

void Watch::explain_failure() {
  const Board::View view = board_->view(Clock::now());
  // A conclusive report on this job's stall explains its failure. A new roll call would also miss the ranks that have
  // left since. A report on a crawl does not explain the failure, because the job has moved since.
  const bool is_explained =
      known_ && known_->finding.is_conclusive && known_->is_stall && known_->job == view.num_ended;
  if (!is_explained) {
    Opening why;
    why.why = Opening::Why::kFailed;
    why.failure = *state().failure;
    const Seconds silence_timeout = silent_job_ == view.num_ended ? Seconds{0} : silence_timeout_;
    std::optional<Finding> finding = call_roll(std::move(why), silence_timeout);
    if (!finding) return;
    keep(std::move(*finding), view, /*is_stall=*/true, own_wait(view).under_way_s);
  }
  std::string text = known_->finding.text;
  const double age_s = Seconds(Clock::now() - known_->when).count();
  if (age_s > answer_timeout_.count()) text += "\n  (" + seconds_text(age_s) + " before this error)";
  std::lock_guard<std::mutex> lock(mutex_);
  explanation_ = std::move(text);
  changed_.notify_all();
}

void Watch::keep(Finding finding, const Board::View& view, bool is_stall, double under_way_s) {
  known_ = {std::move(finding), view.num_ended, view.num_handed, is_stall, under_way_s, Clock::now()};
}

}  // namespace fusedcomm
