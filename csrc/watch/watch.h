// Notices that an engine waits for too long, or has failed, and finds out for which rank: it calls the roll.
//
//   a rank's oldest bucket has not moved for stall_after, or moves and takes longer than that, or a transfer failed
//     ──► the rank opens a roll call in the store ──► every rank's watch sees that at its next poll and answers with
//     what it has under way ──► a rank that has not answered in time is missing; one that has not handed over what the
//     others wait for is slow ──► the report goes to the store, so that all ranks that wait say the same ──► a warning
//     or, after a failure, the end of the error's text
//
// What travels are typed fields (roll_call.h); the sentences are made from them at the end (roll_call_text.h).
//
// A watch has a C++ thread of its own, since the main thread sits in the backward pass, and one more for the store,
// which may never answer (courier.h). Both end at once when the engine stops. Load of the store: one small request from
// each rank at each poll, p a second of p ranks, from 500 ranks on 500 a second in all (more only where stall_after is
// below 4 s). A roll call takes about six requests from each rank and two more for each answer that is read; while it
// lasts, ranks poll up to five times as often.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "devices/device.h"
#include "engine/board.h"
#include "watch/courier.h"
#include "watch/roll_call.h"

namespace fusedcomm {

struct WatchOptions {
  int rank = 0;
  int world_size = 1;
  double stall_after_s = 60;
  double timeout_s = 1800;  // of the process group
  std::string store_text;   // what the store is and which process hosts it, for people
};

class Watch {
 public:
  // `store`: a prefix that only the ranks of this engine use, where each has set "who/<rank>". It is cloned.
  Watch(std::shared_ptr<Board> board, std::shared_ptr<const Device> device, const StorePtr& store,
        WatchOptions options);
  ~Watch() { stop(); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // What is known of the other ranks after this failure, for people; empty once stopped. Waits for a roll call: about 3
  // s if a rank is missing, and at most 2 · (answer_deadline_ + 6 · request_timeout_), which is 18 s, of 1,000 ranks 34
  // s, of 10,000 ranks 214 s.
  std::string explain(const std::string& failure);
  void stop();

 private:
  using Clock = Board::Clock;
  using Seconds = std::chrono::duration<double>;

  // A roll call that is open.
  struct Call {
    int64_t number = 0;
    std::optional<Opening> opening;  // empty: it cannot be read
  };

  void loop();
  // Answers the roll calls that others have opened. Where this rank waits as well, it also warns.
  void answer_others();
  // Opens a roll call if this rank's oldest job stands still, or crawls.
  void report_stall();
  void explain_failure();

  RankState state() const;
  // The state with what the connections hold. Takes a moment: only bytes that stay there tell anything.
  RankState answer();
  OwnWait own_wait(const Board::View& view) const;

  // Functions that return a finding return nothing when the watch is stopping, or when the next roll call is open.

  // Opens a roll call for `why`, or takes part in one that another rank has just opened. Waits so long for a silent
  // store.
  std::optional<Finding> call_roll(Opening why, Seconds silence_timeout);
  // Collects the answers to this rank's own call; else waits for the report of the rank that opened it.
  std::optional<Finding> take_part(const Call& call);
  std::optional<Finding> collect(const Call& call);
  // Collects the answers itself if the report does not come in time.
  std::optional<Finding> wait_for_report(const Call& call);
  // `why`: of the call, for people.
  std::optional<Finding> without_store(const StoreProblem& problem, const std::string& why);
  // Asks the store who the absent ranks are, as many as will be listed.
  void name_absent(RollCall* call);

  // Remembers what was found about the job that is the oldest in `view`.
  void keep(Finding finding, const Board::View& view, bool is_stall, double under_way_s);
  void warn_of_stall();
  // Warns once if the store is lost.
  void warn_of_loss();
  std::optional<StoreProblem> send(Courier::Errand errand) {
    return courier_.send(std::move(errand), request_timeout_);
  }
  // Returns false when stopping.
  bool sleep(Seconds duration);

  const std::shared_ptr<Board> board_;
  const std::shared_ptr<const Device> device_;
  const WatchOptions options_;
  // Between two looks at the store; longer where many ranks share it.
  const Seconds poll_interval_;
  // The same while a roll call lasts.
  const Seconds roll_call_poll_;
  // A rank that has not answered a roll call by then is missing.
  const Seconds answer_deadline_;
  // An answer that takes longer is late.
  const Seconds late_after_;
  // For the store to do one errand.
  const Seconds request_timeout_;
  // For a silent store to answer again.
  const Seconds silence_timeout_;
  // For a whole roll call.
  const Seconds roll_call_timeout_;
  Courier courier_;

  mutable std::mutex mutex_;  // guards what follows, down to explanation_
  std::condition_variable changed_;
  bool stopping_ = false;
  std::optional<std::string> failure_;
  std::optional<std::string> explanation_;  // of the failure

  // Used by the thread alone.
  Clock::time_point awake_since_ = Clock::now();  // a process that was stopped has not waited meanwhile
  int64_t next_call_ = 1;
  int64_t reported_job_ = -1;  // the last job whose stall was warned of
  int64_t silent_job_ = -1;    // the last job of which it was warned that the store is silent
  double crawled_s_ = 0;       // how long a job had been under way, at most, when it was warned that it crawls
  bool has_warned_of_loss_ = false;
  struct Known {
    Finding finding;
    int64_t job;
    bool is_stall;
    double under_way_s;  // when the roll was called
    Clock::time_point when;
  };
  std::optional<Known> known_;

  std::mutex stop_mutex_;
  std::thread thread_;  // last, since it uses all other members
};

}  // namespace fusedcomm
