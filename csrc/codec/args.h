// What each stage is given: a bucket's slices, its layout, how it is rounded. Codecs and devices read these.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "codec/slices.h"
#include "wire/layout.h"
#include "wire/noise_key.h"

namespace fusedcomm {

// What a device keeps of a bucket between steps, so that a step need not tell it anew; see Device::prepare.
class BucketTables {
 public:
  virtual ~BucketTables() = default;
  // Elements met so far that were not finite: one count for each slice of the lossy stream, then of the exact one.
  // Waits for the device.
  virtual std::vector<int64_t> nonfinite() const = 0;
};

// A bucket as the codec sees it. Both streams have the same dtype.
struct BucketStreams {
  Stream lossy;
  Stream exact;
  void* origin = nullptr;                      // where the bucket starts: what the tables' offsets count from
  std::shared_ptr<const BucketTables> tables;  // null where the device keeps none
};

// What rounding has left out so far, for each element that one encoder encodes. See fusedcomm/reference.
struct Residual {
  ResidualFormat format = ResidualFormat::kFp32;
  std::byte* data = nullptr;  // residual_nbytes(), on the codec's device; null: nothing is kept
  int64_t numel = 0;
};

// How the lossy stream is rounded.
struct Encoding {
  bool stochastic = false;
  NoiseKey noise;  // if stochastic
  Residual residual;
};

struct PackArgs {
  const BucketLayout& layout;
  int64_t chunk;
  const BucketStreams& streams;
  float scale;
  std::byte* out;  // a message of layout.chunk_nbytes(): this layout's piece of every part is written, padding zeroed
  Encoding encoding = {};  // a residual of layout.padded_numel() elements
  bool is_last = false;    // of a backward pass's buckets: what is left of the pass waits for it
};

// Sums a part of `from` and encodes it as parts of `to`. These are one layout in a two-shot on one level; else `to` has
// the same elements in `num_parts` times as many parts.
struct ReduceArgs {
  const BucketLayout& from;
  const std::byte*
      parts;    // a message: encodings of the same part, one from each of from.num_parts ranks, in rank order
  float scale;  // 1/world_size times what pack divided by, if these are all the ranks
  const BucketLayout& to;
  std::byte* out;  // `num_parts` consecutive parts, to.part_stride apart
  int64_t num_parts = 1;
  int64_t chunk = 0;       // the rest is used by `encoding` only. A residual of to.num_chunks · num_parts parts
  int64_t first_part = 0;  // of the `to` parts in a chunk, that which is written first
  Encoding encoding = {};
  bool is_last = false;  // see PackArgs
};

struct UnpackArgs {
  const BucketLayout& layout;
  int64_t chunk;
  const std::byte* parts;  // a message of layout.chunk_nbytes(); or so many, one after the other, which are summed
  float scale;
  const BucketStreams& streams;  // written
  int64_t num_messages = 1;      // more than one of layouts with one part only
  bool is_last = false;          // see PackArgs
};

}  // namespace fusedcomm
