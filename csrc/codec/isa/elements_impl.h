// The codec's inner loops, written once over a vector type V: here single elements, in noise_impl.h noise, in
// blocks_impl.h blocks. Each <isa>.cpp includes the last after it has selected its instruction set, defines
// its V and makes a table: everything here has internal linkage, so no other file can end up with code its machine
// cannot run. For the same reason no function template of std is used.
//
// V provides: F (a vector of kLanes floats), broadcast, mul, add, sub,
//   load(const T*), store(T*, F), stream(T*, F)   T: float, Bf16, Fp16; store rounds to nearest even
//   canonical(F)           NaN → 0x7FC00000, so that instruction sets cannot differ in a NaN's sign and payload
//   finite_or_zero(F)      NaN, ±Inf → 0
//   rounded(T, F, const uint16_t* noise)          T: Bf16, Fp16; to a value that T has, stochastically
//   N, count(N&, F)        N counts elements that are not finite; total(N)
//   M, track(M&, F)        M holds the greatest magnitude as bits, where Inf and NaN exceed any finite
//   greatest(const M*, uint32_t*)                 those of kMaxima M, which takes little longer than that of one
//   kStreamNbytes, fence() the alignment that stream() needs (0: it has none), what must follow the last stream()
// and for 2·kLanes elements at once, Code being Int8, E4m3 or Int4:
//   load_codes(Code, const uint8_t*, F&, F&)         values of codes; not those of NaN and Inf, which are never sent
//   store_codes, stream_codes(Code, uint8_t*, F, F)  to nearest even, of values less than half a step beyond kGreatest
//   store_codes(Code, uint8_t*, F, F, const uint16_t* noise)  the same stochastically; fp8 at most 8 ulps beyond
// and mix<distance>(F), distance < kLanes: (a, b) ← (a + b, a - b) for all pairs of elements that far apart
// and for noise, W (a 32-bit word for each of kCounters counters): word(uint32_t) the same for all, counters(first),
//   multiply(W, uint32_t, W& high, W& low)        the words of the product
//   xor3(W, W, W), store_noise(uint16_t*, W, W, W, W)  counter by counter, a counter's words in their order
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
  static constexpr uint32_t kGreatestCode = 0x7F, kLeastCode = 0x81;  // also those of ±Inf
};

// For 1 sign bit, 7 - kMantissaBits exponent bits. Their least normal number is 2^(kExponentShift - 126).
struct E4m3 {
  using Scale = float;
  static constexpr int kNbits = 8;
  static constexpr float kGreatest = 448.0f;
  static constexpr uint32_t kGreatestCode = 0x7E, kLeastCode = 0xFE;
  static constexpr int kMantissaBits = 3;
  static constexpr uint32_t kExponentShift = 120;         // from its exponent to that of fp32
  static constexpr uint32_t kSubnormalBits = 0x46C00000;  // of 24576, where an ulp is the step of subnormals
};

struct Int4 {
  using Scale = Bf16;
  static constexpr int kNbits = 4;
  static constexpr float kGreatest = 7.0f;
  static constexpr uint32_t kGreatestCode = 0x7, kLeastCode = 0x9;
};

// What a V needs to turn the bits of a magnitude into an fp8 code, to nearest even:
//   normal     (bits + kRound + the lowest bit kept) >> kDropped, where bits ≥ kLeastNormalBits
//   subnormal  the bits of (magnitude + kSubnormal) - kSubnormalBits
template <class Code>
struct Fp8Rounding {
  static constexpr int kDropped = 23 - Code::kMantissaBits;
  // Half an ulp less one, and the difference of the exponents.
  static constexpr uint32_t kRound = (1u << (kDropped - 1)) - 1u - (Code::kExponentShift << 23);
  static constexpr uint32_t kLeastNormalBits = (Code::kExponentShift + 1u) << 23;

  // And stochastically, with 16 bits of noise:
  //   normal     (bits + kExponents + (noise << kNoiseShift)) >> kDropped
  //   subnormal  floor(magnitude·kStepsInOne + noise·2^-16); the product is exact
  static constexpr int kNoiseShift = kDropped - 16;
  static constexpr uint32_t kExponents = 0u - (Code::kExponentShift << 23);
  static constexpr float kStepsInOne = static_cast<float>(1u << (126 - Code::kExponentShift + Code::kMantissaBits));
};

// fp16, of which fp32 has these bits more, and in whose step of subnormals these are the numbers.
constexpr int kFp16Dropped = 13;
constexpr float kFp16StepsInOne = 16777216.0f;
constexpr float kFp16Step = 1.0f / kFp16StepsInOne;
constexpr uint32_t kFp16LeastNormalBits = 113u << 23;
constexpr uint32_t kFp16OverflowBits = 143u << 23;

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

  // Shift the fields into place and correct the exponent; a subnormal is normalised by an exact subtraction.
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

  template <class T>
  static void stream(T* p, F value) {
    store(p, value);
  }

  // The bits of a magnitude plus noise, truncated; what is finite cannot carry beyond Inf.
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

  // 1.5·2^23 has an ulp of one, so the addition rounds to a whole number, nearest even, in the low bits.
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
  // The fields of e4m3 are the leading ones of an fp16, but for 2^8 between their exponents.
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

}  // namespace
}  // namespace fusedcomm
