// What ranks tell each other when one of them waits for too long or has failed, and what is concluded from it: text in,
// text out. The store and the threads are in watch.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "engine/board.h"

namespace fusedcomm {

// Of each kind so many ranks are spelled out; a thousand that wait for one need no thousand lines.
constexpr size_t kMaxListed = 8;

// What a rank answers.
struct RankState {
  // Of the board; every rank hands over the same jobs in the same order.
  int64_t num_handed = 0;
  int64_t num_ended = 0;
  int64_t last_step = -1;  // the last that has ended; -1: none
  double idle_s = 0;       // since its last bucket ended or, if none has, since it attached

  // Of the oldest bucket under way; `bucket` is empty if there is none.
  std::string bucket;
  int64_t step = 0;
  std::string stage;  // empty: waits for a lane
  int64_t chunk = 0;
  int64_t num_chunks = 0;  // 0: no bucket but a collective call between steps, named by `bucket`
  bool on_wire = false;    // in the stage it waits for other ranks
  double waits_s = 0;      // since the hand-over
  double stage_s = 0;      // since the stage began

  // Of its TCP connections (connections.h): its own addresses and, if it waits for others, by the other end's address,
  // the bytes that have not left, and how many arrive there in a second meanwhile.
  std::set<std::string> own;
  std::map<std::string, int64_t> unsent, per_s;

  std::string failure;  // empty: none

  // One field a line, name first: what is not known to the reader is passed over.
  std::string to_text() const;
  static RankState from_text(const std::string& text);
};

RankState state_of(const Board::View& view, const std::string& failure);

struct RollCall {
  int64_t number = 0;
  int world_size = 0;
  std::string opened;  // by whom and why
  double waited_s = 0;
  std::map<int, RankState> answers;
  std::map<int, double> late_s;       // of these, those that took longer than a rank that runs does
  std::map<int, std::string> absent;  // by rank, where and what its process is, as far as it said
  std::vector<int> unread;            // may have answered: the store did not get round to them
  std::string store_problem;          // empty: the store answered to the end
  bool store_is_silent = false;       // its problem is that it has not answered yet
};

// The answers as they are read, some at a time: neither a slow store nor a thousand ranks must make anybody look absent
// or late. Times are seconds since the call was opened. For several threads, since whoever reads may be late.
class Answers {
 public:
  explicit Answers(int world_size) : of_ranks_(static_cast<size_t>(world_size)) {}

  // Asks for those that are not there yet, from where the last reading stopped; stops at `until_s`, but asks for one at
  // least. `fetch`: a rank's answer, empty if there is none. True: this reading has come to the last rank.
  bool read(const std::function<std::string(int rank)>& fetch, const std::function<double()>& now_s, double until_s);
  // Every rank has answered, or had not yet when it was asked for at `deadline_s` or later.
  bool are_known(double deadline_s) const;
  // A rank is late if it had not answered yet when it was asked for at `late_s` or later. Absent ones have no names.
  void put_into(RollCall* call, double late_s, double deadline_s) const;

 private:
  struct Answer {
    std::string text;  // empty: none
    double read_s = 0;
    double missed_s = -1;  // asked for the last time in vain
  };
  mutable std::mutex mutex_;
  std::vector<Answer> of_ranks_;
  size_t next_ = 0;
};

// What is known then; the first line is by itself.
struct Finding {
  bool is_conclusive = false;  // names a rank that is missing or has failed, and not only slow ones, and knows of all
  std::string text;
  bool store_is_silent = false;  // so that is not all there is to find
};
Finding conclude(const RollCall& call);

// "rank 2", "ranks 0, 1 and 5 more".
std::string ranks_text(const std::vector<int>& ranks);
std::string seconds_text(double seconds);
// "the all-to-all of chunk 1/4 of bucket 0 (…)": of a state with a bucket. Of one with a call "the others in …".
std::string under_way_text(const RankState& state);

}  // namespace fusedcomm
