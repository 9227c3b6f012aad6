// The codec's inner loops over blocks, and the table of all kernels; see elements_impl.h.
#pragma once

#include "codec/isa/elements_impl.h"
#include "codec/isa/scales_impl.h"

namespace fusedcomm {
namespace {

// fp32 bits of 2^-100. A block whose absmax is smaller becomes zeros, so that scale and inverse are never near overflow
// or denormal.
constexpr uint32_t kLeastAbsmaxBits = (127u - 100u) << 23;

// Stores the codes of the elements from `i` on, past the caches if kStreamed.
template <bool kStreamed, class V, class Code>
inline void put_codes(uint8_t* codes, int64_t i, typename V::F first, typename V::F second) {
  uint8_t* const p = codes + code_nbytes<Code>(i);
  if constexpr (kStreamed) {
    CodesOf<V, Code>::stream(p, first, second);
  } else {
    CodesOf<V, Code>::store(p, first, second);
  }
}

// Elements that a loop's body handles at a time. Divides every block size.
constexpr int kRun = static_cast<int>(kMinBlockNumel);

// ---- quantize

// Not inlined: the case is rare and should not enlarge the loops.
template <class Src>
__attribute__((noinline)) int64_t count_nonfinite(const Src* src, int64_t numel, float scale) {
  Scalar::N nonfinite = 0;
  for (int64_t i = 0; i < numel; ++i) Scalar::count(nonfinite, Scalar::load(src + i) * scale);
  return nonfinite;
}

// Encodes a block that has an Inf or a NaN. The scale is Inf, the codes are the greatest and the least for ±Inf and 0
// for all other elements, which decode to 0·Inf = NaN.
template <class Code, class Src>
__attribute__((noinline)) void quantize_nonfinite_block(const Src* src, typename Code::Scale* block_scale,
                                                        uint8_t* codes, int64_t block_numel, float scale) {
  Scalar::store(block_scale, float_of(kInfBits));
  std::memset(codes, 0, static_cast<size_t>(code_nbytes<Code>(block_numel)));
  for (int64_t i = 0; i < block_numel; ++i) {
    const uint32_t bits = bits_of(Scalar::load(src + i) * scale);
    if ((bits & kMagnitudeMask) != kInfBits) continue;
    const uint32_t code = bits == kInfBits ? Code::kGreatestCode : Code::kLeastCode;
    codes[code_nbytes<Code>(i)] |= static_cast<uint8_t>(code << (i * Code::kNbits % 8));
  }
}

// Elements in a batch of blocks. Blocks are processed in batches so that the maximum and divisions of one block do not
// delay the next block. A batch is read twice, so it should fit in the first-level cache.
constexpr int64_t kBatchNumel = 1024;
constexpr int64_t kMaxBatch = kBatchNumel / kMinBlockNumel;

// The block's maximum as bits: of the magnitude, or for signed scales of the bits turned left by one.
template <class V, class Code, class Src>
inline typename V::M block_top(const Src* __restrict src, int64_t numel, typename V::F factor) {
  typename V::M top{};
  for (int64_t i = 0; i < numel; i += V::kLanes) track<V, Code>(top, V::mul(V::load(src + i), factor));
  return top;
}

// No code exceeds the greatest one, L = kGreatest: |y| ≤ absmax and inverse ≤ (L/absmax)(1 + 2^-24), so |y·inverse| ≤
// L(1 + 2^-24)², less than half a step beyond L. With a bf16 scale, rounding may have lowered the scale by 2^-9 of it:
// in int4 |y·inverse| < 8.04. The code is at least kLeast, and one beyond L becomes L.
template <class V, class Code, bool kStreamed, class Src>
inline void quantize_block(const Src* __restrict src, uint8_t* __restrict codes, int64_t numel, typename V::F factor,
                           typename V::F inverse) {
  if constexpr (V::kLanes == 1 && Code::kNbits < 8) {
    // Compilers vectorize these loops, but none that stores several codes as one byte.
    for (int64_t i = 0; i < numel; i += kRun) {
      uint32_t run[kRun];
      for (int k = 0; k < kRun; ++k) {
        run[k] = V::code(Code(), V::mul(V::load(src + i + k), factor) * inverse);
      }
      pack<Code>(codes + code_nbytes<Code>(i), run, kRun);
    }
  } else {
    for (int64_t i = 0; i < numel; i += 2 * V::kLanes) {
      const typename V::F first = V::mul(V::mul(V::load(src + i), factor), inverse);
      const typename V::F second = V::mul(V::mul(V::load(src + i + V::kLanes), factor), inverse);
      put_codes<kStreamed, V, Code>(codes, i, first, second);
    }
  }
}

// Blocks of at least this many elements are prefetched a batch ahead if the destination is so large that it is
// streamed. A batch is a page of memory or half a page, and the hardware prefetcher starts again at every page.
constexpr int64_t kFetchedBlockNumel = 128;

// Must be inlined: GCC would otherwise treat it as a function without effect.
template <class Src>
[[gnu::always_inline]] inline void fetch_block(const Src* src, int64_t numel) {
  constexpr int64_t kLineNumel = 64 / sizeof(Src);
  if (numel < kFetchedBlockNumel) return;
  for (int64_t i = 0; i < numel; i += kLineNumel) __builtin_prefetch(src + i);
}

// Writes scales and codes of `count` blocks of src with the given tops.
template <class V, class Code, bool kStreamed, class Src>
inline void quantize_batch(const Src* src, typename Code::Scale* scales, uint8_t* codes, const uint32_t* tops,
                           int64_t count, int64_t block_numel, float scale) {
  const typename V::F factor = V::broadcast(scale);
  const int64_t block_nbytes = code_nbytes<Code>(block_numel);
  float inverse[kMaxBatch];
  for (int64_t block = 0; block < count; ++block) {
    set_scale<Code>(tops[block], scales + block, inverse + block);
  }
  for (int64_t block = 0; block < count; ++block, src += block_numel, codes += block_nbytes) {
    if (kStreamed) fetch_block(src + count * block_numel, block_numel);
    const uint32_t absmax = absmax_bits<Code>(tops[block]);
    if (absmax - kLeastAbsmaxBits < kInfBits - kLeastAbsmaxBits) {
      quantize_block<V, Code, kStreamed>(src, codes, block_numel, factor, V::broadcast(inverse[block]));
    } else if (absmax >= kInfBits) {
      quantize_nonfinite_block<Code>(src, scales + block, codes, block_numel, scale);
    } else {
      Scalar::store(scales + block, 0.0f);
      std::memset(codes, 0, static_cast<size_t>(block_nbytes));
    }
  }
}

template <class V, class Code, class Src, bool kStreamed>
int64_t quantize_blocks(const Src* src, typename Code::Scale* scales, uint8_t* codes, int64_t num_blocks,
                        int64_t block_numel, float scale) {
  const typename V::F factor = V::broadcast(scale);
  const int64_t batch = block_numel < kBatchNumel ? kBatchNumel / block_numel : 1;
  int64_t nonfinite = 0;
  for (; num_blocks > 0; num_blocks -= batch) {
    const int64_t count = num_blocks < batch ? num_blocks : batch;
    typename V::M maxima[kMaxBatch];
    static_assert(kMaxBatch % V::kMaxima == 0, "a batch must have room for the last maxima");
    for (int64_t block = 0; block < count; ++block) {
      maxima[block] = block_top<V, Code>(src + block * block_numel, block_numel, factor);
    }
    for (int64_t block = count; block % V::kMaxima != 0; ++block) maxima[block] = typename V::M{};
    uint32_t tops[kMaxBatch];
    for (int64_t block = 0; block < count; block += V::kMaxima) V::greatest(maxima + block, tops + block);
    for (int64_t block = 0; block < count; ++block) {
      if (absmax_bits<Code>(tops[block]) < kInfBits) continue;
      nonfinite += count_nonfinite(src + block * block_numel, block_numel, scale);
    }
    quantize_batch<V, Code, kStreamed>(src, scales, codes, tops, count, block_numel, scale);
    src += count * block_numel;
    scales += count;
    codes += code_nbytes<Code>(count * block_numel);
  }
  return nonfinite;
}

template <class V, class Code, class Src>
int64_t quantize(const void* src_data, void* scales_data, void* codes_data, int64_t num_blocks, int64_t block_numel,
                 float scale, bool streamed) {
  const auto* src = static_cast<const Src*>(src_data);
  auto* scales = static_cast<typename Code::Scale*>(scales_data);
  auto* codes = static_cast<uint8_t*>(codes_data);
  if (streamed && suits_streaming<V>(codes)) {
    return quantize_blocks<V, Code, Src, true>(src, scales, codes, num_blocks, block_numel, scale);
  }
  return quantize_blocks<V, Code, Src, false>(src, scales, codes, num_blocks, block_numel, scale);
}

// ---- dequantize

template <class V, class Code, class Dst, bool kStreamed>
inline void dequantize_block(typename V::F scale, const uint8_t* __restrict codes, Dst* __restrict dst,
                             int64_t block_numel, typename V::F factor) {
  for (int64_t i = 0; i < block_numel; i += kRun) {
    typename V::F run[kRun / V::kLanes];
    for (int k = 0; k < kRun / V::kLanes; k += 2) {
      CodesOf<V, Code>::load(codes, i + k * V::kLanes, scale, run[k], run[k + 1]);
    }
    for (int k = 0; k < kRun / V::kLanes; ++k) {
      put<kStreamed, V>(dst + i + k * V::kLanes, V::canonical(V::mul(run[k], factor)));
    }
  }
}

template <class V, class Code, class Dst, bool kStreamed>
void dequantize_blocks(const typename Code::Scale* __restrict scales, const uint8_t* __restrict codes,
                       Dst* __restrict dst, int64_t num_blocks, int64_t block_numel, float factor) {
  const typename V::F factor_v = V::broadcast(factor);
  for (int64_t block = 0; block < num_blocks; ++block) {
    const typename V::F scale = V::broadcast(Scalar::load(scales + block));
    dequantize_block<V, Code, Dst, kStreamed>(scale, codes, dst, block_numel, factor_v);
    codes += code_nbytes<Code>(block_numel);
    dst += block_numel;
  }
}

template <class V, class Code, class Dst>
void dequantize(const void* scales_data, const void* codes_data, void* dst_data, int64_t num_blocks,
                int64_t block_numel, float factor, bool streamed) {
  const auto* scales = static_cast<const typename Code::Scale*>(scales_data);
  const auto* codes = static_cast<const uint8_t*>(codes_data);
  auto* dst = static_cast<Dst*>(dst_data);
  if (streamed && suits_streaming<V>(dst)) {
    dequantize_blocks<V, Code, Dst, true>(scales, codes, dst, num_blocks, block_numel, factor);
  } else {
    dequantize_blocks<V, Code, Dst, false>(scales, codes, dst, num_blocks, block_numel, factor);
  }
}

// ---- sum

template <class V, class Code, int kCount, bool kFirst>
void sum_blocks_group(const char* scales, const char* codes, int64_t stride_nbytes, float* __restrict acc,
                      int64_t num_blocks, int64_t block_numel) {
  for (int64_t block = 0; block < num_blocks; ++block) {
    typename V::F scale[kCount];
    for (int k = 0; k < kCount; ++k) {
      const auto* source = reinterpret_cast<const typename Code::Scale*>(scales + k * stride_nbytes);
      scale[k] = V::broadcast(Scalar::load(source + block));
    }
    for (int64_t i = 0; i < block_numel; i += 2 * V::kLanes) {
      const auto* code = reinterpret_cast<const uint8_t*>(codes);
      typename V::F sum_first, sum_second;
      CodesOf<V, Code>::load(code, i, scale[0], sum_first, sum_second);
      if (!kFirst) {
        sum_first = V::add(V::load(acc + i), sum_first);
        sum_second = V::add(V::load(acc + i + V::kLanes), sum_second);
      }
      for (int k = 1; k < kCount; ++k) {
        if constexpr (kAddsScaled<V, Code>) {
          const uint8_t* const p = code + k * stride_nbytes + code_nbytes<Code>(i);
          V::add_scaled_codes(Code(), p, scale[k], sum_first, sum_second);
        } else {
          typename V::F first, second;
          CodesOf<V, Code>::load(code + k * stride_nbytes, i, scale[k], first, second);
          sum_first = V::add(sum_first, first);
          sum_second = V::add(sum_second, second);
        }
      }
      V::store(acc + i, sum_first);
      V::store(acc + i + V::kLanes, sum_second);
    }
    codes += code_nbytes<Code>(block_numel);
    acc += block_numel;
  }
}

template <class V, class Code, bool kFirst>
void sum_blocks_up_to_group(const char* scales, const char* codes, int64_t stride_nbytes, int64_t count, float* acc,
                            int64_t num_blocks, int64_t block_numel) {
  switch (count) {
    case 1:
      return sum_blocks_group<V, Code, 1, kFirst>(scales, codes, stride_nbytes, acc, num_blocks, block_numel);
    case 2:
      return sum_blocks_group<V, Code, 2, kFirst>(scales, codes, stride_nbytes, acc, num_blocks, block_numel);
    case 3:
      return sum_blocks_group<V, Code, 3, kFirst>(scales, codes, stride_nbytes, acc, num_blocks, block_numel);
    default:
      return sum_blocks_group<V, Code, kGroup, kFirst>(scales, codes, stride_nbytes, acc, num_blocks, block_numel);
  }
}

template <class V, class Code>
void sum_blocks(const void* scales_data, const void* codes_data, int64_t stride_nbytes, int64_t num_srcs, float* acc,
                int64_t num_blocks, int64_t block_numel) {
  const auto* scales = static_cast<const char*>(scales_data);
  const auto* codes = static_cast<const char*>(codes_data);
  sum_blocks_up_to_group<V, Code, true>(scales, codes, stride_nbytes, num_srcs, acc, num_blocks, block_numel);
  for (int64_t k = kGroup; k < num_srcs; k += kGroup) {
    const int64_t offset = k * stride_nbytes;
    sum_blocks_up_to_group<V, Code, false>(scales + offset, codes + offset, stride_nbytes, num_srcs - k, acc,
                                           num_blocks, block_numel);
  }
}

// ---- the table

template <class V, class Code>
constexpr BlockKernels block_kernels() {
  return {{quantize<V, Code, float>, quantize<V, Code, Bf16>, quantize<V, Code, Fp16>},
          {dequantize<V, Code, float>, dequantize<V, Code, Bf16>, dequantize<V, Code, Fp16>},
          sum_blocks<V, Code>};
}

// Whether the codes are those of the wires with scales, in the order that `scaled_index` counts.
template <class... Code>
constexpr bool in_order(CodeList<Code...>) {
  int index = 0;
  return sizeof...(Code) == kNumScaledWires && ((scaled_index(Code::kWire) == index++) && ...);
}

template <class V, class... Code>
constexpr KernelTable make_table(const char* isa, CodeList<Code...>) {
  static_assert(in_order(AllCodes()), "the codes must be those of the wires with scales, in their order");
  return {isa,
          {{convert<V, float, float>, convert<V, float, Bf16>, convert<V, float, Fp16>},
           {convert<V, Bf16, float>, convert<V, Bf16, Bf16>, convert<V, Bf16, Fp16>},
           {convert<V, Fp16, float>, convert<V, Fp16, Bf16>, convert<V, Fp16, Fp16>}},
          scale_elements<V>,
          {sum<V, float>, sum<V, Bf16>, sum<V, Fp16>},
          {block_kernels<V, Code>()...},
          add<V>,
          subtract<V>,
          V::fence};
}

template <class V>
constexpr KernelTable make_table(const char* isa) {
  return make_table<V>(isa, AllCodes());
}

}  // namespace
}  // namespace fusedcomm
