// Makes the engine's job of a bucket, of an all-reduce as of a reduce-scatter: its slices in memory, its residuals, its
// noise, and who counts its non-finite elements.
#pragma once

#include <memory>

#include "gradients/bucket_future.h"
#include "gradients/bucket_record.h"

namespace fusedcomm {

// step: selects the noise of stochastic rounding. place: of this rank among hosts. The job completes `future`. Of a
// bucket that the codec does not carry the job has only a label; see passthrough.h.
std::shared_ptr<BucketJob> make_job(const Bucket& bucket, const BucketRecordPtr& record, int64_t step,
                                    const Engine& engine, const Place& place, const FuturePtr& future);

}  // namespace fusedcomm
