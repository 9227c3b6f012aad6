// The kernels of an instruction set: a table of functions over contiguous runs of elements.
//
// Every table gives the same bytes. codec.cpp walks chunks, parts and slices, whatever the instruction set.
#pragma once

#include <cstdint>

#include "wire/layout.h"

namespace fusedcomm {

// How an element is stored, both on the wire and in gradients.
enum class Format : uint8_t { kFp32, kBf16, kFp16 };
inline constexpr int kNumFormats = 3;

inline constexpr int64_t format_nbytes(Format format) { return format == Format::kFp32 ? 4 : 2; }

// For all kernels: a run has fewer than 2^31 elements. block_numel is a power of two, at least 32.
//
// streamed: a hint that the destination should bypass the caches. A kernel ignores it if the address is not aligned.
// The caller calls fence() after its last streamed call, before another thread may read.

// dst[i] = Dst(float(src[i])·scale). Returns how many products are not finite. dst may not overlap src.
using ConvertFn = int64_t (*)(const void* src, void* dst, int64_t numel, float scale, bool streamed);

// data[i] *= scale. Returns how many products are not finite.
using ScaleFn = int64_t (*)(float* data, int64_t numel, float scale);

// Writes scales and codes of whole blocks of src·scale. Returns how many products are not finite.
using QuantizeFn = int64_t (*)(const void* src, void* scales, void* codes, int64_t num_blocks, int64_t block_numel,
                               float scale, bool streamed);

// dst[i] = Dst((codes[i]·scales[i / block_numel])·factor) for whole blocks.
using DequantizeFn = void (*)(const void* scales, const void* codes, void* dst, int64_t num_blocks, int64_t block_numel,
                              float factor, bool streamed);

// acc[i] = ((source 0 + source 1) + source 2) …, elementwise in fp32. Sources are stride_nbytes apart.
using SumFn = void (*)(const void* src, int64_t stride_nbytes, int64_t num_srcs, float* acc, int64_t numel);

// Like SumFn, for whole blocks. Both the scales and the codes of the sources are stride_nbytes apart.
using SumBlocksFn = void (*)(const void* scales, const void* codes, int64_t stride_nbytes, int64_t num_srcs, float* acc,
                             int64_t num_blocks, int64_t block_numel);

// ---- kernels over a tile of fp32 values, for error feedback

// data[i] += addend[i]. NaNs become canonical.
using AddFn = void (*)(float* data, const float* addend, int64_t numel);

// out[i] = value[i] - decoded[i], or 0 where the difference is not finite.
using SubtractFn = void (*)(const float* value, const float* decoded, float* out, int64_t numel);

// The kernels of one code.
struct BlockKernels {
  QuantizeFn quantize[kNumFormats];      // [source]
  DequantizeFn dequantize[kNumFormats];  // [destination]
  SumBlocksFn sum;
};

struct KernelTable {
  const char* isa;
  ConvertFn convert[kNumFormats][kNumFormats];  // [source][destination]
  ScaleFn scale;
  SumFn sum[kNumFormats];                // [source]
  BlockKernels blocks[kNumScaledWires];  // [scaled_index(wire)]
  AddFn add;
  SubtractFn subtract;
  void (*fence)();
};

// Each is defined in a file of its own. Null if this build lacks the instruction set or this machine cannot run it.
const KernelTable* portable_kernels();
const KernelTable* neon_kernels();
const KernelTable* avx2_kernels();
const KernelTable* avx512_kernels();

}  // namespace fusedcomm
