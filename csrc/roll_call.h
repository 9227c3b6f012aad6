// What ranks tell each other when one of them waits for too long or has failed, and what is concluded from it: text in,
// text out. The store and the threads are in watch.h.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "board.h"

namespace fusedcomm {

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
  int64_t num_chunks = 0;
  bool on_wire = false;  // in the stage it waits for other ranks
  double waits_s = 0;    // since the hand-over

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
  std::string store_problem;          // empty: the store answered to the end
};

// What is known then; the first line is by itself.
struct Finding {
  bool is_conclusive = false;  // names a rank that is missing or has failed, and not only slow ones
  std::string text;
};
Finding conclude(const RollCall& call);

// "rank 2", "ranks 0, 1 and 5 more".
std::string ranks_text(const std::vector<int>& ranks);
std::string seconds_text(double seconds);
// "the all-to-all of chunk 1/4 of bucket 0 (…)": of a state with a bucket.
std::string under_way_text(const RankState& state);

}  // namespace fusedcomm
