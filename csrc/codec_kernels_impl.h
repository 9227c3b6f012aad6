// The codec's inner loops, written once over a vector type V. Each codec_<isa>.cpp includes this after it has selected
// its instruction set, defines its V and makes a table: everything here has internal linkage, so no other file can end
// up with code its machine cannot run. For the same reason no function template of std is used.
//
// V provides: F (a vector of kLanes floats), broadcast, mul, add,
//   load(const T*), store(T*, F), stream(T*, F)   T: float, Bf16, Fp16; store rounds to nearest even
//   load(const int8_t*), store(int8_t*, F), store_codes and stream_codes(int8_t*, const F[4]) for |value| ≤ 127
//   canonical(F)           NaN → 0x7FC00000, so that instruction sets cannot differ in a NaN's sign and payload
//   N, count(N&, F)        N counts elements that are not finite; total(N)
//   M, track(M&, F)        M holds the greatest magnitude as bits, where Inf and NaN exceed any finite; greatest(M)
//   kStreamNbytes, fence() the alignment that stream() needs (0: it has none), what must follow the last stream()
#include <cstdint>
#include <cstring>

#include "codec_kernels.h"

namespace fusedcomm {
namespace {

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

constexpr uint32_t kInfBits = 0x7F800000u;
constexpr uint32_t kNanBits = 0x7FC00000u;
constexpr uint32_t kMagnitudeMask = 0x7FFFFFFFu;

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// One element at a time: the portable kernels (compilers vectorise them) and every other V's tails.
struct Scalar {
  using F = float;
  using N = uint32_t;
  using M = int32_t;
  static constexpr int kLanes = 1;
  static constexpr int kStreamNbytes = 0;

  static F broadcast(float value) { return value; }
  static F mul(F a, F b) { return a * b; }
  static F add(F a, F b) { return a + b; }

  static F canonical(F value) {
    const uint32_t bits = bits_of(value);
    return float_of((bits & kMagnitudeMask) > kInfBits ? kNanBits : bits);
  }
  static void count(N& n, F value) { n += (bits_of(value) & kMagnitudeMask) >= kInfBits; }
  static int64_t total(N n) { return n; }
  static void track(M& m, F value) {
    const auto magnitude = static_cast<int32_t>(bits_of(value) & kMagnitudeMask);
    m = magnitude > m ? magnitude : m;
  }
  static uint32_t greatest(M m) { return static_cast<uint32_t>(m); }

  static F load(const float* p) { return *p; }
  static F load(const Bf16* p) { return float_of(static_cast<uint32_t>(p->bits) << 16); }
  static F load(const int8_t* p) { return static_cast<float>(*p); }

  // Shift the fields into place and correct the exponent; a subnormal is normalised by an exact subtraction.
  static F load(const Fp16* p) {
    const uint32_t half = p->bits;
    const uint32_t shifted = (half & 0x7FFFu) << 13;
    const uint32_t exponent = shifted & 0x0F800000u;
    const uint32_t normal = shifted + (112u << 23);
    const uint32_t special = shifted + (224u << 23);
    const uint32_t subnormal = bits_of(float_of(shifted + (113u << 23)) - float_of(113u << 23));
    const uint32_t magnitude = exponent == 0x0F800000u ? special : exponent == 0 ? subnormal : normal;
    return float_of(magnitude | (half & 0x8000u) << 16);
  }

  static void store(float* p, F value) { *p = value; }

  // Adding half an ulp less one, plus the lowest kept bit, carries exactly where nearest-even rounds up.
  static void store(Bf16* p, F value) {
    const uint32_t bits = bits_of(value);
    p->bits = static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
  }

  // As for bf16; below 2^-14 the addition of 0.5 leaves the rounded subnormal in the low bits.
  static void store(Fp16* p, F value) {
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & kMagnitudeMask;
    const uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - (126u << 23);
    const uint32_t special = magnitude > kInfBits ? 0x7E00u : 0x7C00u;
    const uint32_t half = magnitude >= 143u << 23 ? special : magnitude < 113u << 23 ? subnormal : normal;
    p->bits = static_cast<uint16_t>(half | (bits >> 16 & 0x8000u));
  }

  // 1.5·2^23 has an ulp of one, so the addition rounds to a whole number, nearest even, in the low bits.
  static void store(int8_t* p, F value) {
    *p = static_cast<int8_t>(static_cast<int32_t>(bits_of(value + 12582912.0f) - 0x4B400000u));
  }

  template <class T>
  static void stream(T* p, F value) {
    store(p, value);
  }
  static void store_codes(int8_t* p, const F* values) {
    for (int k = 0; k < 4; ++k) store(p + k, values[k]);
  }
  static void stream_codes(int8_t* p, const F* values) { store_codes(p, values); }
  static void fence() {}
};

// Blocks of smaller values become zeros: keeps 1/absmax and scale/127 clear of overflow and of denormals.
constexpr uint32_t kLeastAbsmaxBits = (127u - 100u) << 23;  // 2^-100

template <class V>
bool suits_streaming(const void* p) {
  return V::kStreamNbytes != 0 && reinterpret_cast<uintptr_t>(p) % (V::kStreamNbytes ? V::kStreamNbytes : 1) == 0;
}

template <bool kStreamed, class V, class T>
inline void put(T* p, typename V::F value) {
  if (kStreamed) {
    V::stream(p, value);
  } else {
    V::store(p, value);
  }
}

// ---- elementwise

template <class V, class Src, class Dst, bool kStreamed>
int64_t convert_span(const Src* __restrict src, Dst* __restrict dst, int64_t numel, float scale) {
  const typename V::F factor = V::broadcast(scale);
  typename V::N nonfinite{};
  for (int64_t i = 0; i < numel; i += V::kLanes) {
    const typename V::F y = V::mul(V::load(src + i), factor);
    V::count(nonfinite, y);
    put<kStreamed, V>(dst + i, V::canonical(y));
  }
  return V::total(nonfinite);
}

template <class V, class Src, class Dst>
int64_t convert(const void* src_data, void* dst_data, int64_t numel, float scale, bool streamed) {
  const auto* src = static_cast<const Src*>(src_data);
  auto* dst = static_cast<Dst*>(dst_data);
  const int64_t body = numel - numel % V::kLanes;
  int64_t nonfinite;
  if (streamed && suits_streaming<V>(dst)) {
    nonfinite = convert_span<V, Src, Dst, true>(src, dst, body, scale);
    V::fence();
  } else {
    nonfinite = convert_span<V, Src, Dst, false>(src, dst, body, scale);
  }
  return nonfinite + convert_span<Scalar, Src, Dst, false>(src + body, dst + body, numel - body, scale);
}

template <class V, class T>
int64_t scale_span(T* data, int64_t numel, float scale) {
  const typename V::F factor = V::broadcast(scale);
  typename V::N nonfinite{};
  for (int64_t i = 0; i < numel; i += V::kLanes) {
    const typename V::F y = V::mul(V::load(data + i), factor);
    V::count(nonfinite, y);
    V::store(data + i, V::canonical(y));
  }
  return V::total(nonfinite);
}

template <class V, class T>
int64_t scale_elements(void* data, int64_t numel, float scale) {
  auto* elements = static_cast<T*>(data);
  const int64_t body = numel - numel % V::kLanes;
  return scale_span<V>(elements, body, scale) + scale_span<Scalar>(elements + body, numel - body, scale);
}

// Sources are added a few at a time, the partial sum in registers: each pass over the accumulator serves kGroup
// sources, and no more streams run at once than prefetchers follow.
constexpr int kGroup = 4;

// acc = (kFirst ? source 0 : acc + source 0) + source 1 + … + source kCount-1
template <class V, class Src, int kCount, bool kFirst>
void sum_group(const char* src, int64_t stride_nbytes, float* __restrict acc, int64_t numel) {
  const Src* sources[kCount];
  for (int k = 0; k < kCount; ++k) sources[k] = reinterpret_cast<const Src*>(src + k * stride_nbytes);
  for (int64_t i = 0; i < numel; i += V::kLanes) {
    typename V::F sum = V::load(sources[0] + i);
    if (!kFirst) sum = V::add(V::load(acc + i), sum);
    for (int k = 1; k < kCount; ++k) sum = V::add(sum, V::load(sources[k] + i));
    V::store(acc + i, sum);
  }
}

template <class V, class Src, bool kFirst>
void sum_up_to_group(const char* src, int64_t stride_nbytes, int64_t count, float* acc, int64_t numel) {
  switch (count) {
    case 1:
      return sum_group<V, Src, 1, kFirst>(src, stride_nbytes, acc, numel);
    case 2:
      return sum_group<V, Src, 2, kFirst>(src, stride_nbytes, acc, numel);
    case 3:
      return sum_group<V, Src, 3, kFirst>(src, stride_nbytes, acc, numel);
    default:
      return sum_group<V, Src, kGroup, kFirst>(src, stride_nbytes, acc, numel);
  }
}

template <class V, class Src>
void sum_span(const char* src, int64_t stride_nbytes, int64_t num_srcs, float* acc, int64_t numel) {
  sum_up_to_group<V, Src, true>(src, stride_nbytes, num_srcs, acc, numel);
  for (int64_t k = kGroup; k < num_srcs; k += kGroup) {
    sum_up_to_group<V, Src, false>(src + k * stride_nbytes, stride_nbytes, num_srcs - k, acc, numel);
  }
}

template <class V, class Src>
void sum(const void* src, int64_t stride_nbytes, int64_t num_srcs, float* acc, int64_t numel) {
  const auto* bytes = static_cast<const char*>(src);
  const int64_t body = numel - numel % V::kLanes;
  if (body > 0) sum_span<V, Src>(bytes, stride_nbytes, num_srcs, acc, body);
  if (body < numel) {
    sum_span<Scalar, Src>(bytes + body * static_cast<int64_t>(sizeof(Src)), stride_nbytes, num_srcs, acc + body,
                          numel - body);
  }
}

// ---- block-int8; every block is a multiple of kLanes

// Out of the way of the loop: the codes say ±Inf or not, and 0·Inf makes the rest NaN again.
template <class Src>
__attribute__((noinline)) int64_t quantize_nonfinite_block(const Src* src, float* block_scale, int8_t* codes,
                                                           int64_t block_numel, float scale) {
  int64_t nonfinite = 0;
  *block_scale = float_of(kInfBits);
  for (int64_t i = 0; i < block_numel; ++i) {
    const uint32_t bits = bits_of(Scalar::load(src + i) * scale);
    const uint32_t magnitude = bits & kMagnitudeMask;
    nonfinite += magnitude >= kInfBits;
    codes[i] = magnitude != kInfBits ? 0 : bits == kInfBits ? 127 : -127;
  }
  return nonfinite;
}

// |code| ≤ 127: |y| ≤ absmax and inverse ≤ (127/absmax)(1 + 2^-24), so |y·inverse| ≤ 127(1 + 2^-24)² < 127.5.
template <class V, class Src, bool kStreamed>
int64_t quantize_blocks(const Src* __restrict src, float* __restrict scales, int8_t* __restrict codes,
                        int64_t num_blocks, int64_t block_numel, float scale) {
  const typename V::F factor = V::broadcast(scale);
  int64_t nonfinite = 0;
  for (int64_t block = 0; block < num_blocks; ++block, src += block_numel, codes += block_numel) {
    typename V::M magnitude{};
    for (int64_t i = 0; i < block_numel; i += V::kLanes) V::track(magnitude, V::mul(V::load(src + i), factor));
    const uint32_t absmax_bits = V::greatest(magnitude);
    if (absmax_bits - kLeastAbsmaxBits < kInfBits - kLeastAbsmaxBits) {
      const float absmax = float_of(absmax_bits);
      scales[block] = absmax / 127.0f;
      const typename V::F inverse = V::broadcast(127.0f / absmax);
      int64_t i = 0;
      for (; i + 4 * V::kLanes <= block_numel; i += 4 * V::kLanes) {
        typename V::F y[4];
        for (int k = 0; k < 4; ++k) y[k] = V::mul(V::mul(V::load(src + i + k * V::kLanes), factor), inverse);
        if (kStreamed) {
          V::stream_codes(codes + i, y);
        } else {
          V::store_codes(codes + i, y);
        }
      }
      for (; i < block_numel; i += V::kLanes) {
        V::store(codes + i, V::mul(V::mul(V::load(src + i), factor), inverse));
      }
    } else if (absmax_bits >= kInfBits) {
      nonfinite += quantize_nonfinite_block(src, scales + block, codes, block_numel, scale);
    } else {
      scales[block] = 0;
      std::memset(codes, 0, static_cast<size_t>(block_numel));
    }
  }
  return nonfinite;
}

template <class V, class Src>
int64_t quantize(const void* src_data, float* scales, int8_t* codes, int64_t num_blocks, int64_t block_numel,
                 float scale, bool streamed) {
  const auto* src = static_cast<const Src*>(src_data);
  if (streamed && suits_streaming<V>(codes)) {
    const int64_t nonfinite = quantize_blocks<V, Src, true>(src, scales, codes, num_blocks, block_numel, scale);
    V::fence();
    return nonfinite;
  }
  return quantize_blocks<V, Src, false>(src, scales, codes, num_blocks, block_numel, scale);
}

template <class V, class Dst, bool kStreamed>
inline void dequantize_span(float block_scale, const int8_t* __restrict codes, Dst* __restrict dst, int64_t numel,
                            float factor) {
  const typename V::F scale_v = V::broadcast(block_scale);
  const typename V::F factor_v = V::broadcast(factor);
  for (int64_t i = 0; i < numel; i += V::kLanes) {
    put<kStreamed, V>(dst + i, V::canonical(V::mul(V::mul(V::load(codes + i), scale_v), factor_v)));
  }
}

template <class V, class Dst, bool kStreamed>
void dequantize_blocks(const float* __restrict scales, const int8_t* __restrict codes, Dst* __restrict dst,
                       int64_t numel, int64_t block_numel, float factor) {
  for (; numel >= block_numel; numel -= block_numel, codes += block_numel, dst += block_numel) {
    dequantize_span<V, Dst, kStreamed>(*scales++, codes, dst, block_numel, factor);
  }
  if (numel > 0) {
    const int64_t body = numel - numel % V::kLanes;
    dequantize_span<V, Dst, kStreamed>(*scales, codes, dst, body, factor);
    dequantize_span<Scalar, Dst, false>(*scales, codes + body, dst + body, numel - body, factor);
  }
}

template <class V, class Dst>
void dequantize(const float* scales, const int8_t* codes, void* dst_data, int64_t numel, int64_t block_numel,
                float factor, bool streamed) {
  auto* dst = static_cast<Dst*>(dst_data);
  if (streamed && suits_streaming<V>(dst)) {
    dequantize_blocks<V, Dst, true>(scales, codes, dst, numel, block_numel, factor);
    V::fence();
  } else {
    dequantize_blocks<V, Dst, false>(scales, codes, dst, numel, block_numel, factor);
  }
}

template <class V, int kCount, bool kFirst>
void sum_int8_group(const char* scales, const char* codes, int64_t stride_nbytes, float* __restrict acc,
                    int64_t num_blocks, int64_t block_numel) {
  for (int64_t block = 0; block < num_blocks; ++block, codes += block_numel, acc += block_numel) {
    typename V::F scale[kCount];
    for (int k = 0; k < kCount; ++k) {
      scale[k] = V::broadcast(reinterpret_cast<const float*>(scales + k * stride_nbytes)[block]);
    }
    for (int64_t i = 0; i < block_numel; i += V::kLanes) {
      const auto* code = reinterpret_cast<const int8_t*>(codes + i);
      typename V::F sum = V::mul(V::load(code), scale[0]);
      if (!kFirst) sum = V::add(V::load(acc + i), sum);
      for (int k = 1; k < kCount; ++k) sum = V::add(sum, V::mul(V::load(code + k * stride_nbytes), scale[k]));
      V::store(acc + i, sum);
    }
  }
}

template <class V, bool kFirst>
void sum_int8_up_to_group(const char* scales, const char* codes, int64_t stride_nbytes, int64_t count, float* acc,
                          int64_t num_blocks, int64_t block_numel) {
  switch (count) {
    case 1:
      return sum_int8_group<V, 1, kFirst>(scales, codes, stride_nbytes, acc, num_blocks, block_numel);
    case 2:
      return sum_int8_group<V, 2, kFirst>(scales, codes, stride_nbytes, acc, num_blocks, block_numel);
    case 3:
      return sum_int8_group<V, 3, kFirst>(scales, codes, stride_nbytes, acc, num_blocks, block_numel);
    default:
      return sum_int8_group<V, kGroup, kFirst>(scales, codes, stride_nbytes, acc, num_blocks, block_numel);
  }
}

template <class V>
void sum_int8(const void* scales_data, const void* codes_data, int64_t stride_nbytes, int64_t num_srcs, float* acc,
              int64_t num_blocks, int64_t block_numel) {
  const auto* scales = static_cast<const char*>(scales_data);
  const auto* codes = static_cast<const char*>(codes_data);
  sum_int8_up_to_group<V, true>(scales, codes, stride_nbytes, num_srcs, acc, num_blocks, block_numel);
  for (int64_t k = kGroup; k < num_srcs; k += kGroup) {
    const int64_t offset = k * stride_nbytes;
    sum_int8_up_to_group<V, false>(scales + offset, codes + offset, stride_nbytes, num_srcs - k, acc, num_blocks,
                                   block_numel);
  }
}

template <class V>
constexpr KernelTable make_table(const char* isa) {
  return {isa,
          {{convert<V, float, float>, convert<V, float, Bf16>, convert<V, float, Fp16>},
           {convert<V, Bf16, float>, convert<V, Bf16, Bf16>, convert<V, Bf16, Fp16>},
           {convert<V, Fp16, float>, convert<V, Fp16, Bf16>, convert<V, Fp16, Fp16>}},
          {scale_elements<V, float>, scale_elements<V, Bf16>, scale_elements<V, Fp16>},
          {quantize<V, float>, quantize<V, Bf16>, quantize<V, Fp16>},
          {dequantize<V, float>, dequantize<V, Bf16>, dequantize<V, Fp16>},
          {sum<V, float>, sum<V, Bf16>, sum<V, Fp16>},
          sum_int8<V>};
}

}  // namespace
}  // namespace fusedcomm
