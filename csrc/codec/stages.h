// Each stage for one unit: a piece of one section of one part. One thread processes a unit from start to end.
#pragma once

#include <cstdint>

#include "codec/args.h"
#include "codec/kernel_table.h"
#include "codec/walk.h"

namespace fusedcomm {

// streamed: the output bypasses the caches. Returns how many elements are not finite after scaling.
int64_t pack_unit(const KernelTable& kernels, const PackArgs& args, const Unit& unit, bool streamed);
// Sums every rank's elements of `unit`, a piece of one of the parts to write, and encodes the sum.
void reduce_unit(const KernelTable& kernels, const ReduceArgs& args, const Unit& unit);
void unpack_unit(const KernelTable& kernels, const UnpackArgs& args, const Unit& unit, bool streamed);

}  // namespace fusedcomm
