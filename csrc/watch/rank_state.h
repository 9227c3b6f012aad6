// A rank's answer to a roll call: what it has under way. From these fields the others decide which rank holds them up.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "engine/board.h"
#include "watch/fields.h"

namespace fusedcomm {

// Limit of counts, steps and ranks: far above any real value.
inline constexpr int64_t kMaxCount = int64_t{1} << 53;
// Limit of the bytes, or bytes per second, to one address: far above any real value, and low enough that no sum over
// all ranks overflows.
inline constexpr int64_t kMaxConnectionNbytes = int64_t{1} << 40;

struct RankState {
  static constexpr const char* kKind = "state";

  enum class Job : uint8_t {
    kNone,  // no job is under way
    kBucket,
    kCall  // a collective call between steps, such as state_dict()
  };

  // Every rank hands over the same jobs in the same order, so these counts tell which rank is behind.
  int64_t num_handed = 0;
  int64_t num_ended = 0;
  int64_t last_step = -1;  // the last step that has ended; -1: none
  double idle_s = 0;       // seconds since the last job ended, or since this rank attached if no job has ended

  // The oldest job under way.
  Job job = Job::kNone;
  std::string label;  // for people; code compares whole labels and never searches in them
  int64_t step = 0;
  int64_t num_chunks = 0;
  double waits_s = 0;  // seconds since the hand-over

  // Where that job is. stage, chunk and stage_s are set only for At::kStage.
  Board::View::At at = Board::View::At::kQueue;
  Stage stage = Stage::kPack;
  int64_t chunk = 0;
  double stage_s = 0;  // seconds since the stage began

  // The local addresses of this rank's TCP connections (connections.h).
  std::set<std::string> own;
  // The same connections' ends, with ports. Only in what a rank says when its watch begins.
  std::set<std::string> own_ends;
  // By remote address: unsent bytes, and bytes per second that arrive there. Set only while this rank waits for others.
  std::map<std::string, int64_t> unsent, per_s;

  // By remote address: milliseconds for which nothing that was sent there has been acknowledged (connections.h).
  std::map<std::string, int64_t> unacked_ms;

  std::optional<std::string> failure;  // nothing if this rank has not failed

  // Whether the job is in a stage that needs no other rank: pack, reduce or unpack.
  bool is_at_work() const;
  // Whether the job is on the wire or on streams. Work on streams counts as waiting, because the host cannot tell.
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
    archive("own_ends", self.own_ends);
    archive("unsent", self.unsent, Limits{0, kMaxConnectionNbytes});
    archive("per_s", self.per_s, Limits{0, kMaxConnectionNbytes});
    archive("unacked_ms", self.unacked_ms, Limits{0, kMaxCount});
    archive("failure", self.failure);
  }
};

// Returns the state without the fields of connections. A long failure is cut to its beginning.
RankState state_of(const Board::View& view, const std::optional<std::string>& failure);

}  // namespace fusedcomm
