// The formats of single elements: gradients' formats, the codes of quantizing wires, and Scalar, the vector type of one
// element, which has the arithmetic of all of them. See elements_impl.h for what a vector type provides.
//
// A wire with scales has a code here: a struct of constants, Scalar's `code`, to nearest even, and `value`, and a place
// in AllCodes.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "codec/kernel_table.h"

namespace fusedcomm {
namespace {

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

// ---- codes of blocks: elements of a wire with scales

struct Int8 {
  static constexpr Wire kWire = Wire::kInt8;
  using Scale = float;
  static constexpr int kNbits = 8;
  static constexpr bool kSignedScale = false;
  static constexpr float kGreatest = 127.0f;
  static constexpr uint32_t kGreatestCode = 0x7F, kLeastCode = 0x81;  // ±Inf have these codes, too
};

// fp8: 1 sign bit, 7 - kMantissaBits exponent bits. The least normal number is 2^(kExponentShift - 126).
struct E4m3 {
  static constexpr Wire kWire = Wire::kFp8;
  using Scale = float;
  static constexpr int kNbits = 8;
  static constexpr bool kSignedScale = false;
  static constexpr float kGreatest = 448.0f;
  static constexpr uint32_t kGreatestCode = 0x7E, kLeastCode = 0xFE;
  static constexpr int kMantissaBits = 3;
  // The exponent bias of fp32, 127, less the bias of e4m3, 7.
  static constexpr uint32_t kExponentShift = 120;
  // The bits of 24576 as fp32. An ulp of this number is 2^-9, the step of e4m3's subnormals.
  static constexpr uint32_t kSubnormalBits = 0x46C00000;
};

// Code c, from -8 to 7, has the value c·(832 + 3·c²) / 1024, the level of c: steps grow from 0.8 at zero to 1.3 at -8.
// The scale's sign is chosen so that the element of greatest magnitude has the code -8, which has no opposite.
struct Int4 {
  static constexpr Wire kWire = Wire::kInt4;
  using Scale = Bf16;
  static constexpr int kNbits = 4;
  static constexpr bool kSignedScale = true;
  // The levels of -8 and 7.
  static constexpr float kLeast = -8.0f, kGreatest = 6853.0f / 1024.0f;
  static constexpr uint32_t kGreatestCode = 0x7, kLeastCode = 0x8;
  // level(c) = c·(kLinear + kCubic·c²). All of it is exact, so fusing operations changes nothing.
  static constexpr float kLinear = 832.0f / 1024.0f, kCubic = 3.0f / 1024.0f;
  // The code of y is y·(kInverseLinear - kInverseCubic·y²), rounded: hardly ever another than that of the nearest
  // level.
  static constexpr float kInverseLinear = 9856.0f / 8192.0f, kInverseCubic = 29.0f / 8192.0f;
};

template <class... Code>
struct CodeList {};

// The code of every wire with scales, in the order of their BlockKernels.
using AllCodes = CodeList<Int8, E4m3, Int4>;

// Bytes of the codes of `numel` elements; for an element that is not the first of its byte, the byte's index.
template <class Code>
constexpr int64_t code_nbytes(int64_t numel) {
  return numel * Code::kNbits / 8;
}

// The code of element i. The bits above it are zeros.
template <class Code>
inline uint32_t code_at(const uint8_t* codes, int64_t i) {
  return codes[code_nbytes<Code>(i)] >> (i * Code::kNbits % 8) & ((1u << Code::kNbits) - 1u);
}

// Stores the lowest bits of `count` codes, which fill whole bytes: the first element of a byte in its lowest bits.
template <class Code>
inline void pack(uint8_t* p, const uint32_t* codes, int count) {
  constexpr int kPerByte = 8 / Code::kNbits;
  for (int first = 0; first < count; first += kPerByte) {
    uint32_t byte = 0;
    for (int k = 0; k < kPerByte; ++k) {
      byte |= (codes[first + k] & ((1u << Code::kNbits) - 1u)) << (k * Code::kNbits);
    }
    *p++ = static_cast<uint8_t>(byte);
  }
}

// Constants that turn the bits of an fp32 magnitude into an fp8 code. To nearest even:
//   normal     (bits + kRound + the lowest bit kept) >> kDropped, if bits ≥ kLeastNormalBits
//   subnormal  the bits of (magnitude + the number with kSubnormalBits), less kSubnormalBits
template <class Code>
struct Fp8Rounding {
  // Mantissa bits that fp32 has and the code does not.
  static constexpr int kDropped = 23 - Code::kMantissaBits;
  // Half an ulp of the code less one, and the change of the exponent's bias.
  static constexpr uint32_t kRound = (1u << (kDropped - 1)) - 1u - (Code::kExponentShift << 23);
  static constexpr uint32_t kLeastNormalBits = (Code::kExponentShift + 1u) << 23;
};

// ---- bits

constexpr uint32_t kInfBits = 0x7F800000u;
constexpr uint32_t kNanBits = 0x7FC00000u;
constexpr uint32_t kMagnitudeMask = 0x7FFFFFFFu;
// The greatest finite bf16 number, 2^128 - 2^120, as fp32 bits.
constexpr uint32_t kBf16GreatestBits = 0x7F7F0000u;

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
  using M = uint32_t;
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
    // Compared as signed numbers, for which every instruction set has an instruction.
    const auto magnitude = static_cast<int32_t>(bits_of(value) & kMagnitudeMask);
    m = static_cast<uint32_t>(magnitude > static_cast<int32_t>(m) ? magnitude : static_cast<int32_t>(m));
  }
  static void track_signed(M& m, F value) {
    const uint32_t turned = bits_of(value) << 1 | bits_of(value) >> 31;
    m = turned > m ? turned : m;
  }
  static constexpr int kMaxima = 1;
  static void greatest(const M* m, uint32_t* bits) { *bits = *m; }

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
  // A code of 8 becomes 7, without a branch.
  static uint32_t code(Int4, F value) {
    const uint32_t code = whole(compressed(value));
    return code + static_cast<uint32_t>((7 - static_cast<int32_t>(code)) >> 31);
  }
  static F compressed(F value) { return value * (Int4::kInverseLinear - value * value * Int4::kInverseCubic); }
  static constexpr F level(F code) { return code * (Int4::kLinear + code * code * Int4::kCubic); }

  template <class Code>
  static void store_codes(Code, uint8_t* p, F first, F second) {
    const uint32_t codes[] = {code(Code(), first), code(Code(), second)};
    pack<Code>(p, codes, 2);
  }
  template <class Code>
  static void stream_codes(Code, uint8_t* p, F first, F second) {
    store_codes(Code(), p, first, second);
  }

  static F value(Int8, uint32_t code) { return static_cast<float>(static_cast<int8_t>(code)); }
  // Shifted into the fields of fp16, an e4m3 code gives the value divided by 2^8: the exponent biases are 7 and 15.
  static F value(E4m3, uint32_t code) { return float_of_half((code & 0x80u) << 8 | (code & 0x7Fu) << 7) * 256.0f; }
  static F value(Int4, uint32_t code) { return level(number(code)); }
  static F number(uint32_t code) { return static_cast<float>(static_cast<int8_t>(code << 4) >> 4); }
  template <class Code>
  static void load_codes(Code, const uint8_t* p, F& first, F& second) {
    first = value(Code(), code_at<Code>(p, 0));
    second = value(Code(), code_at<Code>(p, 1));
  }

  // The scale, which has 8 bits, is multiplied into the level's coefficients: all of it stays exact.
  static F scaled_level(F code, F scale) {
    return code * (code * code * (scale * Int4::kCubic) + scale * Int4::kLinear);
  }
  static void load_scaled_codes(Int4, const uint8_t* p, F scale, F& first, F& second) {
    first = scaled_level(number(*p & 0xFu), scale);
    second = scaled_level(number(*p >> 4), scale);
  }

  static void fence() {}
};

// ---- the codes of a vector type

// Whether V has load_scaled_codes and add_scaled_codes for Code.
template <class V, class Code, class = void>
constexpr bool kLoadsScaled = false;
template <class V, class Code>
constexpr bool kLoadsScaled<
    V, Code,
    std::void_t<decltype(V::load_scaled_codes(Code(), nullptr, typename V::F(), std::declval<typename V::F&>(),
                                              std::declval<typename V::F&>()))>> = true;
template <class V, class Code, class = void>
constexpr bool kAddsScaled = false;
template <class V, class Code>
constexpr bool kAddsScaled<
    V, Code,
    std::void_t<decltype(V::add_scaled_codes(Code(), nullptr, typename V::F(), std::declval<typename V::F&>(),
                                             std::declval<typename V::F&>()))>> = true;

// How V reads, times their block's scale, and writes 2·kLanes elements of Code. They are read from element i on.
template <class V, class Code>
struct CodesOf {
  using F = typename V::F;
  static void load(const uint8_t* codes, int64_t i, F scale, F& first, F& second) {
    const uint8_t* const p = codes + code_nbytes<Code>(i);
    if constexpr (kLoadsScaled<V, Code>) {
      V::load_scaled_codes(Code(), p, scale, first, second);
    } else {
      V::load_codes(Code(), p, first, second);
      first = V::mul(first, scale);
      second = V::mul(second, scale);
    }
  }
  static void store(uint8_t* p, F first, F second) { V::store_codes(Code(), p, first, second); }
  static void stream(uint8_t* p, F first, F second) { V::stream_codes(Code(), p, first, second); }
};

}  // namespace
}  // namespace fusedcomm
