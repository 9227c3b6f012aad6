// Kernels for x86 with AVX2 and F16C (2013 and later).
#include "codec_kernels.h"

#if defined(__x86_64__)

// Everything that others may share is included before the instruction set is selected.
#include <cpuid.h>
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif

#include "codec_kernels_impl.h"

namespace fusedcomm {
namespace {

struct Avx2 {
  using F = __m256;
  using N = __m256i;
  using M = __m256i;
  static constexpr int kLanes = 8;
  static constexpr int kStreamNbytes = 32;

  static F broadcast(float value) { return _mm256_set1_ps(value); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }

  static F canonical(F value) {
    return _mm256_blendv_ps(value, _mm256_castsi256_ps(_mm256_set1_epi32(kNanBits)),
                            _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  }

  static __m256i magnitude(F value) {
    return _mm256_and_si256(_mm256_castps_si256(value), _mm256_set1_epi32(kMagnitudeMask));
  }
  static void count(N& n, F value) {
    n = _mm256_sub_epi32(n, _mm256_cmpgt_epi32(magnitude(value), _mm256_set1_epi32(kInfBits - 1)));
  }
  static int64_t total(N n) {
    alignas(32) uint32_t lanes[kLanes];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), n);
    int64_t sum = 0;
    for (uint32_t lane : lanes) sum += lane;
    return sum;
  }
  static void track(M& m, F value) { m = _mm256_max_epi32(m, magnitude(value)); }
  static uint32_t greatest(M m) {
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(2, 3, 0, 1)));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(four));
  }

  static __m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load(const Bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p)), 16));
  }
  static F load(const Fp16* p) { return _mm256_cvtph_ps(load_128(p)); }
  static F load(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }

  static __m128i to_bf16(F value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
  }
  static __m128i to_fp16(F value) { return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static __m128i to_int8(F value) {  // in the low half
    const __m256i whole = _mm256_cvtps_epi32(value);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    return _mm_packs_epi16(words, words);
  }

  static void store(float* p, F value) { _mm256_storeu_ps(p, value); }
  static void store(Bf16* p, F value) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bf16(value)); }
  static void store(Fp16* p, F value) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_fp16(value)); }
  static void store(int8_t* p, F value) { _mm_storel_epi64(reinterpret_cast<__m128i*>(p), to_int8(value)); }

  static void stream(float* p, F value) { _mm256_stream_ps(p, value); }
  static void stream(Bf16* p, F value) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), to_bf16(value)); }
  static void stream(Fp16* p, F value) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), to_fp16(value)); }

  static __m256i to_codes(const F* values) {
    const __m256i low = _mm256_packs_epi32(_mm256_cvtps_epi32(values[0]), _mm256_cvtps_epi32(values[1]));
    const __m256i high = _mm256_packs_epi32(_mm256_cvtps_epi32(values[2]), _mm256_cvtps_epi32(values[3]));
    // The packs work within halves, which leaves runs of four codes to be put in order.
    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  static void store_codes(int8_t* p, const F* values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_codes(values));
  }
  static void stream_codes(int8_t* p, const F* values) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), to_codes(values));
  }

  static void fence() { _mm_sfence(); }
};

constexpr KernelTable kTable = make_table<Avx2>("avx2");

}  // namespace
}  // namespace fusedcomm

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace fusedcomm {

const KernelTable* avx2_kernels() {
  unsigned eax, ebx, ecx = 0, edx;
  const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);  // not every clang knows the name
  return has_f16c && __builtin_cpu_supports("avx2") ? &kTable : nullptr;
}

}  // namespace fusedcomm

#else

namespace fusedcomm {
const KernelTable* avx2_kernels() { return nullptr; }
}  // namespace fusedcomm

#endif
