// The decorators of a job, each in a file of its name, but remembered(), which is in kept_pass.cpp.
// Synchronizer::decorate() has their order. What they are given must outlive the engine's lanes.
#pragma once

#include <memory>

#include "engine/profiler.h"
#include "gradients/bucket_future.h"
#include "gradients/bucket_record.h"
#include "gradients/error_monitor.h"
#include "gradients/pass_weight.h"
#include "transport/tensor_transport.h"

namespace fusedcomm {

// Shows the bucket and its stages to torch's profilers. These see only what runs on threads that know of them; the
// lanes' threads learn of the profiler of the thread that hands the bucket over. Returns null if no profiler watches
// the calling thread. A range "<backend>:all_reduce", as torch calls what DDP does without a hook, lasts as long as the
// result. On an accelerator a bucket that the backend sums has none: the backend records its own all-reduces, because
// they are enqueued by the calling thread. A reduce-scatter has only its stages.
std::shared_ptr<const JobProfiler> profiler_of_this_thread(const TensorTransport& transport, c10::Device device,
                                                           const BucketPlan& plan, const Gradients& gradients);

// Measures the error of this rank's first encoder, or nothing without memory for it: a measurement is not worth failing
// a step. place: of this rank among hosts. weight: null without weights; its `pack` is not 0.
std::unique_ptr<JobDecorator> measured(BucketJob* job, const BucketRecordPtr& record, const GradientsPtr& gradients,
                                       const Engine& engine, const Place& place, const PassWeightPtr& weight,
                                       ErrorMonitor* monitor);

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
