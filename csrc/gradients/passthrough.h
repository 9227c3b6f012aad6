// Buckets that the codec cannot carry travel exactly, as they are: dense ones of another dtype (float64) and sparse
// ones.
#pragma once

#include <ATen/ATen.h>

#include <memory>

#include "engine/engine.h"
#include "gradients/bucket.h"
#include "transport/c10d_transport.h"

namespace fusedcomm {

// The mean of dense gradients, in place; of those that lie apart, in a copy that is written back.
ForeignStages dense_stages(std::shared_ptr<C10dTransport> transport, GradientsPtr gradients);

// The mean of sparse COO tensors: ranks exchange how many entries each has, then the entries, padded to the longest,
// and add them in rank order. `result` receives it, coalesced. Not gloo's own sparse all-reduce: that was seen to
// corrupt the heap now and then (torch 2.11 and 2.13, two ranks, a few in 10⁴ calls, under DDP's default hook, too).
ForeignStages sparse_stages(std::shared_ptr<C10dTransport> transport, at::Tensor buffer,
                            std::shared_ptr<at::Tensor> result);

// The same stages as one transfer, for lanes whose tasks run at once (streams).
ForeignStages on_wire_lane(ForeignStages stages);

}  // namespace fusedcomm
