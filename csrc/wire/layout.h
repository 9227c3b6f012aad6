// The wire layout: how the bytes of a bucket are arranged in messages. It is defined only here.
//
// A bucket is two lists of elements: *lossy* ones (of parameters sent in the wire dtype) and *exact* ones (of exempt
// parameters, always fp32). Both are cut into the same chunks, and every chunk into one *part* for each owner:
//
//   bucket   = chunk 0 | chunk 1 | …          one collective carries one chunk; its size is bounded
//   chunk    = part 0 | part 1 | …            two-shot: one part per rank, rank r owns (sums) part r; otherwise 1 part
//   part     = exact fp32 | scales | codes    each section starts on a 16-byte boundary
//
// Cuts fall on multiples of the block, counted from the start of the list, so neither the block grid nor the sum
// depends on the chunk size. Elements past the end of a list are zeros.
//
// A list has *holes*, elements that are zeros and belong to no gradient: wherever one is needed, so that a gradient's
// place in the list and its place in memory agree modulo kAlignNbytes; see devices/slice_table.h. Every kAlignNbytes of
// gradients then lie in memory as they lie in the list. Counts of elements here include holes.
//
// If some parameters have a wire dtype of their own, the bucket has one layout for each wire dtype. A part of a message
// is then the parts of these layouts, one after the other. All layouts have the same number of chunks. Only the first
// has exact elements.
//
// In a weighted mean a head of kHeadNbytes, the rank's weight, comes before all else in every part; see add_heads().
//
// Python uses this header through the bindings, and device code includes it. No other code computes the layout.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "wire/wires.h"

namespace fusedcomm {

// Raise this version whenever the same gradients would give other bytes. Ranks compare it at attach.
inline constexpr int kWireLayoutVersion = 9;

// Alignment in bytes. NCCL and vector units both need it to be fast: one misaligned pointer has been seen to make NCCL
// twelve times slower.
inline constexpr int64_t kAlignNbytes = 16;

// Gradient elements in kAlignNbytes, at most: those of 16 bits. A part begins at a multiple of them.
inline constexpr int64_t kMaxVectorNumel = kAlignNbytes / 2;

// Four numbers in fp32, which are added up over the ranks as they are; see MessageHead in engine/job.h.
inline constexpr int64_t kHeadNbytes = 16;

inline constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

inline constexpr int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// Throws std::invalid_argument unless the block size is a power of two from kMinBlockNumel to kMaxBlockNumel.
inline void check_block_numel(int64_t block_numel) {
  const bool power_of_two = block_numel > 0 && (block_numel & (block_numel - 1)) == 0;
  if (!power_of_two || block_numel < kMinBlockNumel || block_numel > kMaxBlockNumel) {
    throw std::invalid_argument("block=" + std::to_string(block_numel) + " is not possible: use a power of two from " +
                                std::to_string(kMinBlockNumel) + " to " + std::to_string(kMaxBlockNumel) + " elements");
  }
}

// How the bytes of one part are arranged. The exact section starts at byte 0.
struct PartLayout {
  int64_t exact_numel = 0;   // fp32 elements
  int64_t lossy_numel = 0;   // elements in the wire dtype; a multiple of the grain
  int64_t scale_offset = 0;  // bytes
  int64_t code_offset = 0;   // bytes
  int64_t nbytes = 0;        // a multiple of kAlignNbytes
};

// In place of the offset in memory of a slice, for a hole.
inline constexpr int64_t kHole = -1;

// Finds the holes of a list as its slices are appended. A slice that follows the one before it in memory follows it in
// the list, too. Any other begins a vector of kAlignNbytes of gradients, at the place in it that it has in memory.
class Holes {
 public:
  // grad_nbytes: bytes of an element in memory. in_one_run: whether all slices lie in one run of memory, which begins
  // at a multiple of kAlignNbytes. If not, each is a tensor of its own, which should do so.
  Holes(int64_t grad_nbytes, bool in_one_run) : vector_numel_(kAlignNbytes / grad_nbytes), in_one_run_(in_one_run) {}

  // Returns the elements of the hole before the slice. offset: elements from the begin of the run; ignored for tensors
  // of their own. An empty slice has no hole.
  int64_t append(int64_t offset, int64_t numel) {
    if (numel == 0) return 0;
    int64_t hole = 0;
    if (!in_one_run_ || offset != memory_end_) {
      hole = round_up(numel_, vector_numel_) - numel_ + (in_one_run_ ? offset % vector_numel_ : 0);
    }
    memory_end_ = offset + numel;
    numel_ += hole + numel;
    return hole;
  }

  int64_t numel() const { return numel_; }  // of the list, holes included

 private:
  int64_t vector_numel_;
  bool in_one_run_;
  int64_t numel_ = 0, memory_end_ = 0;
};

// The elements of a slice list from `begin` up to, but not including, `end`.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t numel() const { return end - begin; }
};

// The layout of one bucket. Every chunk has the same shape; the last chunks may hold fewer real elements.
struct BucketLayout {
  Wire wire = Wire::kFp32;
  int64_t block_numel = kDefaultBlockNumel;
  int64_t num_parts = 1;  // parts in a chunk: world_size for two-shot, otherwise 1
  int64_t num_chunks = 0;
  int64_t exact_numel = 0;  // of the whole bucket
  int64_t lossy_numel = 0;  // of the whole bucket
  PartLayout part;
  int64_t part_offset = 0;  // bytes from the start of a message's part to this layout's part
  int64_t part_stride = 0;  // bytes from one part of a message to the next; part.nbytes if there is one layout

  // Bytes of one chunk's message, including all layouts.
  int64_t chunk_nbytes() const { return part_stride * num_parts; }

  // Lossy elements including padding. A residual has this many elements.
  int64_t padded_numel() const { return num_chunks * num_parts * part.lossy_numel; }

  // The elements of a slice list that a part holds, without padding. The range may be empty.
  Range lossy_range(int64_t chunk, int64_t part_index) const {
    return clipped(chunk, part_index, part.lossy_numel, lossy_numel);
  }
  Range exact_range(int64_t chunk, int64_t part_index) const {
    return clipped(chunk, part_index, part.exact_numel, exact_numel);
  }

 private:
  Range clipped(int64_t chunk, int64_t part_index, int64_t part_numel, int64_t total_numel) const {
    const int64_t begin = (chunk * num_parts + part_index) * part_numel;
    return {std::min(begin, total_numel), std::min(begin + part_numel, total_numel)};
  }
};

// The unit, in elements, in which lossy elements are cut: a block if the wire has scales, otherwise kMaxVectorNumel,
// whose codes fill kAlignNbytes once or twice.
inline int64_t grain_numel(Wire wire, int64_t block_numel) { return has_scales(wire) ? block_numel : kMaxVectorNumel; }

inline PartLayout part_layout(Wire wire, int64_t block_numel, int64_t exact_numel, int64_t lossy_numel) {
  PartLayout part;
  part.exact_numel = exact_numel;
  part.lossy_numel = lossy_numel;
  part.scale_offset = round_up(exact_numel * 4, kAlignNbytes);
  const int64_t num_blocks = ceil_div(lossy_numel, block_numel);
  part.code_offset = round_up(part.scale_offset + scales_nbytes(wire, num_blocks), kAlignNbytes);
  part.nbytes = round_up(part.code_offset + codes_nbytes(wire, lossy_numel), kAlignNbytes);
  return part;
}

// Lossy elements: their format on the wire and their number.
struct WireFormat {
  Wire wire = Wire::kFp32;
  int64_t block_numel = kDefaultBlockNumel;
  int64_t numel = 0;
};

// Cuts a bucket into equal chunks of about `max_chunk_nbytes` at most; a part has at least one grain. Returns one
// layout for each of `formats`, in their order. Throws std::invalid_argument if there is no format or a number is out
// of range.
inline std::vector<BucketLayout> bucket_layouts(const std::vector<WireFormat>& formats, int64_t num_parts,
                                                int64_t exact_numel, int64_t max_chunk_nbytes) {
  const bool negative = std::any_of(formats.begin(), formats.end(), [](const auto& s) { return s.numel < 0; });
  if (formats.empty() || num_parts < 1 || exact_numel < 0 || negative || max_chunk_nbytes < 1) {
    throw std::invalid_argument(
        "bucket_layout: num_parts and max_chunk_nbytes must be positive, numels not negative, formats not empty");
  }
  int64_t nbytes = 0, numel = exact_numel;
  for (const WireFormat& format : formats) {
    check_block_numel(format.block_numel);
    nbytes +=
        part_layout(format.wire, format.block_numel, &format == formats.data() ? exact_numel : 0, format.numel).nbytes;
    numel += format.numel;
  }
  std::vector<BucketLayout> layouts;
  const int64_t wanted_parts = std::max<int64_t>(1, ceil_div(nbytes, max_chunk_nbytes)) * num_parts;
  int64_t stride = 0, num_chunks = 0;
  for (const WireFormat& format : formats) {
    BucketLayout layout;
    layout.wire = format.wire;
    layout.block_numel = format.block_numel;
    layout.num_parts = num_parts;
    layout.exact_numel = layouts.empty() ? exact_numel : 0;
    layout.lossy_numel = format.numel;
    if (numel != 0) {
      const int64_t exact_part = round_up(ceil_div(layout.exact_numel, wanted_parts), kMaxVectorNumel);
      const int64_t lossy_part =
          round_up(ceil_div(format.numel, wanted_parts), grain_numel(format.wire, format.block_numel));
      layout.part = part_layout(format.wire, format.block_numel, exact_part, lossy_part);
      // Rounding up to the grain can leave the last chunks empty: do not send those.
      if (exact_part != 0) num_chunks = std::max(num_chunks, ceil_div(layout.exact_numel, exact_part * num_parts));
      if (lossy_part != 0) num_chunks = std::max(num_chunks, ceil_div(format.numel, lossy_part * num_parts));
    }
    layout.part_offset = stride;
    stride += layout.part.nbytes;
    layouts.push_back(layout);
  }
  for (BucketLayout& layout : layouts) {
    layout.num_chunks = num_chunks;
    layout.part_stride = stride;
  }
  return layouts;
}

// As bucket_layouts, for a bucket with a single lossy format.
inline BucketLayout bucket_layout(Wire wire, int64_t block_numel, int64_t num_parts, int64_t exact_numel,
                                  int64_t lossy_numel, int64_t max_chunk_nbytes) {
  return bucket_layouts({{wire, block_numel, lossy_numel}}, num_parts, exact_numel, max_chunk_nbytes).front();
}

// The layouts of the same bucket between the ranks of one host, before a sum over hosts. There is one part for each of
// these ranks. With h hosts, part l has the elements of the h parts of `layouts` from part l * h on (see Place::part).
// Throws std::invalid_argument if `wire` has scales or `ranks_per_host` does not divide the number of parts.
inline std::vector<BucketLayout> host_layouts(const std::vector<BucketLayout>& layouts, Wire wire,
                                              int64_t ranks_per_host) {
  std::vector<BucketLayout> of_host;
  int64_t stride = 0;
  for (const BucketLayout& layout : layouts) {
    if (has_scales(wire) || layout.num_parts % ranks_per_host != 0) {
      throw std::invalid_argument(
          "host_layouts: the wire must not have scales, and ranks_per_host must divide num_parts");
    }
    const int64_t num_hosts = layout.num_parts / ranks_per_host;
    BucketLayout host = layout;
    host.wire = wire;
    host.num_parts = ranks_per_host;
    host.part =
        part_layout(wire, layout.block_numel, num_hosts * layout.part.exact_numel, num_hosts * layout.part.lossy_numel);
    host.part_offset = stride;
    stride += host.part.nbytes;
    of_host.push_back(host);
  }
  for (BucketLayout& host : of_host) host.part_stride = stride;
  return of_host;
}

// A reduce-scatter or an all-gather. Its bucket has a row for each rank, and every row has the same elements. A part of
// chunk c has a segment of one row, part r that of row r, or on two levels of BucketPlan::row_of_part(r): the list of
// all rows is, for each chunk, the segments of all rows in the order of parts, each filled up with a hole. `own` has
// all segments of a rank's own row, and nothing else.
struct RowLayouts {
  std::vector<BucketLayout> all;  // one for each format; numels include the holes
  std::vector<BucketLayout> own;
};

// `formats`, exact_numel and max_part_nbytes, of a chunk's part: of one row. Throws as bucket_layouts does.
inline RowLayouts row_layouts(const std::vector<WireFormat>& formats, int64_t num_rows, int64_t exact_numel,
                              int64_t max_part_nbytes) {
  RowLayouts layouts;
  layouts.own = bucket_layouts(formats, 1, exact_numel, max_part_nbytes);
  for (const BucketLayout& own : layouts.own) {
    BucketLayout all = own;
    all.num_parts = num_rows;
    all.lossy_numel = own.num_chunks * num_rows * own.part.lossy_numel;
    all.exact_numel = own.num_chunks * num_rows * own.part.exact_numel;
    layouts.all.push_back(all);
  }
  return layouts;
}

// Makes room for a head at the begin of each part of the bucket's messages.
inline void add_heads(std::vector<BucketLayout>* layouts) {
  for (BucketLayout& layout : *layouts) {
    layout.part_offset += kHeadNbytes;
    layout.part_stride += kHeadNbytes;
  }
}

}  // namespace fusedcomm
