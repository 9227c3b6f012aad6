#include "watch/watch.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <utility>
#include <vector>

#include "watch/connections.h"

namespace fusedcomm {
namespace {

using Seconds = std::chrono::duration<double>;

// All watches together ask the store for so much a second at most.
constexpr double kMaxPollsPerSecond = 500;
constexpr double kMaxPollS = 1;

// A wait that takes so much longer than asked for says that the process was stopped, or the machine.
constexpr Seconds kPause{0.5};

// What a connection holds before and after that waits for the line, or for the other end: 1 Gbit/s are 25 MB in it.
constexpr Seconds kMoment{0.2};

// Of buckets that move only one that takes so much longer than any reported before is reported, too: on a link that is
// as slow as that every bucket is.
constexpr double kSlower = 2;

// A roll call that was opened because of a failure, and not of a stall, says so.
constexpr const char* kFailed = "after a failure: ";
// Or of a bucket that moves, but slowly.
constexpr const char* kMoves = " moves, but has been under way for ";

double poll_s(const WatchOptions& options) {
  const double wanted = std::min({kMaxPollS, options.stall_after_s / 4, options.timeout_s / 12});
  return std::max(options.world_size / kMaxPollsPerSecond, wanted);
}

// Every rank has looked so often by then, whatever its stall_after.
double after_looks_s(WatchOptions options, int num_looks) {
  options.stall_after_s = options.timeout_s;
  return num_looks * poll_s(options) + std::min(1.0, options.timeout_s / 6);
}

std::string answer_key(const std::string& number, int rank) { return "answer/" + number + "/" + std::to_string(rank); }

std::string opened_by(int rank) { return "opened by rank " + std::to_string(rank) + ", "; }

constexpr const char* kConclusive = "conclusive\n";
constexpr const char* kInconclusive = "inconclusive\n";

std::string to_text(const Finding& finding) {
  return (finding.is_conclusive ? kConclusive : kInconclusive) + finding.text;
}

Finding finding_from(const std::string& text) {
  const size_t end = text.find('\n') + 1;
  return {text.substr(0, end) == kConclusive, text.substr(end), false};
}

}  // namespace

Watch::Watch(std::shared_ptr<Board> board, std::shared_ptr<const Device> device, const StorePtr& store,
             WatchOptions options)
    : board_(std::move(board)),
      device_(std::move(device)),
      options_(std::move(options)),
      poll_(poll_s(options_)),
      look_(poll_ / 5),
      answer_(after_looks_s(options_, 2)),
      late_(after_looks_s(options_, 1)),
      limit_(1 + options_.world_size / 1e3),
      patience_(2 * limit_),
      roll_call_(answer_ + 6 * limit_),
      courier_(store->clone()),
      thread_([this] { loop(); }) {
#if defined(__linux__)
  pthread_setname_np(thread_.native_handle(), "fc-watch");
#endif
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
  // Enough for a roll call, and for another that is under way. A watch that has got stuck must not keep the error back.
  const Seconds patience = 2 * roll_call_;
  std::unique_lock<std::mutex> lock(mutex_);
  if (failure_.empty()) failure_ = failure;
  changed_.notify_all();
  changed_.wait_for(lock, patience, [this] { return stopping_ || explanation_; });
  return explanation_.value_or("");
}

bool Watch::sleep(Seconds duration) {
  std::unique_lock<std::mutex> lock(mutex_);
  return !changed_.wait_for(lock, duration, [this] { return stopping_; });
}

void Watch::loop() {
  try {
    device_->enter_watching_thread();
  } catch (const std::exception&) {  // it is asked nevertheless: this is for the sake of others
  }
  for (;;) {
    bool must_explain;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const auto failed = [this] { return !failure_.empty() && !explanation_; };
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
      // Nothing above is expected to throw; a watch that fails must take nothing with it.
      std::lock_guard<std::mutex> lock(mutex_);
      explanation_ = std::string("The other ranks could not be asked: ") + error.what();
      changed_.notify_all();
      return;
    }
  }
}

RankState Watch::state() const {
  std::string failure;
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
  if (!answer.on_wire) return answer;
  std::vector<std::pair<int64_t, std::string>> held;
  for (const auto& [end, nbytes] : now.unsent) {
    const auto earlier = before.unsent.find(end);
    if (earlier != before.unsent.end()) held.emplace_back(std::min(nbytes, earlier->second), end);
  }
  std::sort(held.rbegin(), held.rend());
  for (size_t i = 0; i < std::min(held.size(), kMaxListed); ++i) {
    const auto& [nbytes, end] = held[i];
    answer.unsent[end] = nbytes;
    const auto arrived = static_cast<double>(now.arrived.at(end) - before.arrived.at(end));
    answer.per_s[end] = static_cast<int64_t>(arrived / passed_s);
  }
  return answer;
}

double Watch::stalled_s(const Board::View& view) const {
  return view.label ? Seconds(Clock::now() - std::max(view.moved, awake_since_)).count() : 0;
}

double Watch::under_way_s(const Board::View& view) const {
  return view.label ? Seconds(Clock::now() - std::max(view.oldest_since, awake_since_)).count() : 0;
}

void Watch::answer_others() {
  while (courier_.loss().empty()) {
    const std::string number = std::to_string(next_call_);
    struct Seen {
      std::string opened;
      bool is_over = false;
    };
    auto seen = std::make_shared<Seen>();
    const std::string problem = send([=](c10d::Store& store) {
      if (!store.check({"call/" + number})) return;
      seen->is_over = store.check({"report/" + number});
      seen->opened = store.get_to_str("call/" + number);
    });
    if (!problem.empty() || seen->opened.empty()) return;
    const std::string own = answer().to_text();
    send([=, rank = options_.rank](c10d::Store& store) { store.set(answer_key(number, rank), own); });
    ++next_call_;
    const Board::View view = board_->view(Clock::now());
    bool has_failed;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      has_failed = !failure_.empty();
    }
    // One that is over was not about now: this rank was stopped itself, say.
    const bool was_failure = seen->opened.find(kFailed) != std::string::npos;
    const bool is_crawl = !was_failure && seen->opened.find(kMoves) != std::string::npos;
    const double waited_s = under_way_s(view), half_s = options_.stall_after_s / 2;
    const bool waits = view.label && (was_failure || (is_crawl ? waited_s : stalled_s(view)) > half_s);
    if (seen->is_over || !(has_failed || waits)) continue;
    const bool is_stall = !is_crawl || stalled_s(view) >= half_s;
    const bool is_new = is_stall || waited_s >= kSlower * crawled_s_;
    keep(take_part(number, seen->opened), view, is_stall, waited_s);
    if (!has_failed && is_new && reported_job_ != view.num_ended) warn_of_stall();
  }
}

void Watch::warn_of_loss() {
  const std::string loss = courier_.loss();
  if (loss.empty() || has_warned_of_loss_) return;
  has_warned_of_loss_ = true;
  {
    // After a failure the error has said what there is to say.
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_ || !failure_.empty()) return;
  }
  TORCH_WARN("fusedcomm: rank ", options_.rank, " of ", options_.world_size,
             " has lost the store, and could not connect to it again (", loss,
             "): from now on it does not answer when others call the roll, and a stall of its own is reported without "
             "the other ranks. Training goes on. It is ",
             options_.store_text);
}

void Watch::report_stall() {
  // A stream is asked only about what should have ended long ago.
  const auto stall_after = std::chrono::duration_cast<Clock::duration>(Seconds(options_.stall_after_s));
  const Board::View view = board_->view(Clock::now() - stall_after);
  if (!view.label || reported_job_ == view.num_ended) return;
  const double waited_s = under_way_s(view);
  const bool is_stall = stalled_s(view) >= options_.stall_after_s;
  // What has not moved for a while may be a stall before long. On streams it has moved when it was ordered, and no
  // more.
  const bool is_crawl = view.at != Board::View::At::kStream && stalled_s(view) < options_.stall_after_s / 2 &&
                        waited_s >= std::max(options_.stall_after_s, kSlower * crawled_s_);
  if (!is_stall && !is_crawl) return;
  const std::string why = is_stall ? "where nothing has moved for " + seconds_text(stalled_s(view))
                                   : "where " + view.label->text + " of step " + std::to_string(view.step) + kMoves +
                                         seconds_text(waited_s);
  keep(call_roll(why, patience_), view, is_stall, waited_s);
  warn_of_stall();
}

void Watch::warn_of_stall() {
  if (!known_->is_stall) crawled_s_ = std::max({crawled_s_, known_->under_way_s, options_.stall_after_s});
  if (!known_->finding.store_is_silent) {
    // What has been found to be lost will stall as well.
    if (known_->is_stall || known_->finding.is_conclusive) reported_job_ = known_->job;
  } else if (std::exchange(silent_job_, known_->job) == known_->job) {
    // Said once for a job; once the store answers, the next look finds out for whom this rank waits.
    return;
  }
  // Nothing has been found if the watch was stopped meanwhile.
  if (!known_->finding.text.empty()) TORCH_WARN(known_->finding.text);
}

void Watch::explain_failure() {
  const Board::View view = board_->view(Clock::now());
  // A stall that ends in a failure has been explained already, and who is asked later has also lost those who left.
  // But one that moved has been under way since.
  const bool is_explained = known_ && known_->finding.is_conclusive && known_->is_stall;
  if (!is_explained || known_->job != view.num_ended) {
    const Seconds patience = silent_job_ == view.num_ended ? Seconds{0} : patience_;
    keep(call_roll(kFailed + state().failure, patience), view, /*is_stall=*/true, under_way_s(view));
  }
  std::string text = known_->finding.text;
  const double age_s = Seconds(Clock::now() - known_->when).count();
  if (age_s > answer_.count()) text += "\n  (" + seconds_text(age_s) + " before this error)";
  std::lock_guard<std::mutex> lock(mutex_);
  explanation_ = std::move(text);
  changed_.notify_all();
}

void Watch::keep(Finding finding, const Board::View& view, bool is_stall, double under_way_s) {
  known_ = {std::move(finding), view.num_ended, is_stall, under_way_s, Clock::now()};
}

Finding Watch::call_roll(const std::string& why, Seconds patience) {
  const std::string number = std::to_string(next_call_);
  const std::string own = opened_by(options_.rank) + why;
  const RankState asked = answer();
  const std::string text = asked.to_text();
  auto opened = std::make_shared<std::string>();
  const auto open = [=, rank = options_.rank](c10d::Store& store) {
    *opened = store.compareSet("call/" + number, "", own);
    store.set(answer_key(number, rank), text);
  };
  std::string problem = send(open);
  for (const auto deadline = Clock::now() + patience; is_silence(problem) && Clock::now() < deadline;) {
    if (!sleep(look_)) return {};
    if (state().failure != asked.failure) break;  // there is an error to explain by now
    problem = send(open);
  }
  if (!problem.empty()) return without_store(problem, why);
  ++next_call_;
  return take_part(number, *opened);
}

Finding Watch::take_part(const std::string& number, const std::string& opened) {
  if (opened.rfind(opened_by(options_.rank), 0) != 0) return wait_for_report(number, opened);
  const Finding finding = collect(number, opened);
  send([=](c10d::Store& store) { store.set("report/" + number, to_text(finding)); });
  return finding;
}

bool Watch::is_silence(const std::string& problem) const { return !problem.empty() && !courier_.has_failed(); }

Finding Watch::wait_for_report(const std::string& number, const std::string& opened) {
  const auto deadline = Clock::now() + roll_call_;
  auto report = std::make_shared<std::string>();
  while (Clock::now() < deadline) {
    const std::string problem = send([=](c10d::Store& store) {
      const std::string key = "report/" + number;
      if (store.check({key})) *report = store.get_to_str(key);
    });
    if (courier_.has_failed()) break;
    if (problem.empty() && !report->empty()) return finding_from(*report);
    if (!sleep(look_)) return {};
  }
  return collect(number, opened);
}

Finding Watch::collect(const std::string& number, const std::string& opened) {
  auto answers = std::make_shared<Answers>(options_.world_size);
  const auto now_s = [started = Clock::now()] { return Seconds(Clock::now() - started).count(); };
  // Who has not answered by then is missing; what the store has not been asked for a little later stays unknown.
  const double deadline_s = answer_.count(), end_s = (answer_ + limit_).count();
  RollCall call;
  for (;;) {
    auto were_all_asked = std::make_shared<std::atomic<bool>>(false);
    call.store_problem = send([=, limit_s = limit_.count()](c10d::Store& store) {
      const auto fetch = [&](int rank) {
        const std::string key = answer_key(number, rank);
        return store.check({key}) ? store.get_to_str(key) : std::string();
      };
      *were_all_asked = answers->read(fetch, now_s, now_s() + limit_s / 2);
    });
    if (!call.store_problem.empty() || answers->are_known(deadline_s) || now_s() > end_s) break;
    if (!sleep(*were_all_asked ? look_ : Seconds{0})) return {};
  }
  if (!sleep(Seconds{0})) return {};
  call.number = std::stoll(number);
  call.world_size = options_.world_size;
  call.opened = opened;
  call.waited_s = now_s();
  answers->put_into(&call, late_.count(), deadline_s);
  call.answers[options_.rank] = answer();
  call.absent.erase(options_.rank);
  call.unread.erase(std::remove(call.unread.begin(), call.unread.end(), options_.rank), call.unread.end());
  call.store_is_silent = is_silence(call.store_problem);
  if (!call.store_problem.empty()) {
    if (call.answers.size() == 1) return without_store(call.store_problem, opened);
    call.store_problem += ". It is " + options_.store_text;
  } else {
    name_absent(&call);
  }
  return conclude(call);
}

void Watch::name_absent(RollCall* call) {
  struct Names {
    std::mutex mutex;
    std::map<int, std::string> by_rank;
  };
  auto names = std::make_shared<Names>();
  std::vector<int> ranks;
  for (const auto& [rank, unknown] : call->absent) {
    if (ranks.size() < kMaxListed) ranks.push_back(rank);
  }
  if (ranks.empty()) return;
  send([=](c10d::Store& store) {
    for (const int rank : ranks) {
      const std::string key = "who/" + std::to_string(rank);
      if (!store.check({key})) continue;
      std::string text = store.get_to_str(key);
      std::lock_guard<std::mutex> lock(names->mutex);
      names->by_rank[rank] = std::move(text);
    }
  });
  std::lock_guard<std::mutex> lock(names->mutex);
  for (const auto& [rank, text] : names->by_rank) call->absent[rank] = text;
}

Finding Watch::without_store(const std::string& problem, const std::string& why) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) return {};
  }
  const RankState own = state();
  Finding finding;
  finding.store_is_silent = is_silence(problem);
  finding.is_conclusive = !finding.store_is_silent;
  finding.text = "fusedcomm: rank " + std::to_string(options_.rank) + " of " + std::to_string(options_.world_size) +
                 " cannot call the roll (" + why + "): the store " +
                 (finding.store_is_silent ? "is silent (" : "fails (") + problem + "). It is " + options_.store_text +
                 ". Whoever hosts it is stopped, was killed, has left, or is cut off" +
                 (finding.store_is_silent ? ", or very slow" : "");
  if (!own.bucket.empty()) {
    finding.text += "\n  rank " + std::to_string(options_.rank) + " waits in step " + std::to_string(own.step) +
                    " for " + under_way_text(own) + ", handed over " + seconds_text(own.waits_s) + " ago";
  }
  return finding;
}

}  // namespace fusedcomm
