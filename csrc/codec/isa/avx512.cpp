// Kernels for x86 with AVX-512 F, BW, DQ and VL (servers since 2017).
#include "codec/kernel_table.h"

#if defined(__x86_64__)

#if !defined(__clang__)
// Until GCC 13, its own header causes these warnings: GCC bug 105593.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

// Headers that other files also use are included before the instruction set is selected, so that nothing they define is
// compiled for it.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

#include "codec/isa/blocks_impl.h"

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
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }

  static F canonical(F value) {
    return _mm512_mask_mov_ps(value, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q),
                              _mm512_castsi512_ps(_mm512_set1_epi32(kNanBits)));
  }

  // The classes of _mm512_fpclass_ps_mask for quiet NaN, +Inf, -Inf and signaling NaN.
  static constexpr int kNanOrInf = 0x01 | 0x08 | 0x10 | 0x80;
  static F finite_or_zero(F value) {
    return _mm512_maskz_mov_ps(_knot_mask16(_mm512_fpclass_ps_mask(value, kNanOrInf)), value);
  }
  static void count(N& n, F value) {
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
    m = _mm512_max_epu32(m, _mm512_and_si512(_mm512_castps_si512(value), _mm512_set1_epi32(kMagnitudeMask)));
  }
  static void track_signed(M& m, F value) { m = _mm512_max_epu32(m, _mm512_rol_epi32(_mm512_castps_si512(value), 1)); }
  static constexpr int kMaxima = 4;
  static void greatest(const M* m, uint32_t* bits) {
    const M ab = _mm512_max_epu32(_mm512_unpacklo_epi32(m[0], m[1]), _mm512_unpackhi_epi32(m[0], m[1]));
    const M cd = _mm512_max_epu32(_mm512_unpacklo_epi32(m[2], m[3]), _mm512_unpackhi_epi32(m[2], m[3]));
    // Each quarter has one maximum of each of the four M.
    const M abcd = _mm512_max_epu32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    const __m256i half = _mm256_max_epu32(_mm512_castsi512_si256(abcd), _mm512_extracti64x4_epi64(abcd, 1));
    const __m128i all = _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bits), all);
  }

  static __m256i load_256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load(const Bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_256(p)), 16));
  }
  static F load(const Fp16* p) { return _mm512_cvtph_ps(load_256(p)); }

  // Does not use the hardware's bf16 conversion, which flushes denormals.
  static __m256i to_bf16(F value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  }
  static __m256i to_fp16(F value) { return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

  static void store(float* p, F value) { _mm512_storeu_ps(p, value); }
  static void store(Bf16* p, F value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(value)); }
  static void store(Fp16* p, F value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_fp16(value)); }

  static void stream(float* p, F value) { _mm512_stream_ps(p, value); }
  static void stream(Bf16* p, F value) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), to_bf16(value)); }
  static void stream(Fp16* p, F value) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), to_fp16(value)); }

  // Codes rounded to nearest even, in the low byte of each element.
  static __m512i code(Int8, F value) { return _mm512_cvtps_epi32(value); }
  static __m512i code(Int4, F value) { return _mm512_cvtps_epi32(compressed(value)); }
  static F compressed(F value) {
    const F cubic = mul(mul(value, value), broadcast(Int4::kInverseCubic));
    return mul(value, sub(broadcast(Int4::kInverseLinear), cubic));
  }
  template <class Code>
  static __m512i code(Code, F value) {
    using Rounding = Fp8Rounding<Code>;
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(kMagnitudeMask));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, Rounding::kDropped), _mm512_set1_epi32(1));
    const __m512i round = _mm512_set1_epi32(static_cast<int>(Rounding::kRound));
    const __m512i normal =
        _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(magnitude, round), odd), Rounding::kDropped);
    const __m512i step = _mm512_set1_epi32(Code::kSubnormalBits);
    const __m512 shifted = _mm512_add_ps(_mm512_castsi512_ps(magnitude), _mm512_castsi512_ps(step));
    const __mmask16 is_subnormal = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(Rounding::kLeastNormalBits));
    const __m512i unsigned_code = _mm512_mask_sub_epi32(normal, is_subnormal, _mm512_castps_si512(shifted), step);
    return with_sign(unsigned_code, bits);
  }
  static __m512i with_sign(__m512i unsigned_code, __m512i bits) {
    constexpr int kAOrBAndC = 0xF8;
    return _mm512_ternarylogic_epi32(unsigned_code, _mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80), kAOrBAndC);
  }

  // Packs elements to 16 bits, in order. The pack instruction works within each quarter of a register, so runs of four
  // elements must be put in order afterwards.
  static __m512i words(__m512i first, __m512i second) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), _mm512_packs_epi32(first, second));
  }
  template <class Code>
  static __m256i pack_codes(Code, __m512i first, __m512i second) {
    return _mm512_cvtepi16_epi8(words(first, second));
  }
  static __m128i pack_codes(Int4, __m512i first, __m512i second) {
    const __m512i pairs = _mm512_min_epi16(words(first, second), _mm512_set1_epi16(7));
    constexpr int kAChoosesBOrC = 0xCA;
    return _mm512_cvtepi32_epi8(
        _mm512_ternarylogic_epi32(_mm512_set1_epi32(0xF), pairs, _mm512_srli_epi32(pairs, 12), kAChoosesBOrC));
  }
  static void store_bytes(uint8_t* p, __m256i bytes) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bytes); }
  static void store_bytes(uint8_t* p, __m128i bytes) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes); }
  static void stream_bytes(uint8_t* p, __m256i bytes) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), bytes); }
  static void stream_bytes(uint8_t* p, __m128i bytes) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), bytes); }
  template <class Code>
  static void store_codes(Code, uint8_t* p, F first, F second) {
    store_bytes(p, pack_codes(Code(), code(Code(), first), code(Code(), second)));
  }
  template <class Code>
  static void stream_codes(Code, uint8_t* p, F first, F second) {
    stream_bytes(p, pack_codes(Code(), code(Code(), first), code(Code(), second)));
  }

  static __m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static void load_codes(Int8, const uint8_t* p, F& first, F& second) {
    first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_128(p)));
    second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_128(p + 16)));
  }
  static void load_halves(__m512i halves, F& first, F& second) {
    first = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    second = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
  }
  // Shifted into the fields of fp16, an e4m3 code gives the value divided by 2^8: the exponent biases are 7 and 15.
  static void load_codes(E4m3, const uint8_t* p, F& first, F& second) {
    const __m512i fields = _mm512_slli_epi16(_mm512_cvtepi8_epi16(load_256(p)), 7);
    load_halves(_mm512_and_si512(fields, _mm512_set1_epi16(static_cast<int16_t>(0xBFFF))), first, second);
    first = _mm512_mul_ps(first, _mm512_set1_ps(256.0f));
    second = _mm512_mul_ps(second, _mm512_set1_ps(256.0f));
  }
  // An element's low byte has its nibble: the low nibble for even elements, the high one for odd elements. After the
  // shift, the nibble is in the lowest four bits.
  static F look_up(__m512i bytes) { return level(_mm512_srlv_epi32(bytes, _mm512_set1_epi64(int64_t{4} << 32))); }
  // The levels of the codes in the lowest four bits.
  static F level(__m512i codes) {
    constexpr auto of = Scalar::level;
    return _mm512_permutexvar_ps(codes, _mm512_setr_ps(of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7), of(-8),
                                                       of(-7), of(-6), of(-5), of(-4), of(-3), of(-2), of(-1)));
  }
  static void load_codes(Int4, const uint8_t* p, F& first, F& second) {
    const __m512i bytes = _mm512_broadcast_i32x4(load_128(p));
    // Byte k goes to the elements 2k and 2k + 1, so each quarter gets two bytes.
    const __m512i spread = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    first = look_up(_mm512_shuffle_epi8(bytes, spread));
    second = look_up(_mm512_shuffle_epi8(bytes, _mm512_add_epi32(spread, _mm512_set1_epi32(8))));
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
