// The buckets of the pass under way and the means of the pass before it, where the configuration keeps messages: what
// is needed to finish a pass in which ranks are lost.
//
//   a survivor has all means    the others take from it those that they miss: complete()
//   none has                    the buckets are summed again over the survivors, from the codes: packed()
//
// Either way no backward pass is repeated. On a device all of this is enqueued on the calling thread's stream, which
// must come after all that the stopped engine has enqueued: see Synchronizer::wait_until_idle().
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <mutex>
#include <vector>

#include "engine/engine.h"
#include "gradients/bucket.h"
#include "gradients/bucket_future.h"
#include "gradients/bucket_record.h"

namespace fusedcomm {

// A bucket that has been handed over in the pass under way.
struct KeptBucket {
  Bucket bucket;
  BucketRecordPtr record;
  std::shared_ptr<BucketJob> job;
  FuturePtr future;

  // Whether its means have arrived and been unpacked.
  bool is_done() const { return future->completed() && !future->hasError(); }
};

class KeptPass {
 public:
  explicit KeptPass(c10::Device device) : device_(device) {}

  // Call it for each bucket, before its job is submitted. A bucket of index 0 begins a new pass.
  void note(KeptBucket bucket);
  // Call it when all buckets of the pass are done: their means stay until those of another pass have ended.
  void end();

  // The buckets of the pass under way whose means this rank lacks; on a device all of them, because it is not known
  // which ended before collectives were aborted. Call it when the engine has stopped.
  std::vector<size_t> missing() const;
  // Takes the encoded means of a bucket of the pass under way from another rank, and unpacks them. means: uint8
  // [nbytes of KeptMessages]. Call it when the engine has stopped. Throws ValueError for another size.
  void complete(Engine& engine, size_t index, const at::Tensor& means);
  // The encoded means of a bucket of the pass that has ended last, as complete() takes them; shares their memory.
  // Throws IndexError if there is no such bucket.
  at::Tensor means(size_t index) const;

  // Packs what the stopped engine has not packed, takes second residuals back to where they were before the pass, and
  // returns the buckets, each with `packed` set: to be handed over to another engine, in this order.
  std::vector<Bucket> packed(Engine& engine);

 private:
  const c10::Device device_;
  mutable std::mutex mutex_;  // guards the members below
  std::vector<KeptBucket> under_way_;
  std::vector<std::shared_ptr<const KeptMessages>> ended_;  // with the means
};

// Writes the codes of `from` to `to`, in the layout of `plan`. engine: of `to`.
void move_codes(const BucketRecord& from, const BucketPlan& plan, Engine& engine, c10::Device device, KeptMessages* to);

}  // namespace fusedcomm
