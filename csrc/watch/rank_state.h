// What one rank has under way, in the fields by which the others decide who holds them up.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "engine/board.h"
#include "watch/fields.h"

namespace fusedcomm {

// Limits of the fields: far above what there is, and low enough that no sum over all ranks overflows.
inline constexpr int64_t kMaxCount = int64_t{1} << 53;
inline constexpr int64_t kMaxConnectionNbytes = int64_t{1} << 40;

struct RankState {
  static constexpr const char* kKind = "state";

  enum class Job : uint8_t {
    kNone,
    kBucket,
    kCall  // a collective call between steps, such as state_dict()
  };

  // Every rank hands over the same jobs in the same order, so these counts tell which rank is behind.
  int64_t num_handed = 0;
  int64_t num_ended = 0;
  int64_t last_step = -1;  // the last step that has ended; -1: none
  double idle_s = 0;       // since the last job ended or, if none has, since this rank attached

  // The oldest job under way.
  Job job = Job::kNone;
  std::string label;  // for people; compared as a whole, never searched
  int64_t step = 0;
  int64_t num_chunks = 0;
  double waits_s = 0;  // since the hand-over

  // Where that job is; stage, chunk and stage_s are set for At::kStage alone.
  Board::View::At at = Board::View::At::kQueue;
  Stage stage = Stage::kPack;
  int64_t chunk = 0;
  double stage_s = 0;  // since the stage began

  // This rank's TCP connections (connections.h): its own addresses. While it waits for others, by the other end's
  // address: bytes that have not left, and bytes that arrive there in a second.
  std::set<std::string> own;
  std::map<std::string, int64_t> unsent, per_s;

  std::optional<std::string> failure;  // empty: none

  // In a stage of its own, for which it needs no other rank.
  bool is_at_work() const;
  // Work on streams counts as waiting: it may be either, and the host cannot tell.
  bool waits_for_others() const;

  template <typename Archive, typename Self>
  static void fields(Archive& archive, Self& self) {
    archive("num_handed", self.num_handed, Limits{0, kMaxCount});
    archive("num_ended", self.num_ended, Limits{0, kMaxCount});
    archive("last_step", self.last_step, Limits{-1, kMaxCount});
    archive("idle_s", self.idle_s);
    archive("job", self.job, Job::kCall);
    archive("label", self.label);
    archive("step", self.step, Limits{0, kMaxCount});
    archive("num_chunks", self.num_chunks, Limits{0, kMaxCount});
    archive("waits_s", self.waits_s);
    archive("at", self.at, Board::View::At::kStream);
    archive("stage", self.stage, static_cast<Stage>(kNumStages - 1));
    archive("chunk", self.chunk, Limits{0, kMaxCount});
    archive("stage_s", self.stage_s);
    archive("own", self.own);
    archive("unsent", self.unsent, Limits{0, kMaxConnectionNbytes});
    archive("per_s", self.per_s, Limits{0, kMaxConnectionNbytes});
    archive("failure", self.failure);
  }
};

// Without connections. A long failure is cut to its beginning.
RankState state_of(const Board::View& view, const std::optional<std::string>& failure);

}  // namespace fusedcomm
