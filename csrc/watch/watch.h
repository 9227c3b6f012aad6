// Notices that an engine has waited too long or has failed, and finds the rank it waits for with a roll call:
//
//   a rank's oldest bucket has not moved for stall_after, or moves but takes longer than that, or has not moved for 5 s
//   while a host acknowledges nothing, or a transfer failed
//     ──► the rank opens a roll call in the store
//     ──► every rank's watch sees the call at its next poll and answers with what it has under way
//     ──► a rank that does not answer in time is missing; a rank that has not handed over what others wait for is slow
//     ──► the opener writes the report to the store, so that all waiting ranks say the same
//     ──► the report becomes a warning or, after a failure, the end of the error's text
//
// Ranks exchange typed fields (roll_call.h). The sentences are made from them at the end (roll_call_text.h).
//
// A watch has a C++ thread of its own, because the main thread is busy in the backward pass. A second thread does the
// requests to the store, which may never answer (courier.h). Both end at once when the engine stops.
//
// Load on the store: each rank makes one small request at each poll. With p ranks these are p requests a second, and at
// most 500 a second (more only if stall_after is below 4 s). A roll call takes about six requests from each rank, and
// two more for each answer that is read. While it lasts, ranks poll up to five times as often.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
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
  double stall_after_s = 60;  // a wait this long, in seconds, opens a roll call
  double timeout_s = 1800;    // the process group's timeout, in seconds
  int store_port = 0;         // if the store is a TCPStore
  std::string store_text;     // what the store is and which process hosts it, for people
};

class Watch {
 public:
  // `store`: has a prefix that only the ranks of this engine use, and each rank has set "who/<rank>" in it.
  // Throws if the store cannot be cloned. If that takes long, the first report says so.
  Watch(std::shared_ptr<Board> board, std::shared_ptr<const Device> device, const StorePtr& store,
        WatchOptions options);
  ~Watch() { stop(); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // Returns what is known about the other ranks after this failure, for people. Empty if the watch stops or finds
  // nothing in time. Waits for a roll call: about 3 s if a rank is missing, and at most 2 · (answer_timeout_ + 6 ·
  // request_timeout_). That is 18 s with few ranks, 34 s with 1,000 ranks and 214 s with 10,000 ranks.
  std::string explain(const std::string& failure);
  void stop();

 private:
  using Clock = Board::Clock;
  using Seconds = std::chrono::duration<double>;

  // An open roll call.
  struct Call {
    int64_t number = 0;
    std::optional<Opening> opening;  // nothing if it cannot be decoded
  };

  void loop();
  // Answers the roll calls that other ranks have opened. If this rank waits as well, it also warns.
  void answer_others();
  // Opens a roll call if this rank's oldest job stalls or crawls, or stands still while a host acknowledges nothing.
  void report_stall();
  // Whether a host has acknowledged nothing that this process sent it for about as long as the job has not moved.
  static bool sees_a_cut();
  // Sets explanation_, after a roll call unless the last report explains the failure already.
  void explain_failure();

  // Returns the state without the fields of connections.
  RankState state() const;
  // Returns the state with the fields of connections. Sleeps for kMoment if bytes are unsent, because only bytes that
  // stay unsent tell anything.
  RankState answer();
  OwnWait own_wait(const Board::View& view) const;

  // Functions that return a finding return nothing if the watch is stopping or the next roll call is open.

  // Opens a roll call for `why`, or takes part in one that another rank has just opened. If the store is silent, tries
  // again for `silence_timeout`.
  std::optional<Finding> call_roll(Opening why, Seconds silence_timeout);
  // If this rank opened the call, collects the answers and writes the report. Otherwise waits for the opener's report.
  std::optional<Finding> take_part(const Call& call);
  // Reads the answers until all are known or the deadline has passed, and draws the conclusion.
  std::optional<Finding> collect(const Call& call);
  // Waits for the opener's report. Collects the answers itself if the report does not come in time.
  std::optional<Finding> wait_for_report(const Call& call);
  // Returns the finding of a call that the store did not serve. `why`: the reason of the call, for people.
  std::optional<Finding> without_store(const StoreProblem& problem, const std::string& why);
  // Asks the store for the processes and addresses of the absent ranks, at most kMaxListed of them.
  void name_absent(RollCall* call);

  // Remembers a finding about the oldest job in `view`.
  void keep(Finding finding, const Board::View& view, bool is_stall, double under_way_s);
  // Warns with the text of the remembered finding, unless it only says again which ranks are slow.
  void warn_of_stall();
  // Whether the remembered finding only names ranks that have been named before. If not, notes whom it names.
  bool names_the_same();
  // Warns once if the courier has given up on the store.
  void warn_of_loss();
  std::optional<StoreProblem> send(Courier::Errand errand) {
    return courier_.send(std::move(errand), request_timeout_);
  }
  // Returns false when stopping.
  bool sleep(Seconds duration);

  const std::shared_ptr<Board> board_;
  const std::shared_ptr<const Device> device_;
  const WatchOptions options_;
  // Time between two polls of the store; longer if many ranks share it.
  const Seconds poll_;
  // Time between two polls during a roll call.
  const Seconds roll_call_poll_;
  // A rank that has not answered a roll call within this time is missing.
  const Seconds answer_timeout_;
  // An answer that takes longer than this is late.
  const Seconds late_after_;
  // How long one errand may take.
  const Seconds request_timeout_;
  // How long to wait until a silent store answers again.
  const Seconds silence_timeout_;
  // How long a whole roll call may take.
  const Seconds roll_call_timeout_;
  Courier courier_;

  mutable std::mutex mutex_;  // guards the members from here to explanation_
  std::condition_variable changed_;
  bool stopping_ = false;
  std::optional<std::string> failure_;
  std::optional<std::string> explanation_;  // of failure_

  // Used only by the thread.
  Clock::time_point awake_since_ = Clock::now();  // earlier waits do not count: the process was stopped
  int64_t next_call_ = 1;                         // the number of the next roll call
  int64_t reported_job_ = -1;                     // the last job for which a stall was reported
  int64_t cut_job_ = -1;                          // the last job for which a cut was reported
  int64_t silent_job_ = -1;                       // the last job for which a silent store was reported
  double crawled_s_ = 0;                          // the longest time for which a crawling job was reported
  // The slow ranks that have been named, and the number of the first job that was not yet handed over then. The jobs
  // before it wait for the same delay, which is news only once.
  std::set<std::string> named_;
  int64_t named_until_ = 0;
  bool has_warned_of_loss_ = false;
  struct Known {
    Finding finding;
    int64_t job, num_handed;
    bool is_stall;
    double under_way_s;      // of the job when the roll call was opened
    Clock::time_point when;  // the end of the roll call
  };
  std::optional<Known> known_;  // the last finding

  std::mutex stop_mutex_;
  std::thread thread_;  // declared last, because it uses all other members
};

}  // namespace fusedcomm
