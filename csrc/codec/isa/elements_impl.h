// The codec's inner loops, written once over a vector type V: single elements here, noise in noise_impl.h, blocks in
// blocks_impl.h. Each <isa>.cpp selects its instruction set, then includes blocks_impl.h, defines its V and makes a
// table. Everything here has internal linkage, so that no other file can be linked to code its machine cannot run. For
// the same reason no function template of std is used.
//
// V provides F (a vector of kLanes floats), broadcast, mul, add, sub, and
//   load(const T*), store(T*, F), stream(T*, F)   T: float, Bf16, Fp16; store rounds to nearest even
//   canonical(F)           NaN → 0x7FC00000, so that instruction sets cannot differ in a NaN's sign and payload
//   finite_or_zero(F)      NaN, ±Inf → 0
//   rounded(T, F, const uint16_t* noise)          T: Bf16, Fp16; rounds stochastically to a value of T
//   N, count(N&, F), total(N)                     N counts elements that are not finite
//   M, track(M&, F)        M holds the greatest magnitude as bits; the bits of Inf and NaN exceed all finite ones
//   greatest(const M*, uint32_t*)                 the bits of kMaxima M at once, hardly slower than of one M
//   kStreamNbytes          the alignment in bytes that stream() needs; 0: V has no stores that bypass the caches
//   fence()                must follow the last stream()
// For 2·kLanes elements at once, where Code is Int8, E4m3 or Int4:
//   load_codes(Code, const uint8_t*, F&, F&)         the values of codes, except NaN and Inf, which are never sent
//   store_codes, stream_codes(Code, uint8_t*, F, F)  nearest even; magnitudes are below kGreatest plus half a step
//   store_codes(Code, uint8_t*, F, F, const uint16_t* noise)  stochastic; fp8 magnitudes exceed kGreatest by ≤ 8 ulps
// For rotations:
//   mix<distance>(F)       (a, b) ← (a + b, a - b) for all pairs of elements that far apart; distance < kLanes
// For noise, where W holds a 32-bit word for each of kCounters counters:
//   word(uint32_t)         the same word for all counters
//   counters(first)        the numbers of the counters, from `first` on
//   multiply(W, uint32_t, W& high, W& low)        the high and low words of the products
//   xor3(W, W, W)          the exclusive or of all three
//   store_noise(uint16_t*, W, W, W, W)            stores one counter after the other, each with its words in order
#pragma once

#include <cstdint>
#include <cstring>

#include "codec/kernel_table.h"

namespace fusedcomm {
namespace {

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

// ---- codes of blocks

struct Int8 {
  using Scale = float;
  static constexpr int kNbits = 8;
  static constexpr float kGreatest = 127.0f;
  static constexpr uint32_t kGreatestCode = 0x7F, kLeastCode = 0x81;  // ±Inf have these codes, too
};

// fp8: 1 sign bit, 7 - kMantissaBits exponent bits. The least normal number is 2^(kExponentShift - 126).
struct E4m3 {
  using Scale = float;
  static constexpr int kNbits = 8;
  static constexpr float kGreatest = 448.0f;
  static constexpr uint32_t kGreatestCode = 0x7E, kLeastCode = 0xFE;
  static constexpr int kMantissaBits = 3;
  // The exponent bias of fp32, 127, less the bias of e4m3, 7.
  static constexpr uint32_t kExponentShift = 120;
  // The bits of 24576 as fp32. An ulp of this number is 2^-9, the step of e4m3's subnormals.
  static constexpr uint32_t kSubnormalBits = 0x46C00000;
};

struct Int4 {
  using Scale = Bf16;
  static constexpr int kNbits = 4;
  static constexpr float kGreatest = 7.0f;
  static constexpr uint32_t kGreatestCode = 0x7, kLeastCode = 0x9;
};

// Constants that turn the bits of an fp32 magnitude into an fp8 code. To nearest even:
//   normal     (bits + kRound + the lowest bit kept) >> kDropped, if bits ≥ kLeastNormalBits
//   subnormal  the bits of (magnitude + the number with kSubnormalBits), less kSubnormalBits
// Stochastically, with 16 bits of noise:
//   normal     (bits + kExponents + (noise << kNoiseShift)) >> kDropped
//   subnormal  floor(magnitude·kStepsInOne + noise·2^-16); the product is exact
template <class Code>
struct Fp8Rounding {
  // Mantissa bits that fp32 has and the code does not.
  static constexpr int kDropped = 23 - Code::kMantissaBits;
  // Half an ulp of the code less one, and the change of the exponent's bias.
  static constexpr uint32_t kRound = (1u << (kDropped - 1)) - 1u - (Code::kExponentShift << 23);
  static constexpr uint32_t kLeastNormalBits = (Code::kExponentShift + 1u) << 23;
  // Moves 16 bits of noise to the top of the dropped bits.
  static constexpr int kNoiseShift = kDropped - 16;
  // The change of the exponent's bias.
  static constexpr uint32_t kExponents = 0u - (Code::kExponentShift << 23);
  // Steps of subnormals in 1.0.
  static constexpr float kStepsInOne = static_cast<float>(1u << (126 - Code::kExponentShift + Code::kMantissaBits));
};

// Mantissa bits that fp32 has and fp16 does not.
constexpr int kFp16Dropped = 13;
// Steps of fp16's subnormals in 1.0: 2^24.
constexpr float kFp16StepsInOne = 16777216.0f;
constexpr float kFp16Step = 1.0f / kFp16StepsInOne;
// fp32 bits of 2^-14, the least normal fp16 number.
constexpr uint32_t kFp16LeastNormalBits = 113u << 23;
// fp32 bits of 2^16, the least power of two beyond the range of fp16.
constexpr uint32_t kFp16OverflowBits = 143u << 23;

// 16 bits of noise times this are in [0, 1).
constexpr float kNoiseUnit = 1.0f / 65536.0f;

// ---- bits

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

// A V of one element: for the portable kernels, which compilers vectorize, and for the tails of every other V's runs.
struct Scalar {
  using F = float;
  using N = uint32_t;
  using M = int32_t;
  static constexpr int kLanes = 1;
  static constexpr int kStreamNbytes = 0;

  static F broadcast(float value) { return value; }
  static F mul(F a, F b) { return a * b; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }

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
  static constexpr int kMaxima = 1;
  static void greatest(const M* m, uint32_t* bits) { *bits = static_cast<uint32_t>(*m); }

  static F finite_or_zero(F value) { return (bits_of(value) & kMagnitudeMask) < kInfBits ? value : 0.0f; }

  static F load(const float* p) { return *p; }
  static F load(const Bf16* p) { return float_of(static_cast<uint32_t>(p->bits) << 16); }

  static F load(const Fp16* p) { return float_of_half(p->bits); }

  // Shifts the fields into place and corrects the exponent. An exact subtraction normalizes a subnormal.
  static F float_of_half(uint32_t half) {
    const uint32_t shifted = (half & 0x7FFFu) << 13;
    const uint32_t exponent = shifted & 0x0F800000u;
    const uint32_t normal = shifted + (112u << 23);
    const uint32_t special = shifted + (224u << 23);
    const uint32_t subnormal = bits_of(float_of(shifted + (113u << 23)) - float_of(113u << 23));
    const uint32_t magnitude = exponent == 0x0F800000u ? special : exponent == 0 ? subnormal : normal;
    return float_of(magnitude | (half & 0x8000u) << 16);
  }

  static void store(float* p, F value) { *p = value; }

  // Adding half an ulp less one, plus the lowest kept bit, carries exactly when rounding to nearest even rounds up.
  static void store(Bf16* p, F value) {
    const uint32_t bits = bits_of(value);
    p->bits = static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
  }

  // Rounds as for bf16. Below 2^-14, adding 0.5 leaves the rounded subnormal in the low bits.
  static void store(Fp16* p, F value) {
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & kMagnitudeMask;
    const uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - (126u << 23);
    const uint32_t special = magnitude > kInfBits ? 0x7E00u : 0x7C00u;
    const uint32_t half = magnitude >= 143u << 23 ? special : magnitude < 113u << 23 ? subnormal : normal;
    p->bits = static_cast<uint16_t>(half | (bits >> 16 & 0x8000u));
  }

  template <class T>
  static void stream(T* p, F value) {
    store(p, value);
  }

  // Adds noise to the bits of a magnitude and truncates. A finite value can carry to Inf, but not beyond.
  static F rounded(Bf16, F value, const uint16_t* noise) {
    const uint32_t bits = bits_of(value);
    return float_of((bits & kMagnitudeMask) < kInfBits ? (bits + *noise) & 0xFFFF0000u : bits);
  }
  static F rounded(Fp16, F value, const uint16_t* noise) {
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & kMagnitudeMask;
    const uint32_t normal = (magnitude + (*noise >> (16 - kFp16Dropped))) >> kFp16Dropped << kFp16Dropped;
    const uint32_t normal_or_inf = normal < kFp16OverflowBits ? normal : kInfBits;
    const float small = magnitude < kFp16LeastNormalBits ? float_of(magnitude) : 0.0f;
    const auto steps = static_cast<int32_t>(small * kFp16StepsInOne + *noise * kNoiseUnit);
    const uint32_t subnormal = bits_of(static_cast<float>(steps) * kFp16Step);
    const uint32_t finite = magnitude < kFp16LeastNormalBits ? subnormal : normal_or_inf;
    return float_of((magnitude < kInfBits ? finite : magnitude) | (bits & ~kMagnitudeMask));
  }

  // 1.5·2^23 has an ulp of 1, so the addition rounds to a whole number, nearest even, and leaves it in the low bits.
  static uint32_t whole(F value) { return bits_of(value + 12582912.0f) - 0x4B400000u; }
  static uint32_t code(Int8, F value) { return whole(value); }
  template <class Code>
  static uint32_t code(Code, F value) {
    using Rounding = Fp8Rounding<Code>;
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & kMagnitudeMask;
    const uint32_t odd = magnitude >> Rounding::kDropped & 1u;
    const uint32_t normal = (magnitude + Rounding::kRound + odd) >> Rounding::kDropped;
    const uint32_t subnormal = bits_of(float_of(magnitude) + float_of(Code::kSubnormalBits)) - Code::kSubnormalBits;
    return (magnitude >= Rounding::kLeastNormalBits ? normal : subnormal) | (bits >> 24 & 0x80u);
  }
  static uint32_t code(Int4, F value) { return whole(value); }

  template <class Code>
  static uint32_t floor_code(F value) {
    constexpr auto kGreatest = static_cast<int32_t>(Code::kGreatest);
    const auto truncated = static_cast<int32_t>(value);
    const int32_t floor = truncated - (static_cast<float>(truncated) > value);
    return static_cast<uint32_t>(floor > kGreatest ? kGreatest : floor < -kGreatest ? -kGreatest : floor);
  }
  static uint32_t code(Int8, F value, uint32_t noise) { return floor_code<Int8>(value + noise_value(noise)); }
  static uint32_t code(Int4, F value, uint32_t noise) { return floor_code<Int4>(value + noise_value(noise)); }
  template <class Code>
  static uint32_t code(Code, F value, uint32_t noise) {
    using Rounding = Fp8Rounding<Code>;
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & kMagnitudeMask;
    const bool is_normal = magnitude >= Rounding::kLeastNormalBits;
    const uint32_t normal = (magnitude + Rounding::kExponents + (noise << Rounding::kNoiseShift)) >> Rounding::kDropped;
    const float small = is_normal ? 0.0f : float_of(magnitude);
    const auto subnormal = static_cast<int32_t>(small * Rounding::kStepsInOne + noise_value(noise));
    return (is_normal ? normal : static_cast<uint32_t>(subnormal)) | (bits >> 24 & 0x80u);
  }
  static F noise_value(uint32_t noise) { return static_cast<float>(static_cast<int32_t>(noise)) * kNoiseUnit; }

  template <class Code>
  static void pack_codes(Code, uint8_t* p, uint32_t first, uint32_t second) {
    p[0] = static_cast<uint8_t>(first);
    p[1] = static_cast<uint8_t>(second);
  }
  static void pack_codes(Int4, uint8_t* p, uint32_t first, uint32_t second) {
    *p = static_cast<uint8_t>((first & 0xFu) | second << 4);
  }
  template <class Code>
  static void store_codes(Code, uint8_t* p, F first, F second) {
    pack_codes(Code(), p, code(Code(), first), code(Code(), second));
  }
  template <class Code>
  static void store_codes(Code, uint8_t* p, F first, F second, const uint16_t* noise) {
    pack_codes(Code(), p, code(Code(), first, noise[0]), code(Code(), second, noise[1]));
  }
  template <class Code>
  static void stream_codes(Code, uint8_t* p, F first, F second) {
    store_codes(Code(), p, first, second);
  }

  static F value(Int8, uint32_t code) { return static_cast<float>(static_cast<int8_t>(code)); }
  // Shifted into the fields of fp16, an e4m3 code gives the value divided by 2^8: the exponent biases are 7 and 15.
  static F value(E4m3, uint32_t code) { return float_of_half((code & 0x80u) << 8 | (code & 0x7Fu) << 7) * 256.0f; }
  template <class Code>
  static void load_codes(Code, const uint8_t* p, F& first, F& second) {
    first = value(Code(), p[0]);
    second = value(Code(), p[1]);
  }
  static void load_codes(Int4, const uint8_t* p, F& first, F& second) {
    first = static_cast<float>(static_cast<int8_t>(*p << 4) >> 4);
    second = static_cast<float>(static_cast<int8_t>(*p) >> 4);
  }

  using W = uint32_t;
  static constexpr int kCounters = 1;
  static W word(uint32_t value) { return value; }
  static W counters(uint32_t first) { return first; }
  static void multiply(W a, uint32_t b, W& high, W& low) {
    const uint64_t product = uint64_t{a} * b;
    high = static_cast<uint32_t>(product >> 32);
    low = static_cast<uint32_t>(product);
  }
  static W xor3(W a, W b, W c) { return a ^ b ^ c; }
  static void store_noise(uint16_t* p, W w0, W w1, W w2, W w3) {
    const W words[4] = {w0, w1, w2, w3};
    for (int i = 0; i < 4; ++i) {
      p[2 * i] = static_cast<uint16_t>(words[i]);
      p[2 * i + 1] = static_cast<uint16_t>(words[i] >> 16);
    }
  }

  static void fence() {}
};

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

template <class V, class Addend>
void add_span(float* data, const Addend* addend, int64_t numel) {
  for (int64_t i = 0; i < numel; i += V::kLanes) {
    V::store(data + i, V::canonical(V::add(V::load(data + i), V::load(addend + i))));
  }
}

template <class V, class Addend>
void add(float* data, const void* addend_data, int64_t numel) {
  const auto* addend = static_cast<const Addend*>(addend_data);
  const int64_t body = numel - numel % V::kLanes;
  add_span<V>(data, addend, body);
  add_span<Scalar>(data + body, addend + body, numel - body);
}

template <class V, class Out>
void subtract_span(const float* value, const float* decoded, Out* out, int64_t numel) {
  for (int64_t i = 0; i < numel; i += V::kLanes) {
    V::store(out + i, V::finite_or_zero(V::sub(V::load(value + i), V::load(decoded + i))));
  }
}

template <class V, class Out>
void subtract(const float* value, const float* decoded, void* out_data, int64_t numel) {
  auto* out = static_cast<Out*>(out_data);
  const int64_t body = numel - numel % V::kLanes;
  subtract_span<V>(value, decoded, out, body);
  subtract_span<Scalar>(value + body, decoded + body, out + body, numel - body);
}

// Sources that one pass over the accumulator adds, with the partial sum in registers. More sources would mean fewer
// passes, but prefetchers follow only so many memory streams at once.
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

}  // namespace
}  // namespace fusedcomm
