// The frame around the body of a stage.
#pragma once

#include <cstddef>

#include "devices/device.h"
#include "engine/board.h"
#include "engine/job.h"
#include "engine/trace.h"

namespace fusedcomm {

// Opens a range for Nsight and an entry on the board, and notes the time while a trace is recorded.
class StageScope {
 public:
  StageScope(Device& device, Tracer& tracer, Board& board, const BucketJob& job, Stage stage, int64_t chunk)
      : device_(device),
        tracer_(tracer),
        job_(job),
        stage_(stage),
        chunk_(chunk),
        entry_(board.begin_stage(job.number, stage, chunk)) {
    device_.range_push(job.label->ranges[static_cast<size_t>(stage)]);
    if (tracer_.on()) begin_ = device_.stamp();
  }
  ~StageScope() { device_.range_pop(); }
  StageScope(const StageScope&) = delete;
  StageScope& operator=(const StageScope&) = delete;

  const StampPtr& began() const { return begin_; }
  size_t entry() const { return entry_; }
  void end() const {
    if (begin_) tracer_.add(job_.label, stage_, job_.step, chunk_, begin_, device_.stamp());
  }

 private:
  Device& device_;
  Tracer& tracer_;
  const BucketJob& job_;
  const Stage stage_;
  const int64_t chunk_;
  const size_t entry_;
  StampPtr begin_;
};

}  // namespace fusedcomm
