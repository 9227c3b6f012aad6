// Shows a bucket and its stages to torch's profilers. These see only what runs on threads that know of them; the lanes'
// threads learn of the profiler of the thread that hands the bucket over.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "engine/plan.h"
#include "engine/profiler.h"
#include "gradients/bucket.h"
#include "transport/c10d_transport.h"

namespace fusedcomm {

// Returns null if no profiler watches the calling thread. A range "<backend>:all_reduce", as torch calls what DDP does
// without a hook, lasts as long as the result. On an accelerator a bucket that the backend sums has none: the backend
// records its own all-reduces, because they are enqueued by the calling thread.
std::shared_ptr<const JobProfiler> profiler_of_this_thread(const C10dTransport& transport, c10::Device device,
                                                           const BucketPlan& plan, const Gradients& gradients);

}  // namespace fusedcomm
