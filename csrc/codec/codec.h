// The CPU codec: gradients ⇄ wire bytes, one pass over memory each way. No torch in here.
//
//   pack    gradient slices → wire bytes      y = x·scale, rounded to the wire dtype
//   reduce  one part from every rank → the encoded mean of that part: fp32 sum in rank order, ·scale, one rounding
//   unpack  wire bytes → gradient slices      x = decoded·scale; of several messages, of their fp32 sum in rank order
//
// Every function gives the same bytes as fusedcomm/reference.py, whatever the instruction set and thread count.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "wire/layout.h"
#include "wire/noise_key.h"

namespace fusedcomm {

enum class GradDtype : uint8_t { kFloat32, kBFloat16, kFloat16 };

inline constexpr int64_t grad_nbytes(GradDtype dtype) { return dtype == GradDtype::kFloat32 ? 4 : 2; }

// A contiguous run of gradient elements; `data` need only be aligned to its element.
struct Slice {
  void* data = nullptr;
  int64_t numel = 0;
};

// Slices laid end to end: element i of the stream lives in the slice whose [starts[k], starts[k+1]) holds i.
class Stream {
 public:
  // Empty slices are dropped; a slice that continues the one before it in memory is merged with it.
  void append(void* data, int64_t numel, GradDtype dtype);
  int64_t numel() const { return starts_.back(); }
  GradDtype dtype() const { return dtype_; }
  const std::vector<Slice>& slices() const { return slices_; }
  const std::vector<int64_t>& starts() const { return starts_; }  // one more entry than slices

 private:
  std::vector<Slice> slices_;
  std::vector<int64_t> starts_ = {0};
  GradDtype dtype_ = GradDtype::kFloat32;
};

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

// What rounding has left out so far, for each element that one encoder encodes. See reference.py.
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

// Instruction sets this build can dispatch to and this machine can run, slowest first; always has "portable".
std::vector<std::string> available_isas();

class Codec {
 public:
  // isa: one of available_isas(), or "auto" for the last of them. num_threads ≥ 1 counts the calling thread.
  // Throws std::invalid_argument naming what was given and what is possible.
  Codec(const std::string& isa, int num_threads);
  ~Codec();
  Codec(const Codec&) = delete;
  Codec& operator=(const Codec&) = delete;

  // Returns how many elements of this chunk are not finite (after scaling).
  int64_t pack(const PackArgs& args) const;
  void reduce(const ReduceArgs& args) const;
  void unpack(const UnpackArgs& args) const;
  // The exact wire of an fp32 bucket travels in place: x *= scale. Returns the non-finite count.
  int64_t scale_in_place(const Stream& stream, float scale) const;

  const std::string& isa() const;
  int num_threads() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fusedcomm
