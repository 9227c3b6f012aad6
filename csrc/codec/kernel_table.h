// What an instruction set provides to the codec: a table of kernels over contiguous runs of elements.
//
// Every table gives the same bytes; codec.cpp walks chunks, parts and slices and knows no instruction set.
#pragma once

#include <cstdint>

#include "wire/layout.h"
#include "wire/noise_key.h"

namespace fusedcomm {

// How an element lies in memory, on the wire and in gradients alike.
enum class Format : uint8_t { kFp32, kBf16, kFp16 };
inline constexpr int kNumFormats = 3;

inline constexpr int64_t format_nbytes(Format format) { return format == Format::kFp32 ? 4 : 2; }

// How a quantised element lies on the wire; int4 has two in a byte and bf16 scales, the others fp32 scales.
enum class Code : uint8_t { kInt8, kFp8, kInt4 };
inline constexpr int kNumCodes = 3;

// A run has fewer than 2^31 elements; a block is a power of two, 32 elements or more.
//
// A streamed destination bypasses the caches; other destinations must not be marked so. It is only a hint: a kernel
// ignores it where the address does not suit. The caller fences after the last streamed call, before others may read.

// dst[i] = Dst(float(src[i])·scale). Returns how many products are not finite. dst may not overlap src.
using ConvertFn = int64_t (*)(const void* src, void* dst, int64_t numel, float scale, bool streamed);

// data[i] = T(float(data[i])·scale). Returns how many products are not finite.
using ScaleFn = int64_t (*)(void* data, int64_t numel, float scale);

// Scales and codes of whole blocks of src·scale. Returns how many products are not finite, before a rotation.
using QuantizeFn = int64_t (*)(const void* src, void* scales, void* codes, int64_t num_blocks, int64_t block_numel,
                               float scale, bool streamed);

// dst[i] = Dst((codes[i]·scales[i / block_numel])·factor), of whole blocks; a rotation is undone before ·factor.
using DequantizeFn = void (*)(const void* scales, const void* codes, void* dst, int64_t num_blocks, int64_t block_numel,
                              float factor, bool streamed);

// acc[i] = ((source 0 + source 1) + source 2) …, elementwise in fp32. Sources lie stride_nbytes apart.
using SumFn = void (*)(const void* src, int64_t stride_nbytes, int64_t num_srcs, float* acc, int64_t numel);

// The same for whole blocks; both the scales and the codes of sources lie stride_nbytes apart.
using SumBlocksFn = void (*)(const void* scales, const void* codes, int64_t stride_nbytes, int64_t num_srcs, float* acc,
                             int64_t num_blocks, int64_t block_numel);

// ---- of a tile of fp32 values, for encoders that round stochastically or feed back what they left out

// out[i] = 16 bits for element first + i. `first` and `numel` are multiples of 8.
using NoiseFn = void (*)(const NoiseKey& key, int64_t first, uint16_t* out, int64_t numel);

// Rounds stochastically to values that the format has, beyond its greatest to Inf; what is not finite stays. numel is a
// multiple of 8.
using RoundFn = void (*)(float* data, const uint16_t* noise, int64_t numel);

// As quantize with scale 1, but rounded stochastically; noise[i] is that of src[i], or of what rotation puts there.
using QuantizeStochasticFn = int64_t (*)(const float* src, const uint16_t* noise, void* scales, void* codes,
                                         int64_t num_blocks, int64_t block_numel);

// data[i] += float(addend[i]), NaNs canonical
using AddFn = void (*)(float* data, const void* addend, int64_t numel);

// out[i] = Out(value[i] - decoded[i]), 0 where that is not finite
using SubtractFn = void (*)(const float* value, const float* decoded, void* out, int64_t numel);

// Of one code.
struct BlockKernels {
  QuantizeFn quantize[kNumFormats];              // [source]
  QuantizeFn quantize_rotated[kNumFormats];      // [source]
  DequantizeFn dequantize[kNumFormats];          // [destination]
  DequantizeFn dequantize_rotated[kNumFormats];  // [destination]
  SumBlocksFn sum;
  QuantizeStochasticFn quantize_stochastic;
  QuantizeStochasticFn quantize_rotated_stochastic;
};

struct KernelTable {
  const char* isa;
  ConvertFn convert[kNumFormats][kNumFormats];  // [source][destination]
  ScaleFn scale[kNumFormats];
  SumFn sum[kNumFormats];  // [source]
  BlockKernels blocks[kNumCodes];
  NoiseFn noise;
  RoundFn round_stochastic[kNumFormats];  // null for fp32
  AddFn add[kNumFormats];                 // [addend]; null for fp16, as the next
  SubtractFn subtract[kNumFormats];       // [out]
  void (*fence)();
};

// Each in a file of its own. Null where this build has no such code or this machine cannot run it.
const KernelTable* portable_kernels();
const KernelTable* neon_kernels();
const KernelTable* avx2_kernels();
const KernelTable* avx512_kernels();

}  // namespace fusedcomm
