// Kernels for 64-bit Arm, which always has NEON.
#include "codec/kernel_table.h"

#if defined(__aarch64__)

#include <arm_neon.h>

#include "codec/isa/blocks_impl.h"

namespace fusedcomm {
namespace {

// F is two registers of four floats, so that the same eight elements as 16 bits fill one register.
struct Neon {
  using F = float32x4x2_t;
  using N = uint32x4x2_t;
  using M = uint32x4x2_t;
  static constexpr int kLanes = 8;
  static constexpr int kStreamNbytes = 0;

  static F broadcast(float value) { return {{vdupq_n_f32(value), vdupq_n_f32(value)}}; }
  static F mul(F a, F b) { return {{vmulq_f32(a.val[0], b.val[0]), vmulq_f32(a.val[1], b.val[1])}}; }
  static F add(F a, F b) { return {{vaddq_f32(a.val[0], b.val[0]), vaddq_f32(a.val[1], b.val[1])}}; }
  static F sub(F a, F b) { return {{vsubq_f32(a.val[0], b.val[0]), vsubq_f32(a.val[1], b.val[1])}}; }

  static float32x4_t canonical_4(float32x4_t value) {
    return vbslq_f32(vceqq_f32(value, value), value, vreinterpretq_f32_u32(vdupq_n_u32(kNanBits)));
  }
  static F canonical(F value) { return {{canonical_4(value.val[0]), canonical_4(value.val[1])}}; }

  static uint32x4_t magnitude(float32x4_t value) { return vreinterpretq_u32_f32(vabsq_f32(value)); }
  static void count(N& n, F value) {
    for (int i = 0; i < 2; ++i) {
      n.val[i] = vsubq_u32(n.val[i], vcgeq_u32(magnitude(value.val[i]), vdupq_n_u32(kInfBits)));
    }
  }
  static uint32x4_t is_finite(float32x4_t value) { return vcltq_u32(magnitude(value), vdupq_n_u32(kInfBits)); }
  static float32x4_t finite_or_zero_4(float32x4_t value) {
    return vreinterpretq_f32_u32(vandq_u32(is_finite(value), vreinterpretq_u32_f32(value)));
  }
  static F finite_or_zero(F value) { return {{finite_or_zero_4(value.val[0]), finite_or_zero_4(value.val[1])}}; }
  static int64_t total(N n) { return static_cast<int64_t>(vaddlvq_u32(n.val[0]) + vaddlvq_u32(n.val[1])); }
  static void track(M& m, F value) {
    for (int i = 0; i < 2; ++i) m.val[i] = vmaxq_u32(m.val[i], magnitude(value.val[i]));
  }
  static void track_signed(M& m, F value) {
    for (int i = 0; i < 2; ++i) {
      const uint32x4_t bits = vreinterpretq_u32_f32(value.val[i]);
      m.val[i] = vmaxq_u32(m.val[i], vsraq_n_u32(vshlq_n_u32(bits, 1), bits, 31));
    }
  }
  // Two lanes of maxima for each of two M.
  static uint32x4_t greatest_2(const M* m) {
    return vpmaxq_u32(vmaxq_u32(m[0].val[0], m[0].val[1]), vmaxq_u32(m[1].val[0], m[1].val[1]));
  }
  static constexpr int kMaxima = 4;
  static void greatest(const M* m, uint32_t* bits) { vst1q_u32(bits, vpmaxq_u32(greatest_2(m), greatest_2(m + 2))); }

  static uint16x8_t load_8(const void* p) {
    uint16x8_t eight;
    std::memcpy(&eight, p, sizeof(eight));
    return eight;
  }
  static void store_8(void* p, uint16x8_t eight) { std::memcpy(p, &eight, sizeof(eight)); }

  static F load(const float* p) { return {{vld1q_f32(p), vld1q_f32(p + 4)}}; }
  static F load(const Bf16* p) {
    const uint16x8_t bits = load_8(p);
    return {{vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16)),
             vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(bits), 16))}};
  }
  static F load(const Fp16* p) { return values_8(load_8(p)); }

  static uint16x4_t to_bf16(float32x4_t value) {
    const uint32x4_t bits = vreinterpretq_u32_f32(value);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return vshrn_n_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd), 16);
  }
  static uint16x4_t to_fp16(float32x4_t value) { return vreinterpret_u16_f16(vcvt_f16_f32(value)); }

  static void store(float* p, F value) {
    vst1q_f32(p, value.val[0]);
    vst1q_f32(p + 4, value.val[1]);
  }
  static void store(Bf16* p, F value) { store_8(p, vcombine_u16(to_bf16(value.val[0]), to_bf16(value.val[1]))); }
  static void store(Fp16* p, F value) { store_8(p, vcombine_u16(to_fp16(value.val[0]), to_fp16(value.val[1]))); }

  static uint32x4_t whole(float32x4_t value) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(value)); }
  static uint32x4_t code(Int8, float32x4_t value) { return whole(value); }
  static uint32x4_t code(Int4, float32x4_t value) { return whole(compressed(value)); }
  static float32x4_t compressed(float32x4_t value) {
    const float32x4_t cubic = vmulq_f32(vmulq_f32(value, value), vdupq_n_f32(Int4::kInverseCubic));
    return vmulq_f32(value, vsubq_f32(vdupq_n_f32(Int4::kInverseLinear), cubic));
  }
  static float32x4_t level(float32x4_t code) {
    return vmulq_f32(code, vfmaq_f32(vdupq_n_f32(Int4::kLinear), vmulq_f32(code, code), vdupq_n_f32(Int4::kCubic)));
  }
  template <class Code>
  static uint32x4_t code(Code, float32x4_t value) {
    using Rounding = Fp8Rounding<Code>;
    const uint32x4_t bits = vreinterpretq_u32_f32(value);
    const uint32x4_t size = magnitude(value);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, Rounding::kDropped), vdupq_n_u32(1));
    const uint32x4_t normal =
        vshrq_n_u32(vaddq_u32(vaddq_u32(size, vdupq_n_u32(Rounding::kRound)), odd), Rounding::kDropped);
    const uint32x4_t step = vdupq_n_u32(Code::kSubnormalBits);
    const float32x4_t shifted = vaddq_f32(vreinterpretq_f32_u32(size), vreinterpretq_f32_u32(step));
    const uint32x4_t subnormal = vsubq_u32(vreinterpretq_u32_f32(shifted), step);
    const uint32x4_t is_normal = vcgeq_u32(size, vdupq_n_u32(Rounding::kLeastNormalBits));
    return with_sign(vbslq_u32(is_normal, normal, subnormal), bits);
  }
  static uint32x4_t with_sign(uint32x4_t unsigned_code, uint32x4_t bits) {
    return vorrq_u32(unsigned_code, vandq_u32(vshrq_n_u32(bits, 24), vdupq_n_u32(0x80)));
  }

  // The low bytes of the elements of `first`, then of `second`.
  static uint8x8_t low_bytes(uint32x4_t first, uint32x4_t second) {
    return vmovn_u16(vcombine_u16(vmovn_u32(first), vmovn_u32(second)));
  }
  template <class Code>
  static uint8x8_t codes_8(Code, F value) {
    return low_bytes(code(Code(), value.val[0]), code(Code(), value.val[1]));
  }
  template <class Code>
  static void store_bytes(Code, uint8_t* p, uint8x8_t first, uint8x8_t second) {
    vst1_u8(p, first);
    vst1_u8(p + kLanes, second);
  }
  static uint8x8_t clamped(uint8x8_t codes) {
    return vreinterpret_u8_s8(vmin_s8(vreinterpret_s8_u8(codes), vdup_n_s8(7)));
  }
  static void store_bytes(Int4, uint8_t* p, uint8x8_t first, uint8x8_t second) {
    const uint8x8_t even = vand_u8(clamped(vuzp1_u8(first, second)), vdup_n_u8(0xF));
    vst1_u8(p, vsli_n_u8(even, clamped(vuzp2_u8(first, second)), 4));
  }
  template <class Code>
  static void store_codes(Code, uint8_t* p, F first, F second) {
    store_bytes(Code(), p, codes_8(Code(), first), codes_8(Code(), second));
  }
  template <class Code>
  static void stream_codes(Code, uint8_t* p, F first, F second) {
    store_codes(Code(), p, first, second);
  }

  static F values_8(int8x8_t codes) {
    const int16x8_t words = vmovl_s8(codes);
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(words))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(words)))}};
  }
  static void load_codes(Int8, const uint8_t* p, F& first, F& second) {
    first = values_8(vreinterpret_s8_u8(vld1_u8(p)));
    second = values_8(vreinterpret_s8_u8(vld1_u8(p + kLanes)));
  }
  static void load_codes(Int4, const uint8_t* p, F& first, F& second) {
    const int8x8_t bytes = vreinterpret_s8_u8(vld1_u8(p));
    const int8x8_t even = vshr_n_s8(vshl_n_s8(bytes, 4), 4);
    const int8x8_t odd = vshr_n_s8(bytes, 4);
    first = levels_8(vzip1_s8(even, odd));
    second = levels_8(vzip2_s8(even, odd));
  }
  static F levels_8(int8x8_t codes) {
    const F whole = values_8(codes);
    return {{level(whole.val[0]), level(whole.val[1])}};
  }
  static F values_8(uint16x8_t halves_bits) {
    const float16x8_t halves = vreinterpretq_f16_u16(halves_bits);
    return {{vcvt_f32_f16(vget_low_f16(halves)), vcvt_f32_f16(vget_high_f16(halves))}};
  }
  // Shifted into the fields of fp16, an e4m3 code gives the value divided by 2^8: the exponent biases are 7 and 15.
  static F load_8(E4m3, const uint8_t* p) {
    const uint16x8_t fields = vshlq_n_u16(vreinterpretq_u16_s16(vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)))), 7);
    return mul(values_8(vandq_u16(fields, vdupq_n_u16(0xBFFF))), broadcast(256.0f));
  }
  template <class Code>
  static void load_codes(Code, const uint8_t* p, F& first, F& second) {
    first = load_8(Code(), p);
    second = load_8(Code(), p + kLanes);
  }

  // x·(±1) + y rounds once, like an addition.
  template <class T>
  static void stream(T* p, F value) {
    store(p, value);
  }
  static void fence() {}
};

}  // namespace

const KernelTable* neon_kernels() {
  static constexpr KernelTable kTable = make_table<Neon>("neon");
  return &kTable;
}

}  // namespace fusedcomm

#else

namespace fusedcomm {
const KernelTable* neon_kernels() { return nullptr; }
}  // namespace fusedcomm

#endif
