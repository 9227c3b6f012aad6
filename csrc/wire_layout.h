// The wire layout, written once: what the bytes of a bucket look like while they travel.
//
// A bucket is two streams of elements: the *lossy* stream (parameters sent in the wire dtype) and the *exact* stream
// (exempt parameters, always fp32). Both are cut into the same chunks, and every chunk into one *part* for each owner:
//
//   bucket   = chunk 0 | chunk 1 | …          a chunk is what one collective carries; its size is bounded
//   chunk    = part 0 | part 1 | …            two-shot: one part per rank, rank r owns (sums) part r; all-reduce: 1
//   part     = exact fp32 | scales | codes      each section starts on a 16-byte boundary
//
// Cuts fall on multiples of the block, counted from the start of the stream, so neither the block grid nor the sum
// depends on the chunk size. Elements past the end of a stream are zeros.
//
// Python and device code ask this header (through the bindings or by inclusion); nobody recomputes it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace fusedcomm {

// Bumped whenever the same gradients would give other bytes; ranks compare it at attach.
inline constexpr int kWireLayoutVersion = 2;

// NCCL and vector units both want it; one misaligned pointer has been seen to cut NCCL's rate twelvefold.
inline constexpr int64_t kAlignNbytes = 16;

inline constexpr int64_t kDefaultBlockNumel = 128;
inline constexpr int64_t kMinBlockNumel = 32;
inline constexpr int64_t kMaxBlockNumel = 4096;

// kFp8 is e4m3. Names for people are in wire_names.h, what the codes mean in fusedcomm/reference.py.
enum class Wire : uint8_t { kFp32, kBf16, kFp16, kInt8, kFp8, kFp8E5m2, kInt4 };

// Wires that quantise carry one scale for every block of elements.
inline constexpr bool has_scales(Wire wire) { return wire >= Wire::kInt8; }

inline constexpr int64_t code_nbits(Wire wire) {
  return wire == Wire::kFp32 ? 32 : !has_scales(wire) ? 16 : wire == Wire::kInt4 ? 4 : 8;
}
// Of `numel` codes, an even number where two share a byte: int4 has element 2k in the low half of byte k.
inline constexpr int64_t codes_nbytes(Wire wire, int64_t numel) { return numel * code_nbits(wire) / 8; }

// fp32; bf16 where the codes are so small that fp32 scales would be a fifth of the payload.
inline constexpr int64_t scale_nbytes(Wire wire) { return wire == Wire::kInt4 ? 2 : 4; }
inline constexpr int64_t scales_nbytes(Wire wire, int64_t num_blocks) {
  return has_scales(wire) ? num_blocks * scale_nbytes(wire) : 0;
}

inline constexpr int64_t default_block_numel(Wire wire) { return wire == Wire::kInt4 ? 32 : kDefaultBlockNumel; }

// Elements that a rotation mixes; see reference.py. Divides every block.
inline constexpr int64_t kRotationNumel = 32;

inline constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

inline constexpr int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

inline void check_block_numel(int64_t block_numel) {
  const bool power_of_two = block_numel > 0 && (block_numel & (block_numel - 1)) == 0;
  if (!power_of_two || block_numel < kMinBlockNumel || block_numel > kMaxBlockNumel) {
    throw std::invalid_argument("block=" + std::to_string(block_numel) + " is not possible: use a power of two from " +
                                std::to_string(kMinBlockNumel) + " to " + std::to_string(kMaxBlockNumel) + " elements");
  }
}

// How one part's bytes are arranged. The exact section starts at byte 0.
struct PartLayout {
  int64_t exact_numel = 0;   // fp32 elements
  int64_t lossy_numel = 0;   // elements in the wire dtype; a multiple of the grain
  int64_t scale_offset = 0;  // bytes
  int64_t code_offset = 0;   // bytes
  int64_t nbytes = 0;        // a multiple of kAlignNbytes
};

// A half-open run of stream elements.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t numel() const { return end - begin; }
};

// How one bucket travels: every chunk has the same shape, the last ones may hold fewer real elements.
struct BucketLayout {
  Wire wire = Wire::kFp32;
  int64_t block_numel = kDefaultBlockNumel;
  bool rotated = false;   // the lossy stream is rotated before it is quantised
  int64_t num_parts = 1;  // parts in a chunk: world_size for two-shot, 1 for all-reduce
  int64_t num_chunks = 0;
  int64_t exact_numel = 0;  // of the whole bucket
  int64_t lossy_numel = 0;
  PartLayout part;

  int64_t chunk_nbytes() const { return part.nbytes * num_parts; }

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

// Fewest elements that may be cut off a stream: a block where there are scales, else what fills 16 bytes.
inline int64_t grain_numel(Wire wire, int64_t block_numel) {
  return has_scales(wire) ? block_numel : kAlignNbytes / codes_nbytes(wire, 1);
}

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

// Cuts a bucket into equal chunks of at most about `max_chunk_nbytes` (one grain a part is the least).
inline BucketLayout bucket_layout(Wire wire, int64_t block_numel, int64_t num_parts, int64_t exact_numel,
                                  int64_t lossy_numel, int64_t max_chunk_nbytes, bool rotated = false) {
  check_block_numel(block_numel);
  if (rotated && !has_scales(wire)) {
    throw std::invalid_argument(
        "rotate=True is for wires with scales (int8, fp8, fp8_e5m2, int4): others round each "
        "element by itself, which a rotation cannot improve");
  }
  if (num_parts < 1 || exact_numel < 0 || lossy_numel < 0 || max_chunk_nbytes < 1) {
    throw std::invalid_argument("bucket_layout: num_parts and max_chunk_nbytes must be positive, numels not negative");
  }
  BucketLayout layout;
  layout.wire = wire;
  layout.block_numel = block_numel;
  layout.rotated = rotated;
  layout.num_parts = num_parts;
  layout.exact_numel = exact_numel;
  layout.lossy_numel = lossy_numel;
  if (exact_numel + lossy_numel == 0) return layout;

  const int64_t nbytes = part_layout(wire, block_numel, exact_numel, lossy_numel).nbytes;
  const int64_t wanted_parts = ceil_div(nbytes, max_chunk_nbytes) * num_parts;
  const int64_t exact_part = round_up(ceil_div(exact_numel, wanted_parts), kAlignNbytes / 4);
  const int64_t lossy_part = round_up(ceil_div(lossy_numel, wanted_parts), grain_numel(wire, block_numel));
  layout.part = part_layout(wire, block_numel, exact_part, lossy_part);
  // Rounding up to the grain can leave the last chunks empty: do not send those.
  const int64_t exact_chunks = exact_numel ? ceil_div(exact_numel, exact_part * num_parts) : 0;
  const int64_t lossy_chunks = lossy_numel ? ceil_div(lossy_numel, lossy_part * num_parts) : 0;
  layout.num_chunks = std::max(exact_chunks, lossy_chunks);
  return layout;
}

}  // namespace fusedcomm
