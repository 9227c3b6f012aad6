// Notices that an engine waits for too long, or has failed, and finds out for which rank: it calls the roll.
//
//   a rank waits longer than stall_after, or its bucket moves and yet takes longer, or a transfer failed
//     ──► it opens a roll call in the store ──► every rank's watch sees that within a poll and answers with what it has
//     under way ──► who has not answered in time is missing, who has not handed over what others wait for is slow
//     ──► the report goes to the store, so that all who wait say the same ──► a warning; after a failure, the error
//
// A thread of its own, in C++, since the main thread sits in the backward pass; and one more for the store, which may
// never answer (courier.h). Both end at once when the engine stops. What the watches of all p ranks ask of the store:
// one small request each per poll, p a second, from 500 ranks on 500 a second (more often only where stall_after is
// below 4 s). A roll call: about six requests a rank, two more for each answer that is read, and while it lasts up to
// five times the polls.
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
  std::string store_text;   // what the store is and who hosts it, for people
};

class Watch {
 public:
  // `store`: a prefix that only the ranks of this engine use; where each has set "who/<rank>". It is cloned.
  Watch(std::shared_ptr<Board> board, std::shared_ptr<const Device> device, const StorePtr& store,
        WatchOptions options);
  ~Watch() { stop(); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // What is known of the other ranks after this failure; empty once stopped. Waits for a roll call: as long as ranks
  // may take to answer, about 3 s, if one is missing, and at most 2 · (answer_ + 6 · limit_): 18 s, of 1,000 ranks 34
  // s, of 10,000 ranks 214 s.
  std::string explain(const std::string& failure);
  void stop();

 private:
  using Clock = Board::Clock;
  using Seconds = std::chrono::duration<double>;

  void loop();
  // Answers the roll calls that others have opened.
  void answer_others();
  // Also of a bucket that moves, but takes as long: a link that crawls.
  void report_stall();
  void explain_failure();

  RankState state() const;
  // And what its connections hold: takes a moment, since only what stays there tells.
  RankState answer();
  // For how long the oldest job has not moved, and for how long it has been the oldest.
  double stalled_s(const Board::View& view) const;
  double under_way_s(const Board::View& view) const;
  // Opens one, or takes part in the one that another rank has just opened.
  // `patience`: for a store that is silent.
  Finding call_roll(const std::string& why, Seconds patience);
  // In one that is open: collects the answers if it is this rank's own, else waits for the report.
  Finding take_part(const std::string& number, const std::string& opened);
  Finding collect(const std::string& number, const std::string& opened);
  // Asks the store who they are, as far as they will be listed.
  void name_absent(RollCall* call);
  // By another rank; collects itself if that is not in time.
  Finding wait_for_report(const std::string& number, const std::string& opened);
  Finding without_store(const std::string& problem, const std::string& why);
  // Whether what `send` returned may pass: the store has not failed, but has not answered.
  bool is_silence(const std::string& problem) const;
  // What was found concerns the job that is the oldest now.
  void keep(Finding finding, const Board::View& view, bool is_stall, double under_way_s);
  std::string send(Courier::Errand errand) { return courier_.send(std::move(errand), limit_); }
  // False when stopping.
  bool sleep(Seconds duration);
  void warn_of_stall();
  // Once, that the store is lost.
  void warn_of_loss();

  const std::shared_ptr<Board> board_;
  const std::shared_ptr<const Device> device_;
  const WatchOptions options_;
  // Between two looks at the store, for its sake longer where ranks are many; between two looks during a roll call;
  // for an answer to a roll call, and from when on one is late; for the store to do one errand, and to answer again
  // where it did not; for a whole roll call.
  const Seconds poll_, look_, answer_, late_, limit_, patience_, roll_call_;
  Courier courier_;

  mutable std::mutex mutex_;  // what follows, down to explanation_
  std::condition_variable changed_;
  bool stopping_ = false;
  std::string failure_;                     // empty: none
  std::optional<std::string> explanation_;  // of the failure

  // Of the thread alone.
  Clock::time_point awake_since_ = Clock::now();  // a process that was stopped has waited for nobody
  int64_t next_call_ = 1;
  int64_t reported_job_ = -1;  // the stall that was warned of is of this job
  double crawled_s_ = 0;       // how long one took that was warned of though it moved
  int64_t silent_job_ = -1;    // so is that the store was silent when it was to be looked into
  bool has_warned_of_loss_ = false;
  struct Known {
    Finding finding;
    int64_t job;
    bool is_stall;
    double under_way_s;  // the job, when the roll was called
    Clock::time_point when;
  };
  std::optional<Known> known_;

  std::mutex stop_mutex_;
  std::thread thread_;  // last: it uses all of it
};

}  // namespace fusedcomm
