// Makes the engine's job of a bucket, of an all-reduce as of a reduce-scatter: its slices in memory, its residuals, and
// who counts its non-finite elements.
#pragma once

#include <memory>

#include "gradients/bucket_future.h"
#include "gradients/bucket_record.h"

namespace fusedcomm {

// The job completes `future`. If the codec does not carry the bucket, the job has only a label; see passthrough.h.
std::shared_ptr<BucketJob> make_job(const Bucket& bucket, const BucketRecordPtr& record, const Engine& engine,
                                    const FuturePtr& future);

}  // namespace fusedcomm
