// Kernels for x86 with AVX2, FMA and F16C (2013 and later).
#include "codec/kernel_table.h"

#if defined(__x86_64__)

// Headers that other files also use are included before the instruction set is selected, so that nothing they define is
// compiled for it.
#include <cpuid.h>
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "codec/isa/blocks_impl.h"

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
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }

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
  static __m256i is_finite(F value) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(kInfBits), magnitude(value)); }
  static F finite_or_zero(F value) { return _mm256_and_ps(value, _mm256_castsi256_ps(is_finite(value))); }
  static int64_t total(N n) {
    alignas(32) uint32_t lanes[kLanes];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), n);
    int64_t sum = 0;
    for (uint32_t lane : lanes) sum += lane;
    return sum;
  }
  static void track(M& m, F value) { m = _mm256_max_epu32(m, magnitude(value)); }
  static void track_signed(M& m, F value) {
    const __m256i bits = _mm256_castps_si256(value);
    m = _mm256_max_epu32(m, _mm256_or_si256(_mm256_add_epi32(bits, bits), _mm256_srli_epi32(bits, 31)));
  }
  static constexpr int kMaxima = 4;
  static void greatest(const M* m, uint32_t* bits) {
    const M ab = _mm256_max_epu32(_mm256_unpacklo_epi32(m[0], m[1]), _mm256_unpackhi_epi32(m[0], m[1]));
    const M cd = _mm256_max_epu32(_mm256_unpacklo_epi32(m[2], m[3]), _mm256_unpackhi_epi32(m[2], m[3]));
    // Each half has one maximum of each of the four M.
    const M abcd = _mm256_max_epu32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
    const __m128i all = _mm_max_epu32(_mm256_castsi256_si128(abcd), _mm256_extracti128_si256(abcd, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bits), all);
  }

  static __m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load(const Bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p)), 16));
  }
  static F load(const Fp16* p) { return _mm256_cvtph_ps(load_128(p)); }

  static __m128i to_bf16(F value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
  }
  static __m128i to_fp16(F value) { return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

  static void store(float* p, F value) { _mm256_storeu_ps(p, value); }
  static void store(Bf16* p, F value) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bf16(value)); }
  static void store(Fp16* p, F value) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_fp16(value)); }

  static void stream(float* p, F value) { _mm256_stream_ps(p, value); }
  static void stream(Bf16* p, F value) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), to_bf16(value)); }
  static void stream(Fp16* p, F value) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), to_fp16(value)); }

  // Codes rounded to nearest even, in the low byte of each element.
  static __m256i code(Int8, F value) { return _mm256_cvtps_epi32(value); }
  static __m256i code(Int4, F value) { return _mm256_cvtps_epi32(compressed(value)); }
  static F compressed(F value) {
    const F cubic = mul(mul(value, value), broadcast(Int4::kInverseCubic));
    return mul(value, sub(broadcast(Int4::kInverseLinear), cubic));
  }
  // Packs elements to 16 bits. The instruction works within each half of a register, so runs of four elements of
  // `first` and of `second` alternate.
  static __m256i words(__m256i first, __m256i second) { return _mm256_packs_epi32(first, second); }
  // Packs such words to bytes and puts them in order. Words are -128 to 127 if kSigned, else 0 to 255.
  template <bool kSigned>
  static __m128i bytes(__m256i words) {
    const __m256i packed = kSigned ? _mm256_packs_epi16(words, words) : _mm256_packus_epi16(words, words);
    return _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5)));
  }
  static __m128i pack_codes(Int8, __m256i first, __m256i second) { return bytes<true>(words(first, second)); }
  // The result is in the low 8 bytes.
  static __m128i pack_codes(Int4, __m256i first, __m256i second) {
    const __m256i clamped = _mm256_min_epi16(words(first, second), _mm256_set1_epi16(7));
    const __m256i even_cut = _mm256_and_si256(clamped, _mm256_set1_epi32(static_cast<int>(0xFFFF000F)));
    const __m256i pairs = _mm256_madd_epi16(even_cut, _mm256_set1_epi32(0x00100001));  // even + 16·odd
    const __m256i fours = _mm256_shuffle_epi8(pairs, _mm256_set1_epi32(0x0C080400));
    return _mm_unpacklo_epi16(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
  }

  // fp8 to nearest even; the second half of the work is on 16-bit words. A magnitude's code is the code of the first
  // value of its binade plus the number of steps from that value. A magnitude below the least normal one is treated as
  // in the least normal one's binade. Adding 1.5·2^23 steps to a value rounds it to whole steps.
  template <class Code>
  static __m256i binade(Code, F value) {
    const __m256i exponent = _mm256_and_si256(_mm256_castps_si256(value), _mm256_set1_epi32(kInfBits));
    return _mm256_max_epi32(exponent, _mm256_set1_epi32(Fp8Rounding<Code>::kLeastNormalBits));
  }
  template <class Code>
  static __m256i steps(Code, F value, __m256i binade) {
    const __m256i many = _mm256_add_epi32(binade, _mm256_set1_epi32(Fp8Rounding<Code>::kDropped << 23 | 1 << 22));
    return _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(value, _mm256_castsi256_ps(many))), many);
  }
  template <class Code>
  static __m128i to_codes(Code, F first, F second) {
    constexpr int kDropped = Fp8Rounding<Code>::kDropped;
    const __m256i a = binade(Code(), first);
    const __m256i b = binade(Code(), second);
    const __m256i binades = words(_mm256_srli_epi32(a, kDropped), _mm256_srli_epi32(b, kDropped));
    // steps() counts from zero instead of from the binade's first value, so the count is too great by the steps from
    // zero to the least normal value. kLeastNormalBits has these, besides the difference of the exponent biases.
    const __m256i too_many = _mm256_set1_epi16(static_cast<int16_t>(Fp8Rounding<Code>::kLeastNormalBits >> kDropped));
    const __m256i all_steps = _mm256_abs_epi16(words(steps(Code(), first, a), steps(Code(), second, b)));
    const __m256i magnitude = _mm256_add_epi16(_mm256_sub_epi16(binades, too_many), all_steps);
    // words() saturates, which keeps the sign bit.
    const __m256i signs = _mm256_srli_epi16(words(_mm256_castps_si256(first), _mm256_castps_si256(second)), 8);
    return bytes<false>(_mm256_or_si256(magnitude, _mm256_and_si256(signs, _mm256_set1_epi16(0x80))));
  }
  static __m128i to_codes(Int8, F first, F second) {
    return pack_codes(Int8(), code(Int8(), first), code(Int8(), second));
  }
  static __m128i to_codes(Int4, F first, F second) {
    return pack_codes(Int4(), code(Int4(), first), code(Int4(), second));
  }
  template <class Code>
  static void store_bytes(Code, uint8_t* p, __m128i bytes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  }
  static void store_bytes(Int4, uint8_t* p, __m128i bytes) { _mm_storel_epi64(reinterpret_cast<__m128i*>(p), bytes); }
  template <class Code>
  static void store_codes(Code, uint8_t* p, F first, F second) {
    store_bytes(Code(), p, to_codes(Code(), first, second));
  }
  template <class Code>
  static void stream_codes(Code, uint8_t* p, F first, F second) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), to_codes(Code(), first, second));
  }
  static void stream_codes(Int4, uint8_t* p, F first, F second) {
    _mm_stream_si64(reinterpret_cast<long long*>(p), _mm_cvtsi128_si64(to_codes(Int4(), first, second)));
  }

  static F load_int8(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static void load_codes(Int8, const uint8_t* p, F& first, F& second) {
    first = load_int8(p);
    second = load_int8(p + kLanes);
  }
  static void load_halves(__m256i halves, F& first, F& second) {
    first = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    second = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
  }
  // Shifted into the fields of fp16, an e4m3 code gives the value divided by 2^8: the exponent biases are 7 and 15.
  static void load_codes(E4m3, const uint8_t* p, F& first, F& second) {
    const __m256i fields = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_128(p)), 7);
    load_halves(_mm256_and_si256(fields, _mm256_set1_epi16(static_cast<int16_t>(0xBFFF))), first, second);
    first = _mm256_mul_ps(first, _mm256_set1_ps(256.0f));
    second = _mm256_mul_ps(second, _mm256_set1_ps(256.0f));
  }
  // The byte with an element's nibble is the element's top byte. A left shift moves the nibble to the top. A right
  // shift moves it down and extends its sign.
  static F top_nibble(__m256i top_bytes) {
    const __m256i wanted = _mm256_sllv_epi32(top_bytes, _mm256_setr_epi32(4, 0, 4, 0, 4, 0, 4, 0));
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(wanted, 28));
  }
  static void load_whole(const uint8_t* p, F& first, F& second) {
    const __m256i bytes = _mm256_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m256i spread = _mm256_setr_epi32(0, 0, 1 << 24, 1 << 24, 2 << 24, 2 << 24, 3 << 24, 3 << 24);
    first = top_nibble(_mm256_shuffle_epi8(bytes, spread));
    second = top_nibble(_mm256_shuffle_epi8(bytes, _mm256_add_epi32(spread, _mm256_set1_epi32(4 << 24))));
  }
  // The factor that turns a code into its value. The scale, which has 8 bits, is a factor of the level's coefficients,
  // so this and the product are exact. Encoders make a scale from the greatest bf16 at most, so the product is finite
  // in fp32 and may be fused with an addition.
  static F factor_of(F code, F scale) {
    return _mm256_fmadd_ps(mul(code, code), mul(scale, broadcast(Int4::kCubic)), mul(scale, broadcast(Int4::kLinear)));
  }
  static void load_scaled_codes(Int4, const uint8_t* p, F scale, F& first, F& second) {
    load_whole(p, first, second);
    first = mul(first, factor_of(first, scale));
    second = mul(second, factor_of(second, scale));
  }
  static void add_scaled_codes(Int4, const uint8_t* p, F scale, F& first, F& second) {
    F first_code, second_code;
    load_whole(p, first_code, second_code);
    first = _mm256_fmadd_ps(first_code, factor_of(first_code, scale), first);
    second = _mm256_fmadd_ps(second_code, factor_of(second_code, scale), second);
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
  const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);  // not every clang accepts "f16c"
  return has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &kTable : nullptr;
}

}  // namespace fusedcomm

#else

namespace fusedcomm {
const KernelTable* avx2_kernels() { return nullptr; }
}  // namespace fusedcomm

#endif
