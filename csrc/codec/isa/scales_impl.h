// The scale of a block, from its element of greatest magnitude; see elements_impl.h.
#pragma once

#include "codec/isa/elements_impl.h"

namespace fusedcomm {
namespace {

// A block's top is what V::greatest gives: the bits of its absmax, or with a signed scale those of its element of
// greatest magnitude, turned left by one.
template <class Code>
inline uint32_t absmax_bits(uint32_t top) {
  return Code::kSignedScale ? top >> 1 : top;
}

template <class V, class Code>
[[gnu::always_inline]] inline void track(typename V::M& m, typename V::F value) {
  if constexpr (Code::kSignedScale) {
    V::track_signed(m, value);
  } else {
    V::track(m, value);
  }
}

template <class Code>
inline void set_scale(uint32_t top, float* scale, float* inverse) {
  const float absmax = float_of(top);
  *scale = absmax / Code::kGreatest;
  *inverse = Code::kGreatest / absmax;
}

// The element of greatest magnitude gets the least code, -8.
template <class Code>
inline void set_scale(uint32_t top, Bf16* scale, float* inverse) {
  static_assert(Code::kSignedScale);
  const uint32_t absmax = top >> 1 < kBf16GreatestBits ? top >> 1 : kBf16GreatestBits;
  const uint32_t sign = (~top & 1u) << 31;
  Scalar::store(scale, float_of(absmax | sign) * (-1.0f / Code::kLeast));
  *inverse = 1.0f / Scalar::load(scale);
}

}  // namespace
}  // namespace fusedcomm
