// The codec's inner loops, written once over a vector type V: single elements here, blocks in
// blocks_impl.h. Each <isa>.cpp selects its instruction set, then includes blocks_impl.h, defines its V and makes a
// table. Everything here has internal linkage, so that no other file can be linked to code its machine cannot run. For
// the same reason no function template of std is used.
//
// V provides F (a vector of kLanes floats), broadcast, mul, add, sub, and
//   load(const T*), store(T*, F), stream(T*, F)   T: float, Bf16, Fp16; store rounds to nearest even
//   canonical(F)           NaN → 0x7FC00000, so that instruction sets cannot differ in a NaN's sign and payload
//   finite_or_zero(F)      NaN, ±Inf → 0
//   N, count(N&, F), total(N)                     N counts elements that are not finite
//   M, track(M&, F)        M holds the greatest magnitude as bits; the bits of Inf and NaN exceed all finite ones
//   track_signed(M&, F)    M holds the greatest of the bits turned left by one, so that the sign is the lowest bit: the
//                          element of greatest magnitude, and of two with different signs the negative one
//   greatest(const M*, uint32_t*)                 what kMaxima M hold, at once: hardly slower than of one M
//   kStreamNbytes          the alignment in bytes that stream() needs; 0: V has no stores that bypass the caches
//   fence()                must follow the last stream()
// For 2·kLanes elements of each code:
//   load_codes(Code, const uint8_t*, F&, F&)         the values of codes, except NaN and Inf, which are never sent
//   load_scaled_codes(Code, const uint8_t*, F, F&, F&)  instead of load_codes: the values times a scale
//   add_scaled_codes(Code, const uint8_t*, F, F&, F&)   besides, if it is faster: adds these
//   store_codes, stream_codes(Code, uint8_t*, F, F)  nearest even; magnitudes are below kGreatest plus half a step,
//                                                    in int4 below 8.04; a code of 8 becomes 7
#pragma once

#include <cstdint>
#include <cstring>

#include "codec/isa/scalar_impl.h"

namespace fusedcomm {
namespace {

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

template <class V>
int64_t scale_span(float* data, int64_t numel, float scale) {
  const typename V::F factor = V::broadcast(scale);
  typename V::N nonfinite{};
  for (int64_t i = 0; i < numel; i += V::kLanes) {
    const typename V::F y = V::mul(V::load(data + i), factor);
    V::count(nonfinite, y);
    V::store(data + i, V::canonical(y));
  }
  return V::total(nonfinite);
}

template <class V>
int64_t scale_elements(float* data, int64_t numel, float scale) {
  const int64_t body = numel - numel % V::kLanes;
  return scale_span<V>(data, body, scale) + scale_span<Scalar>(data + body, numel - body, scale);
}

template <class V>
void add_span(float* data, const float* addend, int64_t numel) {
  for (int64_t i = 0; i < numel; i += V::kLanes) {
    V::store(data + i, V::canonical(V::add(V::load(data + i), V::load(addend + i))));
  }
}

template <class V>
void add(float* data, const float* addend, int64_t numel) {
  const int64_t body = numel - numel % V::kLanes;
  add_span<V>(data, addend, body);
  add_span<Scalar>(data + body, addend + body, numel - body);
}

template <class V>
void subtract_span(const float* value, const float* decoded, float* out, int64_t numel) {
  for (int64_t i = 0; i < numel; i += V::kLanes) {
    V::store(out + i, V::finite_or_zero(V::sub(V::load(value + i), V::load(decoded + i))));
  }
}

template <class V>
void subtract(const float* value, const float* decoded, float* out, int64_t numel) {
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
