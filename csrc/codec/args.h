// The arguments of each codec stage: the bucket's slices, its layout, and how it is rounded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "codec/slices.h"
#include "wire/layout.h"

namespace fusedcomm {

// Tables of a bucket that a device keeps between steps, so that a step need not copy them to the device again; see
// Device::prepare.
class BucketTables {
 public:
  virtual ~BucketTables() = default;
};

// The gradients of a bucket as the codec sees them. Both lists have the same dtype.
struct BucketSlices {
  SliceList lossy;
  SliceList exact;
  // Start of the bucket. The offsets in the tables count from here.
  void* origin = nullptr;
  // Null if the device keeps no tables.
  std::shared_ptr<const BucketTables> tables;
};

// The residual of one encoder: the rounding error of each element that it encodes. See tests/helpers/reference.
struct Residual {
  float* data = nullptr;  // [numel] on the codec's device; null if there is no error feedback
  int64_t numel = 0;
};

struct PackArgs {
  const BucketLayout& layout;
  int64_t chunk;
  const BucketSlices& slices;
  // Factor for every gradient element.
  float scale;
  // A message of layout.chunk_nbytes(). pack writes this layout's piece of every part and zeroes the piece's padding.
  std::byte* out;
  // Has layout.padded_numel() elements.
  Residual residual = {};
};

// Sums from.num_parts encodings of one part of `from`, and encodes the sum as `num_parts` parts of `to`. A part of
// `from` must have as many elements as `num_parts` parts of `to`. In a two-shot sum on one level both layouts are the
// same.
struct ReduceArgs {
  const BucketLayout& from;
  // A message: encodings of the same part, one from each of from.num_parts ranks, in rank order.
  const std::byte* parts;
  // Factor for the sum. It is 1/world_size times what pack divided by, if the sum covers all ranks.
  float scale;
  const BucketLayout& to;
  // `num_parts` consecutive parts, to.part_stride bytes apart.
  std::byte* out;
  int64_t num_parts = 1;
  // Used by `residual` only: the index of the chunk in the bucket.
  int64_t chunk = 0;
  // Has the elements of to.num_chunks · num_parts parts.
  Residual residual = {};
};

struct UnpackArgs {
  const BucketLayout& layout;
  int64_t chunk;
  // `num_messages` messages of layout.chunk_nbytes() each, one after the other. Their values are summed.
  const std::byte* parts;
  // Factor for every decoded element, or for the sum.
  float scale;
  // unpack writes to these slices.
  const BucketSlices& slices;
  // May exceed 1 only if the layout has one part.
  int64_t num_messages = 1;
};

}  // namespace fusedcomm
