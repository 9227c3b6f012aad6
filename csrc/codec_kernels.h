// What an instruction set provides to the codec: a table of kernels over contiguous runs of elements.
//
// Every table gives the same bytes; codec.cpp walks chunks, parts and slices and knows no instruction set.
#pragma once

#include <cstdint>

namespace fusedcomm {

// How an element lies in memory, on the wire and in gradients alike.
enum class Format : uint8_t { kFp32, kBf16, kFp16 };
inline constexpr int kNumFormats = 3;

inline constexpr int64_t format_nbytes(Format format) { return format == Format::kFp32 ? 4 : 2; }

// A run has fewer than 2^31 elements.
//
// A streamed destination bypasses the caches; other destinations must not be marked so. It is only a hint: a kernel
// ignores it where the address does not suit, and fences before it returns.

// dst[i] = Dst(float(src[i])·scale). Returns how many products are not finite. dst may not overlap src.
using ConvertFn = int64_t (*)(const void* src, void* dst, int64_t numel, float scale, bool streamed);

// data[i] = T(float(data[i])·scale). Returns how many products are not finite.
using ScaleFn = int64_t (*)(void* data, int64_t numel, float scale);

// Block-int8 of num_blocks whole blocks of src·scale. Returns how many products are not finite.
using QuantizeFn = int64_t (*)(const void* src, float* scales, int8_t* codes, int64_t num_blocks, int64_t block_numel,
                               float scale, bool streamed);

// dst[i] = Dst((codes[i]·scales[i / block_numel])·factor); numel need not be a multiple of the block.
using DequantizeFn = void (*)(const float* scales, const int8_t* codes, void* dst, int64_t numel, int64_t block_numel,
                              float factor, bool streamed);

// acc[i] = ((source 0 + source 1) + source 2) …, elementwise in fp32. Sources lie stride_nbytes apart.
using SumFn = void (*)(const void* src, int64_t stride_nbytes, int64_t num_srcs, float* acc, int64_t numel);

// The same for whole blocks of block-int8; both the scales and the codes of sources lie stride_nbytes apart.
using SumInt8Fn = void (*)(const void* scales, const void* codes, int64_t stride_nbytes, int64_t num_srcs, float* acc,
                           int64_t num_blocks, int64_t block_numel);

struct KernelTable {
  const char* isa;
  ConvertFn convert[kNumFormats][kNumFormats];  // [source][destination]
  ScaleFn scale[kNumFormats];
  QuantizeFn quantize[kNumFormats];      // [source]
  DequantizeFn dequantize[kNumFormats];  // [destination]
  SumFn sum[kNumFormats];                // [source]
  SumInt8Fn sum_int8;
};

// Each in a file of its own. Null where this build has no such code or this machine cannot run it.
const KernelTable* portable_kernels();
const KernelTable* neon_kernels();
const KernelTable* avx2_kernels();
const KernelTable* avx512_kernels();

}  // namespace fusedcomm
