// Kernels for x86 with AVX-512 F, BW, DQ and VL (servers since 2017).
#include "codec_kernels.h"

#if defined(__x86_64__)

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC's own header, until GCC 13: its bug 105593
#endif

// Everything that others may share is included before the instruction set is selected.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

#include "codec_kernels_impl.h"

namespace fusedcomm {
namespace {

struct Avx512 {
  using F = __m512;
  using N = __m512i;
  using M = __m512i;
  static constexpr int kLanes = 16;
  static constexpr int kStreamNbytes = 64;

  static F broadcast(float value) { return _mm512_set1_ps(value); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }

  static F canonical(F value) {
    return _mm512_mask_mov_ps(value, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q),
                              _mm512_castsi512_ps(_mm512_set1_epi32(kNanBits)));
  }

  static void count(N& n, F value) {
    constexpr int kNanOrInf = 0x01 | 0x08 | 0x10 | 0x80;  // quiet NaN, +Inf, -Inf, signalling NaN
    n = _mm512_mask_add_epi32(n, _mm512_fpclass_ps_mask(value, kNanOrInf), n, _mm512_set1_epi32(1));
  }
  static int64_t total(N n) {
    alignas(64) uint32_t lanes[kLanes];
    _mm512_store_si512(lanes, n);
    int64_t sum = 0;
    for (uint32_t lane : lanes) sum += lane;
    return sum;
  }
  static void track(M& m, F value) {
    m = _mm512_max_epi32(m, _mm512_and_si512(_mm512_castps_si512(value), _mm512_set1_epi32(kMagnitudeMask)));
  }
  static uint32_t greatest(M m) { return static_cast<uint32_t>(_mm512_reduce_max_epi32(m)); }

  static __m256i load_256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load(const Bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_256(p)), 16));
  }
  static F load(const Fp16* p) { return _mm512_cvtph_ps(load_256(p)); }
  static F load(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }

  // The machine's own bf16 conversion flushes denormals, so not that.
  static __m256i to_bf16(F value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  }
  static __m256i to_fp16(F value) { return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static __m128i to_int8(F value) { return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(value)); }

  static void store(float* p, F value) { _mm512_storeu_ps(p, value); }
  static void store(Bf16* p, F value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(value)); }
  static void store(Fp16* p, F value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_fp16(value)); }
  static void store(int8_t* p, F value) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_int8(value)); }

  static void stream(float* p, F value) { _mm512_stream_ps(p, value); }
  static void stream(Bf16* p, F value) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), to_bf16(value)); }
  static void stream(Fp16* p, F value) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), to_fp16(value)); }

  static __m512i to_codes(const F* values) {
    const __m512i low = _mm512_packs_epi32(_mm512_cvtps_epi32(values[0]), _mm512_cvtps_epi32(values[1]));
    const __m512i high = _mm512_packs_epi32(_mm512_cvtps_epi32(values[2]), _mm512_cvtps_epi32(values[3]));
    // The packs work within quarters, which leaves runs of four codes to be put in order.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
  }
  static void store_codes(int8_t* p, const F* values) { _mm512_storeu_si512(p, to_codes(values)); }
  static void stream_codes(int8_t* p, const F* values) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), to_codes(values));
  }

  static void fence() { _mm_sfence(); }
};

constexpr KernelTable kTable = make_table<Avx512>("avx512");

}  // namespace
}  // namespace fusedcomm

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace fusedcomm {

const KernelTable* avx512_kernels() {
  const bool supported = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return supported ? &kTable : nullptr;
}

}  // namespace fusedcomm

#else

namespace fusedcomm {
const KernelTable* avx512_kernels() { return nullptr; }
}  // namespace fusedcomm

#endif
