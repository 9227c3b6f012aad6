// Collective calls of a synchronizer's ranks that are not buckets.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <string>

#include "gradients/bucket_future.h"
#include "lanes/lane.h"

namespace fusedcomm {

class Synchronizer;

// In all of these `what` names the call in reports of stalls and failures. Every rank must make the same calls, in the
// same order among its buckets.

// Returns the largest of the ranks' values. Call it between backward passes; it waits.
double max_over_ranks(const Synchronizer& synchronizer, double value, const std::string& what);
// Numbers of all ranks, perhaps still under way.
struct Gathered {
  FuturePtr future;   // completed with `of_all`; on an accelerator when all has been enqueued
  at::Tensor of_all;  // [world_size, n], in the host's memory
  StampPtr arrived;   // accelerators: when `of_all` has the numbers; null if that failed

  // The numbers. Waits for them on the host, and for nothing that was enqueued later.
  const at::Tensor& get() const;
};
using GatheredPtr = std::shared_ptr<const Gathered>;

// Gathers every rank's `numbers`, int64 [n] on a CPU or where the gradients are, the same n on every rank, and returns
// at once.
GatheredPtr gather(const Synchronizer& synchronizer, const at::Tensor& numbers, const std::string& what);
// Notes on the board that this rank takes part in a collective call of somebody else, between backward passes. Returns
// a number for end_call().
int64_t begin_call(const Synchronizer& synchronizer, const std::string& what);
// If not `all_took_part`, the call counts as not made.
void end_call(const Synchronizer& synchronizer, int64_t call, bool all_took_part);

}  // namespace fusedcomm
