// The arithmetic that fusedcomm/reference defines: formats, rounding and codes of one element, and the rotation of the
// 32 elements of a warp. fused.cu includes this file and documents its macros.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

enum { none, fp32, bf16, fp16, int8, fp8, int4 };

// Elements that a rotation mixes: one for each lane of a warp.
constexpr int kRun = 32;
constexpr u32 kAllLanes = 0xFFFFFFFFu;
constexpr u32 kInfBits = 0x7F800000u;
// 2^-100 as fp32 bits. A block whose absmax is below it becomes zeros.
constexpr u32 kLeastAbsmaxBits = (127u - 100u) << 23;
// Bit i is set if element i of a run changes its sign before it is rotated.
constexpr u32 kRotationSigns = 0x9E3779B9u;

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
__device__ __forceinline__ i64 lesser(i64 a, i64 b) { return b < a ? b : a; }

__device__ __forceinline__ u32 magnitude_bits(float y) { return __float_as_uint(y) & 0x7FFFFFFFu; }

// The floor of x for |x| < 2^22; a zero gives +0. 1.5·2^23 has an ulp of one, so adding it rounds to a whole number.
// floorf is not used, because it may flush a denormal to zero.
__device__ __forceinline__ float floor_of(float x) {
  const float nearest = (x + 12582912.0f) - 12582912.0f;
  return nearest > x ? nearest - 1.0f : nearest;
}

// ---- formats

#ifdef __CUDACC__
__device__ __forceinline__ u16 half_of_float(float value) {
  u16 half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}
__device__ __forceinline__ float float_of_half(u16 half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}
#endif

__device__ __forceinline__ bool has_scales(int format) { return format >= int8; }

// Whether the codes of two elements share a byte: the even one has the lower half.
__device__ __forceinline__ bool in_pairs(int format) { return format == int4; }

// Whether a scale may be negative.
__device__ __forceinline__ bool signed_scales(int format) { return format == int4; }

__device__ __forceinline__ int scale_format(int format) { return format == int4 ? bf16 : fp32; }

__device__ __forceinline__ float greatest_value(int format) {
  return format == int8 ? 127.0f : format == fp8 ? 448.0f : 6853.0f / 1024.0f;
}

__device__ __forceinline__ float least_value(int format) {
  return format == int8 ? -127.0f : format == fp8 ? -448.0f : -8.0f;
}

// The value of an int4 code. Exact.
__device__ __forceinline__ float level(float code) { return code * (code * code * (3.0f / 1024) + 832.0f / 1024); }

// The bits of element `index` of a section.
__device__ __forceinline__ u32 load_bits(const void* section, i64 index, int format) {
  if (format == fp32) return static_cast<const u32*>(section)[index];
  if (format == bf16 || format == fp16) return static_cast<const u16*>(section)[index];
  if (in_pairs(format)) return static_cast<const u8*>(section)[index / 2] >> (index % 2 * 4) & 0xFu;
  return static_cast<const u8*>(section)[index];
}

// Writes the bits of element `index` of a section. For int4 it writes two elements: `bits` holds the element at the
// even `index` in its lower four bits and the next element in its upper four.
__device__ __forceinline__ void store_bits(void* section, i64 index, u32 bits, int format) {
  if (format == fp32) {
    static_cast<u32*>(section)[index] = bits;
  } else if (format == bf16 || format == fp16) {
    static_cast<u16*>(section)[index] = static_cast<u16>(bits);
  } else {
    static_cast<u8*>(section)[in_pairs(format) ? index / 2 : index] = static_cast<u8>(bits);
  }
}

__device__ __forceinline__ float value_of(u32 bits, int format) {
  if (format == fp32) return __uint_as_float(bits);
  if (format == bf16) return __uint_as_float(bits << 16);
  if (format == fp16) return float_of_half(static_cast<u16>(bits));
  if (format == int8) return static_cast<float>(static_cast<signed char>(bits));
  if (format == int4) return level(static_cast<float>(static_cast<int>(bits << 28) >> 28));
  // e4m3 differs from fp32 in mantissa width and exponent bias only, for subnormals too: place the bits as fp32's and
  // multiply by 2^(127 - 7). The code with the greatest magnitude is NaN.
  const float value = __uint_as_float((bits & 0x80u) << 24 | (bits & 0x7Fu) << 20) * 0x1p120f;
  return (bits & 0x7Fu) == 0x7Fu ? __uint_as_float(0x7FC00000u) : value;
}

// The bits of y rounded to nearest even in fp32, bf16 or fp16. A NaN becomes the canonical one.
__device__ __forceinline__ u32 rounded(float y, int format) {
  const bool nan = y != y;
  const u32 bits = nan ? 0x7FC00000u : __float_as_uint(y);
  // Half an ulp less one, plus the lowest kept bit, carries exactly where nearest-even rounds up.
  if (format == bf16) return (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  if (format == fp16) return nan ? 0x7E00u : half_of_float(y);
  return bits;
}

// The bf16 bits of the scale of an int4 block. `turned`: the bits of its element of greatest magnitude, turned left by
// one; it gets the code -8. Rounded stochastically, values stay within the levels of ±7 and the scale is rounded up.
__device__ __forceinline__ u32 int4_scale(u32 turned) {
  const u32 absmax = static_cast<u32>(lesser(turned >> 1, 0x7F7F0000));  // at most the greatest bf16 number
  if (STOCHASTIC) return (__float_as_uint(__uint_as_float(absmax) / greatest_value(int4)) + 0xFFFFu) >> 16;
  return rounded(__uint_as_float(absmax | (~turned & 1u) << 31) * 0.125f, bf16);
}

// The bits of y rounded stochastically in bf16 or fp16: adds `noise` (16 bits) below the kept bits, then truncates.
__device__ __forceinline__ u32 stochastically_rounded(float y, u32 noise, int format) {
  const u32 bits = rounded(y, fp32);
  if (format == bf16) return (bits + noise) >> 16;
  if (magnitude_bits(y) >= (127u - 14u) << 23) return rounded(__uint_as_float((bits + (noise >> 3)) & ~0x1FFFu), fp16);
  // Below 2^-14 fp16 is subnormal: its step is 2^-24.
  const float steps = floor_of(__uint_as_float(bits & 0x7FFFFFFFu) * 0x1p24f + noise * 0x1p-16f);
  return rounded(__uint_as_float(__float_as_uint(steps * 0x1p-24f) | (bits & 0x80000000u)), fp16);
}

// The e4m3 code of a finite v. A magnitude above 448 becomes 448. `noise` (16 bits) is used if STOCHASTIC.
__device__ __forceinline__ u32 fp8_code(float v, u32 noise) {
  const u32 bits = magnitude_bits(v), sign = __float_as_uint(v) >> 24 & 0x80u;
  if (bits < (127u - 6u) << 23) {  // subnormal: the step is 2^-9
    const float magnitude = __uint_as_float(bits);
    if (STOCHASTIC) return static_cast<u32>(floor_of(magnitude * 0x1p9f + noise * 0x1p-16f)) | sign;
    return (__float_as_uint(magnitude + 1.5f * 0x1p14f) & 0xFu) | sign;  // 1.5·2^14 has an ulp of 2^-9
  }
  const u32 carry = STOCHASTIC ? noise << 4 : 0x7FFFFu + (bits >> 20 & 1u);
  return static_cast<u32>(lesser((bits + carry - (120u << 23)) >> 20, 0x7E)) | sign;
}

// The int4 code of v, which lies within the levels, as a float. `noise` (16 bits) is used if STOCHASTIC.
__device__ __forceinline__ float int4_code(float v, u32 noise) {
  const float near = v * (9856.0f / 8192 - v * v * (29.0f / 8192)) + 12582912.0f - 12582912.0f;
  if (!STOCHASTIC) return near;
  // `near` is the code of the level below v or of the one above it.
  const float below = level(near) > v ? near - 1.0f : near;
  // The step from there to the next level, exact: that of levels n and n + 1 is (835 + 9·n·(n + 1)) / 1024.
  const float step = (below * below + below) * (9.0f / 1024) + 835.0f / 1024;
  return v - level(below) >= (1.0f - noise * 0x1p-16f) * step ? below + 1.0f : below;
}

// The code of y in a wire with scales. `inverse` is the factor of its block: 0 in a block whose absmax is below 2^-100
// or that holds an Inf or a NaN. In such a block Inf and -Inf become the greatest and the least code, all else 0.
__device__ __forceinline__ u32 quantised(float y, float inverse, u32 noise, int format) {
  const bool inf = magnitude_bits(y) == kInfBits;
  if (inverse == 0.0f && !inf) return 0;
  const float least = least_value(format), greatest = greatest_value(format);
  const float v = !inf ? y * inverse : y > 0.0f ? greatest : least;
  if (format == fp8) return fp8_code(v, noise);
  const bool floored = STOCHASTIC && format != int4;
  const float clamped = fminf(fmaxf(floored ? floor_of(v + noise * 0x1p-16f) : v, least), greatest);
  const float whole = format == int4 ? int4_code(clamped, noise) : clamped;
  return __float_as_uint(whole + 12582912.0f) & (in_pairs(format) ? 0xFu : 0xFFu);
}

// ---- rotation of the 32 elements of a warp

__device__ __forceinline__ float with_sign(float y) {
  return __uint_as_float(__float_as_uint(y) ^ kRotationSigns >> lane() << 31);
}

__device__ __forceinline__ float butterfly(float y) {
#pragma unroll
  for (int step = 1; step < kRun; step *= 2) {
    const float partner = __shfl_xor_sync(kAllLanes, y, step);
    y = lane() & step ? partner - y : y + partner;
  }
  return y;
}

__device__ __forceinline__ float rotate(float y) { return butterfly(with_sign(y)); }
__device__ __forceinline__ float unrotate(float y) { return with_sign(butterfly(y) * (1.0f / kRun)); }
