// The decorators of a job, each in a file of its name, but remembered(), which is in kept_pass.cpp.
// Synchronizer::run() has their order. What they are given must outlive the engine's lanes.
#pragma once

#include <memory>

#include "gradients/bucket_future.h"
#include "gradients/bucket_record.h"
#include "gradients/pass_weight.h"
#include "transport/tensor_transport.h"

namespace fusedcomm {

// Shows an all-reduce to the profiler of the calling thread: a range "<backend>:all_reduce", as torch calls what DDP
// does without a hook, which ends when it is released. Null if no profiler watches. On an accelerator a bucket that the
// backend sums has none: the backend records its own all-reduces, because they are enqueued by the calling thread.
std::shared_ptr<void> profiled_range(const TensorTransport& transport, c10::Device device, const BucketPlan& plan,
                                     const Gradients& gradients);

// Weighs the bucket's gradients, whose messages have heads.
std::unique_ptr<JobDecorator> weighted(BucketJob* job, const Bucket& bucket, const BucketRecord& record,
                                       const PassWeightPtr& weight, PassWeights* weights, Engine* engine);

// Remembers second residuals as they are, for a pass that begins again; see KeptPass.
std::unique_ptr<JobDecorator> remembered(const BucketRecordPtr& record);

// Submits the job of a bucket that the codec cannot carry, dense of another dtype (float64) or sparse, with stages that
// replace the gradients by their mean × the bucket's factor, exactly; weight: null without weights. One run is summed
// in place without weights; else gradients are summed in a copy, which is written back. The future receives the run,
// the first tensor, or the mean of a sparse bucket, coalesced.
void submit_passthrough(std::shared_ptr<BucketJob> job, const Bucket& bucket, const PassWeightPtr& weight,
                        PassWeights* weights, const FuturePtr& future, Engine* engine,
                        const std::shared_ptr<TensorTransport>& transport);

}  // namespace fusedcomm
