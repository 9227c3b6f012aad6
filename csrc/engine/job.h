// A bucket on its way through the engine.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "codec/args.h"
#include "engine/plan.h"
#include "engine/stage.h"
#include "lanes/lane.h"

namespace fusedcomm {

// The elements that travel in one of a bucket's layouts, and how they are rounded.
struct Payload {
  BucketStreams streams;
  // What unpack writes to, if it needs tables of its own: of the plan's layout, where pack's are of its host layout.
  std::optional<BucketStreams> unpacked;
  Encoding pack, local_reduce, reduce;
};

// One bucket under way.
struct BucketJob {
  BucketPlan plan;
  // Keeps the gradients alive as long as the job: after a failure or a stop, on_done comes before the transport has let
  // go of memory that it was given.
  std::shared_ptr<void> owner;
  std::vector<Payload> payloads;  // of plan.layouts; in_place: everything is in the first one's lossy stream
  std::shared_ptr<const BucketLabel> label;
  bool is_last = false;  // of this backward pass
  bool counted = true;   // in the engine's stats; not if it serves another bucket
  int64_t grad_nbytes = 0;

  // Called on the pack lane before the first chunk is packed; may be empty.
  std::function<void()> before_pack;
  // Called on the lane of the encoder that error feedback begins with (pack; on two levels the local reduce), after the
  // last chunk; may be empty.
  std::function<void()> after_first_encoder;
  // Called for each chunk in which pack met non-finite elements, while the gradients are still there; may be empty.
  std::function<void(const BucketJob& job, int64_t chunk)> on_nonfinite;
  // Called exactly once, with an error or null.
  std::function<void(std::exception_ptr)> on_done;

  // At least 1: of one that is not planned, or of nothing, too.
  int64_t num_chunks() const { return std::max<int64_t>(1, plan.num_chunks()); }

  StampPtr submitted;
  int64_t step = 0;
  int64_t number = 0;         // on the engine's board
  int64_t num_nonfinite = 0;  // written on the pack lane, read in on_done
};

// What a bucket that the codec cannot carry does at each stage; empty ones are left out.
struct ForeignStages {
  Lane::Task pack;
  Lane::Transfer scatter;
  Lane::Task reduce;
  Lane::Transfer gather;
  Lane::Task unpack;
};

}  // namespace fusedcomm
