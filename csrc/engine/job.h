// A bucket under way in the engine.
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

// The elements of one of a bucket's layouts, and the residuals of its encoders.
struct Payload {
  BucketSlices slices;
  // The elements that unpack writes, if it needs other tables than pack: on two levels pack's tables follow the plan's
  // host layout, and unpack's follow its layout.
  std::optional<BucketSlices> unpacked;
  Residual pack, local_reduce, reduce;
};

// The plan of a bucket that is not planned, because the codec does not carry it.
inline const BucketPlanPtr& no_plan() {
  static const BucketPlanPtr kNone = std::make_shared<const BucketPlan>();
  return kNone;
}

// The messages of a bucket that a rank keeps between two passes, so that a sum can be made again, or finished, without
// another backward pass. Each buffer has num_chunks() messages of chunk_nbytes(), one after another. Of an all-gather
// on two levels `codes` is what this rank has received of other hosts, and the rest is empty.
struct KeptMessages {
  // This rank's packed chunks. Pack overwrites them in the next pass, which begins when this rank has all means.
  std::shared_ptr<std::byte> codes;
  // The encoded means of all parts. The next pass's means overwrite them: they come from ranks that had the codes of
  // all ranks in that pass, so every rank has finished this one.
  std::shared_ptr<std::byte> means;
  // The means of the pass before, on lanes that enqueue; null on others. A transfer that is aborted on a device lets
  // all that was enqueued behind it run, which may write the means of a pass that other ranks have not begun. Therefore
  // the next pass writes here, and not over `means`.
  std::shared_ptr<std::byte> means_before;
  int64_t nbytes = 0;  // of each
};

// The head of a job's messages: what this rank puts in front of each part that it packs, and the sums of what all ranks
// have put there. Each has kHeadNbytes, on the device of the gradients.
struct MessageHead {
  std::byte* own = nullptr;
  std::byte* reduced = nullptr;  // the sum, written on the reduce lane before before_reduce
  std::byte* sum = nullptr;      // the sum, written on the unpack lane before anything else is unpacked
  // Host memory: what multiplies all that is decoded, read after `sum` has been written; empty: 1.
  std::function<double()> factor;
};

// What happens around the stages of a job beside its sum. Each function is called on the lane that it names.
class JobDecorator {
 public:
  JobDecorator() = default;
  virtual ~JobDecorator() = default;
  JobDecorator(const JobDecorator&) = delete;
  JobDecorator& operator=(const JobDecorator&) = delete;

  // Pack, before the first chunk.
  virtual void before_pack() {}
  // Reduce, before the first chunk's sums are encoded.
  virtual void before_reduce() {}
  // Unpack, after the last chunk, if has_after_unpack().
  virtual void after_unpack() {}
  virtual bool has_after_unpack() const { return false; }
  // Unpack, when the job has ended. Returns the job's error, which may be another than that given; null: none.
  virtual std::exception_ptr ended(std::exception_ptr error) { return error; }
};

// One bucket under way.
struct BucketJob {
  // Not null. It is shared with the jobs of the bucket's later passes.
  BucketPlanPtr plan = no_plan();
  // Keeps the gradients alive as long as the job. After a failure or a stop, the transport may still use their memory
  // after on_done.
  std::shared_ptr<void> owner;
  // One for each of plan->layouts. If the bucket is summed in place, all slices are in the first one's lossy list.
  std::vector<Payload> payloads;
  std::shared_ptr<const BucketLabel> label;
  bool is_last = false;  // whether it is the last bucket of its backward pass
  bool counted = true;   // whether the engine's stats count it; false for a job that is not a bucket of its own
  int64_t grad_nbytes = 0;
  // Multiplies gradients before they are encoded, beside the plan's pack_scale.
  double pack_factor = 1;
  // Has a value if the plan has heads.
  std::optional<MessageHead> head;

  float pack_scale() const { return static_cast<float>(plan->pack_scale * pack_factor); }
  float unpack_scale() const {
    return head && head->factor ? static_cast<float>(plan->unpack_scale * head->factor()) : plan->unpack_scale;
  }

  // What a profiler sees of it; null if none watches. Released before on_done is called.
  std::shared_ptr<void> profiled;

  // Null unless the configuration keeps messages.
  std::shared_ptr<KeptMessages> kept;
  bool is_packed = false;  // whether `kept` has its codes already, so that pack has nothing to do
  int64_t num_packed = 0;  // chunks that pack has written; of the pack lane

  // In the order in which they are called.
  std::vector<std::unique_ptr<JobDecorator>> decorators;
  // Calls this function of every decorator.
  void decorate(void (JobDecorator::*function)()) const {
    for (const auto& decorator : decorators) ((*decorator).*function)();
  }
  // Called for each chunk in which pack met non-finite elements, before the result overwrites the gradients; may be
  // empty.
  std::function<void(const BucketJob& job, int64_t chunk)> on_nonfinite;
  // Called exactly once, with an error, or with null for success, after the decorators.
  std::function<void(std::exception_ptr)> on_done;

  // At least 1, also for a bucket that is empty or not planned.
  int64_t num_chunks() const { return std::max<int64_t>(1, plan->num_chunks()); }

  StampPtr submitted;
  int64_t step = 0;
  int64_t number = 0;         // its number on the engine's board
  int64_t num_nonfinite = 0;  // written on the pack lane, read in on_done
};

// The stages of a bucket that the codec cannot carry. An empty stage is skipped; scatter must not be empty.
struct PassthroughStages {
  Lane::Task pack;
  Lane::Transfer scatter;
  Lane::Task reduce;
  Lane::Transfer gather;
  Lane::Task unpack;
};

}  // namespace fusedcomm
