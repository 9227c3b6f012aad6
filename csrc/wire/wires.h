// The wire dtypes, one row of a table each: what the layout of messages depends on. What the codes mean is defined in
// tests/helpers/reference.
//
// A new wire dtype is an enumerator and a row here. Its arithmetic is in codec/isa/scalar_impl.h, in
// kernels/{elements,encode,quantise}.py, and in tests/helpers/reference/elements.py. For users its name is in
// fusedcomm/literals.py and in the docstring of Config.
#pragma once

#include <cstdint>
#include <stdexcept>

namespace fusedcomm {

// kFp8 is e4m3. The values 5 and 7 were e5m2 and a wire of two bits, and are not used again.
enum class Wire : uint8_t { kFp32 = 0, kBf16 = 1, kFp16 = 2, kInt8 = 3, kFp8 = 4, kInt4 = 6 };

// Elements of a block. Each block has one scale.
inline constexpr int64_t kDefaultBlockNumel = 128;
inline constexpr int64_t kMinBlockNumel = 32;
inline constexpr int64_t kMaxBlockNumel = 4096;

struct WireRow {
  Wire wire;
  // For users and Python.
  const char* name;
  // Orders the wire dtypes: a greater value means a smaller loss. For two pairs the order depends on the gradients;
  // there fp16 is above bf16, and int8 above fp8.
  int exactness;
  // Bits of one element. With fewer than 8, the first element of a byte is in its lowest bits: with 4 bits, byte k has
  // element 2k in its low half.
  int64_t code_nbits;
  // Bytes of one scale: 4 for fp32, 2 for bf16, 0 for wire dtypes that do not quantize. Scales of int4 are bf16,
  // because fp32 scales would be a fifth of the payload.
  int64_t scale_nbytes;
  int64_t default_block_numel;
};

// Every wire dtype, in the order in which texts list them.
// clang-format off
inline constexpr WireRow kWires[] = {
    {Wire::kFp32, "fp32", 5, 32, 0, kDefaultBlockNumel},
    {Wire::kBf16, "bf16", 3, 16, 0, kDefaultBlockNumel},
    {Wire::kFp16, "fp16", 4, 16, 0, kDefaultBlockNumel},
    {Wire::kInt8, "int8", 2, 8, 4, kDefaultBlockNumel},
    {Wire::kFp8, "fp8", 1, 8, 4, kDefaultBlockNumel},
    {Wire::kInt4, "int4", 0, 4, 2, 32},
};
// clang-format on

// Throws std::invalid_argument if `wire` is none of kWires.
inline constexpr const WireRow& row_of(Wire wire) {
  for (const WireRow& row : kWires) {
    if (row.wire == wire) return row;
  }
  throw std::invalid_argument("not a wire dtype");
}

// Whether elements are quantized, with one scale for each block of them.
inline constexpr bool has_scales(Wire wire) { return row_of(wire).scale_nbytes != 0; }

inline constexpr int count_with_scales() {
  int count = 0;
  for (const WireRow& row : kWires) count += has_scales(row.wire);
  return count;
}
inline constexpr int kNumScaledWires = count_with_scales();

// The index of a wire dtype among those with scales.
inline constexpr int scaled_index(Wire wire) {
  int index = 0;
  for (const WireRow& row : kWires) {
    if (row.wire == wire) break;
    index += has_scales(row.wire);
  }
  return index;
}

inline constexpr int exactness(Wire wire) { return row_of(wire).exactness; }
inline constexpr int64_t code_nbits(Wire wire) { return row_of(wire).code_nbits; }
inline constexpr int64_t scale_nbytes(Wire wire) { return row_of(wire).scale_nbytes; }
inline constexpr int64_t default_block_numel(Wire wire) { return row_of(wire).default_block_numel; }

// Bytes of the codes of `numel` elements, which fill whole bytes.
inline constexpr int64_t codes_nbytes(Wire wire, int64_t numel) { return numel * code_nbits(wire) / 8; }
inline constexpr int64_t scales_nbytes(Wire wire, int64_t num_blocks) { return num_blocks * scale_nbytes(wire); }

}  // namespace fusedcomm
