// Kernels for 64-bit Arm, where NEON is always there.
#include "codec_kernels.h"

#if defined(__aarch64__)

#include <arm_neon.h>

#include "codec_kernels_impl.h"

namespace fusedcomm {
namespace {

// Two registers, so that eight 16-bit elements fill one.
struct Neon {
  using F = float32x4x2_t;
  using N = uint32x4x2_t;
  using M = uint32x4x2_t;
  static constexpr int kLanes = 8;
  static constexpr int kStreamNbytes = 0;

  static F broadcast(float value) { return {{vdupq_n_f32(value), vdupq_n_f32(value)}}; }
  static F mul(F a, F b) { return {{vmulq_f32(a.val[0], b.val[0]), vmulq_f32(a.val[1], b.val[1])}}; }
  static F add(F a, F b) { return {{vaddq_f32(a.val[0], b.val[0]), vaddq_f32(a.val[1], b.val[1])}}; }

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
  static int64_t total(N n) { return static_cast<int64_t>(vaddlvq_u32(n.val[0]) + vaddlvq_u32(n.val[1])); }
  static void track(M& m, F value) {
    for (int i = 0; i < 2; ++i) m.val[i] = vmaxq_u32(m.val[i], magnitude(value.val[i]));
  }
  static uint32_t greatest(M m) { return vmaxvq_u32(vmaxq_u32(m.val[0], m.val[1])); }

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
  static F load(const Fp16* p) {
    const float16x8_t halves = vreinterpretq_f16_u16(load_8(p));
    return {{vcvt_f32_f16(vget_low_f16(halves)), vcvt_f32_f16(vget_high_f16(halves))}};
  }
  static F load(const int8_t* p) {
    const int16x8_t words = vmovl_s8(vld1_s8(p));
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(words))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(words)))}};
  }

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
  static void store(int8_t* p, F value) {
    const int32x4_t low = vcvtnq_s32_f32(value.val[0]);
    const int32x4_t high = vcvtnq_s32_f32(value.val[1]);
    vst1_s8(p, vmovn_s16(vcombine_s16(vmovn_s32(low), vmovn_s32(high))));
  }

  static void store_codes(int8_t* p, const F* values) {
    for (int k = 0; k < 4; ++k) store(p + k * kLanes, values[k]);
  }
  static void stream_codes(int8_t* p, const F* values) { store_codes(p, values); }

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
