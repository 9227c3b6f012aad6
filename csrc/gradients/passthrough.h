// Buckets that the codec cannot carry are summed exactly, without encoding: dense buckets of another dtype (float64)
// and sparse buckets.
#pragma once

#include <ATen/ATen.h>

#include <memory>

#include "engine/engine.h"
#include "gradients/bucket.h"
#include "transport/c10d_transport.h"

namespace fusedcomm {

// The stages that replace dense gradients by their mean. One run is summed in place; separate tensors are summed in a
// copy, which is written back.
PassthroughStages dense_stages(std::shared_ptr<C10dTransport> transport, GradientsPtr gradients);

// The stages that compute the mean of sparse COO tensors. Ranks exchange how many entries each has. Then they exchange
// the entries, padded to the longest rank's, and add them in rank order. `result` receives the mean, coalesced. gloo's
// own sparse all-reduce is not used, because it was seen to corrupt the heap now and then (torch 2.11 and 2.13, two
// ranks, a few in 10⁴ calls, also under DDP's default hook).
PassthroughStages sparse_stages(std::shared_ptr<C10dTransport> transport, at::Tensor buffer,
                                std::shared_ptr<at::Tensor> result);

// Merges the stages into one transfer, for lanes whose tasks run at once (streams).
PassthroughStages on_wire_lane(PassthroughStages stages);

}  // namespace fusedcomm
