// Gradients ⇄ wire bytes in CUDA C++: pack, reduce, unpack and scale, byte for byte what fusedcomm/reference.py defines
// and the Triton kernels beside this file give, with the same parameters. They run where those cannot; see nvrtc.py.
//
// A block of threads takes one tile after the other. A tile is at most TILE consecutive elements of one section of one
// part; in every step of a tile, neighbouring threads have neighbouring elements. So a warp has 32 consecutive elements
// at a time, which is a run of the rotation, and a block of the wire is one or more such runs.
//
// Macros: WIRE, IN_WIRE (reduce: what is summed), GRAD, FEEDBACK (the residual): a format of the enum below
//         BLOCK elements that share a scale     TILE elements     NUM_THREADS of a block, at least TILE / 16
//         FLAT, ROTATED, STOCHASTIC, SUMS  0, 1: as in kernels/variants.py
//         PACK, REDUCE, UNPACK, SCALE: defined for each kernel that is wanted
// Compile without contraction: every operation rounds once. No header is included: NVRTC needs no toolkit, and
// tests/native/cuda_on_cpu.h lets a C++ compiler run this file on a CPU, where the macros are variables.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

enum { none, fp32, bf16, fp16, int8, fp8, int4 };

constexpr int kMaxTile = 8192;  // elements
constexpr int kPerThread = 16;  // elements, at most
constexpr int kRun = 32;        // elements: a warp's
constexpr u32 kAllLanes = 0xFFFFFFFFu;
constexpr u32 kInfBits = 0x7F800000u;
constexpr u32 kLeastAbsmaxBits = (127u - 100u) << 23;  // 2^-100: a block below it becomes zeros
constexpr u32 kRotationSigns = 0x9E3779B9u;            // bit i: element i of a run changes its sign

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
__device__ __forceinline__ i64 lesser(i64 a, i64 b) { return b < a ? b : a; }

// The k-th element of the tile that this thread has.
__device__ __forceinline__ int element(int k) { return k * NUM_THREADS + static_cast<int>(threadIdx.x); }

__device__ __forceinline__ u32 magnitude_bits(float y) { return __float_as_uint(y) & 0x7FFFFFFFu; }

// Of |x| < 2^22, +0 for a zero: 1.5·2^23 has an ulp of one. floorf may take a denormal for a zero.
__device__ __forceinline__ float floor_of(float x) {
  const float nearest = (x + 12582912.0f) - 12582912.0f;
  return nearest > x ? nearest - 1.0f : nearest;
}

// ---- formats

#ifdef __CUDACC__
__device__ __forceinline__ u16 half_of_float(float value) {
  u16 half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}
__device__ __forceinline__ float float_of_half(u16 half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}
#endif

__device__ __forceinline__ bool has_scales(int format) { return format >= int8; }

__device__ __forceinline__ float greatest_value(int format) {
  return format == int8 ? 127.0f : format == fp8 ? 448.0f : 7.0f;
}

__device__ __forceinline__ u32 load_bits(const void* section, i64 index, int format) {
  if (format == fp32) return static_cast<const u32*>(section)[index];
  if (format == bf16 || format == fp16) return static_cast<const u16*>(section)[index];
  if (format == int4) return static_cast<const u8*>(section)[index / 2] >> (index % 2 * 4) & 0xFu;
  return static_cast<const u8*>(section)[index];
}

// int4: also the next element's, whose four bits are the upper half of `bits`.
__device__ __forceinline__ void store_bits(void* section, i64 index, u32 bits, int format) {
  if (format == fp32) {
    static_cast<u32*>(section)[index] = bits;
  } else if (format == bf16 || format == fp16) {
    static_cast<u16*>(section)[index] = static_cast<u16>(bits);
  } else {
    static_cast<u8*>(section)[format == int4 ? index / 2 : index] = static_cast<u8>(bits);
  }
}

__device__ __forceinline__ float value_of(u32 bits, int format) {
  if (format == fp32) return __uint_as_float(bits);
  if (format == bf16) return __uint_as_float(bits << 16);
  if (format == fp16) return float_of_half(static_cast<u16>(bits));
  if (format == int8) return static_cast<float>(static_cast<signed char>(bits));
  if (format == int4) return static_cast<float>(static_cast<int>(bits << 28) >> 28);
  // e4m3 is fp32 but for the width of its mantissa and for its bias, subnormals and all; its greatest code is NaN.
  const float value = __uint_as_float((bits & 0x80u) << 24 | (bits & 0x7Fu) << 20) * 0x1p120f;
  return (bits & 0x7Fu) == 0x7Fu ? __uint_as_float(0x7FC00000u) : value;
}

// To nearest even in fp32, bf16 or fp16, NaNs canonical.
__device__ __forceinline__ u32 rounded(float y, int format) {
  const bool nan = y != y;
  const u32 bits = nan ? 0x7FC00000u : __float_as_uint(y);
  // Half an ulp less one, plus the lowest kept bit, carries exactly where nearest-even rounds up.
  if (format == bf16) return (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  if (format == fp16) return nan ? 0x7E00u : half_of_float(y);
  return bits;
}

// The same in bf16 or fp16, rounded up where `noise`, of 16 bits, carries into what is kept.
__device__ __forceinline__ u32 stochastically_rounded(float y, u32 noise, int format) {
  const u32 bits = rounded(y, fp32);
  if (format == bf16) return (bits + noise) >> 16;
  if (magnitude_bits(y) >= (127u - 14u) << 23) return rounded(__uint_as_float((bits + (noise >> 3)) & ~0x1FFFu), fp16);
  const float steps = floor_of(__uint_as_float(bits & 0x7FFFFFFFu) * 0x1p24f + noise * 0x1p-16f);  // of 2^-24
  return rounded(__uint_as_float(__float_as_uint(steps * 0x1p-24f) | (bits & 0x80000000u)), fp16);
}

// e4m3's code of a finite value: what lies beyond the greatest becomes the greatest.
__device__ __forceinline__ u32 fp8_code(float v, u32 noise) {
  const u32 bits = magnitude_bits(v), sign = __float_as_uint(v) >> 24 & 0x80u;
  if (bits < (127u - 6u) << 23) {  // subnormal: steps of 2^-9
    const float magnitude = __uint_as_float(bits);
    if (STOCHASTIC) return static_cast<u32>(floor_of(magnitude * 0x1p9f + noise * 0x1p-16f)) | sign;
    return (__float_as_uint(magnitude + 1.5f * 0x1p14f) & 0xFu) | sign;  // 2^14 has an ulp of 2^-9
  }
  const u32 carry = STOCHASTIC ? noise << 4 : 0x7FFFFu + (bits >> 20 & 1u);
  return static_cast<u32>(lesser((bits + carry - (120u << 23)) >> 20, 0x7E)) | sign;
}

// The code of an element in a wire with scales; `inverse` of its block's scale is 0 in a block that is not normal.
__device__ __forceinline__ u32 quantised(float y, float inverse, u32 noise, int format) {
  const bool inf = magnitude_bits(y) == kInfBits;
  if (inverse == 0.0f && !inf) return 0;
  const float greatest = greatest_value(format);
  const float v = inf ? copysignf(greatest, y) : y * inverse;
  if (format == fp8) return fp8_code(v, noise);
  const float whole = fminf(fmaxf(STOCHASTIC ? floor_of(v + noise * 0x1p-16f) : v, -greatest), greatest);
  return __float_as_uint(whole + 12582912.0f) & (format == int4 ? 0xFu : 0xFFu);
}

// ---- rotation, of the 32 elements that a warp has

__device__ __forceinline__ float with_sign(float y) {
  return __uint_as_float(__float_as_uint(y) ^ kRotationSigns >> lane() << 31);
}

__device__ __forceinline__ float butterfly(float y) {
#pragma unroll
  for (int step = 1; step < kRun; step *= 2) {
    const float partner = __shfl_xor_sync(kAllLanes, y, step);
    y = lane() & step ? partner - y : y + partner;
  }
  return y;
}

__device__ __forceinline__ float rotate(float y) { return butterfly(with_sign(y)); }
__device__ __forceinline__ float unrotate(float y) { return with_sign(butterfly(y) * (1.0f / kRun)); }

// ---- what the engine passes

// Slices laid end to end; see csrc/devices/slice_table.h.
struct Stream {
  const i64* starts;
  const i64* offsets;
  const int* first;
  u64* counts;  // non-finite elements of each slice
  int num_slices;
  i64 numel;
};

// Of one part.
struct Sections {
  u8* scales;
  u8* codes;
};

// Of a part, given those of part 0; `stride`: bytes from one part to the next.
__device__ __forceinline__ Sections sections(u8* scales, u8* codes, i64 stride, i64 part) {
  return {scales + part * stride, codes + part * stride};
}

__device__ __forceinline__ float decoded(const Sections& in, i64 index, int format) {
  const float value = value_of(load_bits(in.codes, index, format), format);
  if (!has_scales(format)) return value;
  const int of_scales = format == int4 ? bf16 : fp32;
  return value * value_of(load_bits(in.scales, index / BLOCK, of_scales), of_scales);
}

struct Encoder {
  void* residual;
  i64 seed;
  int parameter, step, source;
};

__device__ __forceinline__ i64 tiles_of(i64 part_numel) { return (part_numel + TILE - 1) / TILE; }

// One tile of a part: `begin` is its first element of the stream, `inside` of the part. It has `numel` elements, of
// which the first `num_real` are of the stream, the others zeros past its end.
struct Tile {
  i64 begin, inside;
  int numel, num_real;
  int low, high;  // slices: its elements are in these and those between
};

__device__ __forceinline__ Tile tile_of(i64 stream_numel, i64 part_numel, i64 part, i64 index) {
  const i64 inside = index * TILE, left = stream_numel - part * part_numel - inside;
  const int numel = static_cast<int>(lesser(part_numel - inside, TILE));
  return {part * part_numel + inside, inside, numel, static_cast<int>(left < 0 ? 0 : lesser(left, numel)), 0, 0};
}

template <bool kExact>
__device__ __forceinline__ Tile tile_of(const Stream& stream, i64 part_numel, i64 part, i64 index) {
  Tile tile = tile_of(stream.numel, part_numel, part, index);
  tile.high = stream.num_slices - 1;
  if (kExact || !FLAT) {
    const int* first = stream.first + part * tiles_of(part_numel) + index;
    tile.low = static_cast<int>(lesser(first[0], tile.high));
    // The next entry is of the element behind the tile, also where that is the next part's first.
    if (tile.begin + tile.numel < stream.numel) tile.high = static_cast<int>(lesser(first[1], tile.high));
  }
  return tile;
}

// The last slice among low … high that starts at or before the stream's element.
__device__ __forceinline__ int slice_of(const Stream& stream, int low, int high, i64 at) {
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (stream.starts[middle] <= at) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Where the tile's element lies, in elements from the bucket's origin.
template <bool kExact>
__device__ __forceinline__ i64 place_of(const Stream& stream, const Tile& tile, int i) {
  const i64 at = tile.begin + i;
  if (!kExact && FLAT) return at;
  const int slice = slice_of(stream, tile.low, tile.high, at);
  return at + stream.offsets[slice] - stream.starts[slice];
}

// counts[slice] += 1 for every lane whose element `is_bad`: one atomic addition for each slice that the warp meets.
__device__ __forceinline__ void count(const Stream& stream, int low, int high, i64 at, bool is_bad) {
  u32 left = __ballot_sync(kAllLanes, is_bad);
  if (left == 0) return;
  const int slice = is_bad ? slice_of(stream, low, high, at) : -1;
  while (left != 0) {
    const int leader = __ffs(static_cast<int>(left)) - 1;
    const u32 same = __ballot_sync(kAllLanes, slice == __shfl_sync(kAllLanes, slice, leader));
    if (lane() == leader) atomicAdd(stream.counts + slice, static_cast<u64>(__popc(same)));
    left &= ~same;
  }
}

// ---- encoding

// What the threads of a block share of a tile.
struct Scratch {
  u32 tops[kMaxTile / kRun];                                  // greatest magnitude of each run, as bits
  float factors[kMaxTile / kRun], inverses[kMaxTile / kRun];  // of each block: its scale and by what it is multiplied
  u32 noise[kMaxTile / 2];                                    // 16 bits for each element
};

// Philox4x32-10, a counter for eight elements, as in fusedcomm/reference.py. `position`: of the tile in its stream.
__device__ __forceinline__ void draw_noise(const Encoder& encoder, i64 position, u32* noise) {
  for (int group = static_cast<int>(threadIdx.x); group < TILE / 8; group += NUM_THREADS) {
    u32 c0 = static_cast<u32>(position / 8 + group), c1 = encoder.parameter, c2 = encoder.step, c3 = encoder.source;
    u32 low = static_cast<u32>(encoder.seed), high = static_cast<u32>(static_cast<u64>(encoder.seed) >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      const u32 high0 = __umulhi(0xD2511F53u, c0), high2 = __umulhi(0xCD9E8D57u, c2);
      const u32 low0 = 0xD2511F53u * c0, low2 = 0xCD9E8D57u * c2;
      c0 = high2 ^ c1 ^ low;
      c1 = low2;
      c2 = high0 ^ c3 ^ high;
      c3 = low0;
      low += 0x9E3779B9u;
      high += 0xBB67AE85u;
    }
    noise[4 * group] = c0;
    noise[4 * group + 1] = c1;
    noise[4 * group + 2] = c2;
    noise[4 * group + 3] = c3;
  }
}

__device__ __forceinline__ u32 warp_max(u32 value) {
#pragma unroll
  for (int step = kRun / 2; step > 0; step /= 2) {
    const u32 other = __shfl_xor_sync(kAllLanes, value, step);
    value = value < other ? other : value;
  }
  return value;
}

// From the runs' greatest magnitudes: the blocks' scales, into scratch and onto the wire, with the padding behind a
// part's last scale.
__device__ __forceinline__ void make_scales(const Sections& out, const Tile& tile, i64 part_numel, Scratch& scratch) {
  const int format = WIRE == int4 ? bf16 : fp32;
  const float greatest = greatest_value(WIRE);
  for (int block = static_cast<int>(threadIdx.x); block < TILE / BLOCK; block += NUM_THREADS) {
    u32 top = 0;
    for (int run = block * (BLOCK / kRun); run < (block + 1) * (BLOCK / kRun); ++run) {
      if (top < scratch.tops[run]) top = scratch.tops[run];
    }
    const bool finite = top < kInfBits, normal = finite && top >= kLeastAbsmaxBits;
    const float absmax = __uint_as_float(normal ? top : __float_as_uint(greatest));
    const u32 bits =
        normal ? rounded(absmax / greatest, format) : rounded(__uint_as_float(finite ? 0 : kInfBits), format);
    const float factor = value_of(bits, format);
    scratch.factors[block] = factor;
    scratch.inverses[block] = !normal ? 0.0f : WIRE == int4 ? 1.0f / factor : greatest / absmax;
    if (block * BLOCK < tile.numel) store_bits(out.scales, tile.inside / BLOCK + block, bits, format);
  }
  if (tile.inside + tile.numel == part_numel) {
    const i64 num_scales = part_numel / BLOCK;
    const int padding = static_cast<int>(-num_scales & (format == bf16 ? 7 : 3));  // up to 16 bytes
    const int pad = static_cast<int>(threadIdx.x);
    if (pad < padding) store_bits(out.scales, num_scales + pad, 0, format);
  }
}

// Writes a tile of values, zeros past its end, into the sections of its part; kept_at: its first element's residual.
template <bool kExact>
__device__ __forceinline__ void encode_tile(float (&y)[kPerThread], const Sections& out, const Tile& tile,
                                            i64 part_numel, const Encoder& encoder, i64 position, i64 kept_at,
                                            Scratch& scratch) {
  const int wire = kExact ? fp32 : WIRE;
  const bool stochastic = !kExact && STOCHASTIC, rotated = !kExact && ROTATED;
  const bool scaled = has_scales(wire), feedback = !kExact && FEEDBACK != none;
  float turned[kPerThread];                   // y, rotated if it is to be
  if (scaled || stochastic) __syncthreads();  // the last tile's scratch has been read
  if (stochastic) draw_noise(encoder, position, scratch.noise);
#pragma unroll
  for (int k = 0; k < TILE / NUM_THREADS; ++k) {
    const int i = element(k);
    if (feedback && i < tile.numel) y[k] += value_of(load_bits(encoder.residual, kept_at + i, FEEDBACK), FEEDBACK);
    turned[k] = rotated ? rotate(y[k]) : y[k];
    if (scaled) {
      const u32 top = warp_max(magnitude_bits(turned[k]));
      if (lane() == 0) scratch.tops[i / kRun] = top;
    }
  }
  if (scaled) {
    __syncthreads();
    make_scales(out, tile, part_numel, scratch);
  }
  if (scaled || stochastic) __syncthreads();
#pragma unroll
  for (int k = 0; k < TILE / NUM_THREADS; ++k) {
    const int i = element(k);
    const u32 noise = stochastic ? scratch.noise[i / 2] >> (i % 2 * 16) & 0xFFFFu : 0;
    const float factor = scaled ? scratch.factors[i / BLOCK] : 1.0f;
    const u32 code = scaled       ? quantised(turned[k], scratch.inverses[i / BLOCK], noise, wire)
                     : stochastic ? stochastically_rounded(turned[k], noise, wire)
                                  : rounded(turned[k], wire);
    const u32 next = wire == int4 ? __shfl_xor_sync(kAllLanes, code, 1) : 0;
    if (i < tile.numel && (wire != int4 || i % 2 == 0)) store_bits(out.codes, tile.inside + i, code | next << 4, wire);
    if (feedback) {
      const float value = scaled ? value_of(code, wire) * factor : value_of(code, wire);
      const float left_out = y[k] - (rotated ? unrotate(value) : value);
      const u32 kept = magnitude_bits(left_out) < kInfBits ? rounded(left_out, FEEDBACK) : 0;
      if (i < tile.numel) store_bits(encoder.residual, kept_at + i, kept, FEEDBACK);
    }
  }
}

// ---- kernels

template <bool kValue>
struct Constant {
  static constexpr bool value = kValue;
};

// The tiles that a block of threads takes, of the exact stream's parts, then of the lossy one's: calls
// take(whether it is exact, elements of a part, part of the message, tile of the part).
template <class Take>
__device__ __forceinline__ void for_each_tile(i64 part_numel, i64 part_exact_numel, int num_parts, const Take& take) {
  const i64 tiles = tiles_of(part_numel), exact_tiles = tiles_of(part_exact_numel);
  for (i64 unit = blockIdx.x; unit < num_parts * (exact_tiles + tiles); unit += gridDim.x) {
    const i64 lossy_unit = unit - num_parts * exact_tiles;
    if (lossy_unit < 0) {
      take(Constant<true>(), part_exact_numel, unit / exact_tiles, unit % exact_tiles);
    } else {
      take(Constant<false>(), part_numel, lossy_unit / tiles, lossy_unit % tiles);
    }
  }
}

#ifdef PACK
extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    pack_kernel(const void* grads, const i64* starts, const i64* offsets, const int* first, u64* counts, int num_slices,
                i64 numel, const i64* exact_starts, const i64* exact_offsets, const int* exact_first, u64* exact_counts,
                int exact_num_slices, i64 exact_numel, u8* exact_out, u8* scales_out, u8* codes_out, i64 part_stride,
                i64 part_numel, i64 part_exact_numel, i64 first_part, int num_parts, float scale, void* residual,
                i64 noise_seed, int noise_parameter, int noise_step, int noise_source) {
  __shared__ Scratch scratch;
  const Stream lossy = {starts, offsets, first, counts, num_slices, numel};
  const Stream exact = {exact_starts, exact_offsets, exact_first, exact_counts, exact_num_slices, exact_numel};
  const Encoder encoder = {residual, noise_seed, noise_parameter, noise_step, noise_source};
  for_each_tile(part_numel, part_exact_numel, num_parts, [&](auto is_exact, i64 of_part, i64 part, i64 index) {
    constexpr bool kExact = decltype(is_exact)::value;
    const Stream& stream = kExact ? exact : lossy;
    const Sections out = sections(scales_out, kExact ? exact_out : codes_out, part_stride, part);
    const Tile tile = tile_of<kExact>(stream, of_part, first_part + part, index);
    float y[kPerThread];
#pragma unroll
    for (int k = 0; k < TILE / NUM_THREADS; ++k) {
      y[k] = 0.0f;
      if (element(k) < tile.num_real) {
        y[k] = value_of(load_bits(grads, place_of<kExact>(stream, tile, element(k)), GRAD), GRAD) * scale;
      }
    }
#pragma unroll
    for (int k = 0; k < TILE / NUM_THREADS; ++k) {
      count(stream, tile.low, tile.high, tile.begin + element(k), magnitude_bits(y[k]) >= kInfBits);
    }
    encode_tile<kExact>(y, out, tile, of_part, encoder, tile.begin, tile.begin, scratch);
  });
}
#endif

#ifdef REDUCE
extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    reduce_kernel(u8* exact_in, u8* scales_in, u8* codes_in, u8* exact_out, u8* scales_out, u8* codes_out,
                  i64 in_stride, i64 part_stride, i64 part_numel, i64 part_exact_numel, i64 first_part, int num_parts,
                  int world_size, float scale, void* residual, i64 noise_seed, int noise_parameter, int noise_step,
                  int noise_source) {
  __shared__ Scratch scratch;
  const Encoder encoder = {residual, noise_seed, noise_parameter, noise_step, noise_source};
  for_each_tile(part_numel, part_exact_numel, num_parts, [&](auto is_exact, i64 of_part, i64 part, i64 index) {
    constexpr bool kExact = decltype(is_exact)::value;
    // In what is summed the parts that are written lie one behind the other.
    const Tile tile = tile_of(0, of_part, part, index);
    float total[kPerThread] = {};
#pragma unroll 1
    for (int rank = 0; rank < world_size; ++rank) {
      const Sections in = sections(scales_in, kExact ? exact_in : codes_in, in_stride, rank);
#pragma unroll
      for (int k = 0; k < TILE / NUM_THREADS; ++k) {
        if (element(k) >= tile.numel) continue;
        const float value = decoded(in, tile.begin + element(k), kExact ? fp32 : IN_WIRE);
        total[k] = rank == 0 ? value : total[k] + value;
      }
    }
#pragma unroll
    for (int k = 0; k < TILE / NUM_THREADS; ++k) total[k] = element(k) < tile.numel ? total[k] * scale : 0.0f;
    const Sections out = sections(scales_out, kExact ? exact_out : codes_out, part_stride, part);
    encode_tile<kExact>(total, out, tile, of_part, encoder, first_part * of_part + tile.begin, tile.begin, scratch);
  });
}
#endif

#ifdef UNPACK
extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    unpack_kernel(void* grads, const i64* starts, const i64* offsets, const int* first, int num_slices, i64 numel,
                  const i64* exact_starts, const i64* exact_offsets, const int* exact_first, int exact_num_slices,
                  i64 exact_numel, u8* exact_in, u8* scales_in, u8* codes_in, i64 part_stride, i64 part_numel,
                  i64 part_exact_numel, i64 first_part, int num_parts, int num_messages, float scale) {
  const Stream lossy = {starts, offsets, first, nullptr, num_slices, numel};
  const Stream exact = {exact_starts, exact_offsets, exact_first, nullptr, exact_num_slices, exact_numel};
  for_each_tile(part_numel, part_exact_numel, num_parts, [&](auto is_exact, i64 of_part, i64 part, i64 index) {
    constexpr bool kExact = decltype(is_exact)::value;
    const Stream& stream = kExact ? exact : lossy;
    const Tile tile = tile_of<kExact>(stream, of_part, first_part + part, index);
    float total[kPerThread];
#pragma unroll 1
    for (int message = 0; message < (SUMS ? num_messages : 1); ++message) {
      const Sections in = sections(scales_in, kExact ? exact_in : codes_in, part_stride, part + message);
#pragma unroll
      for (int k = 0; k < TILE / NUM_THREADS; ++k) {
        const int i = element(k);
        // Also what lies past the stream's end, for a rotation has mixed it with what lies before.
        float value = i < tile.numel ? decoded(in, tile.inside + i, kExact ? fp32 : WIRE) : 0.0f;
        if (!kExact && ROTATED) value = unrotate(value);
        total[k] = message == 0 ? value : total[k] + value;
      }
    }
#pragma unroll
    for (int k = 0; k < TILE / NUM_THREADS; ++k) {
      if (element(k) >= tile.num_real) continue;
      store_bits(grads, place_of<kExact>(stream, tile, element(k)), rounded(total[k] * scale, GRAD), GRAD);
    }
  });
}
#endif

#ifdef SCALE
extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    scale_kernel(float* data, i64 numel, float scale, const i64* starts, u64* counts, int num_slices) {
  const Stream stream = {starts, nullptr, nullptr, counts, num_slices, numel};
  for (i64 unit = blockIdx.x; unit < tiles_of(numel); unit += gridDim.x) {
#pragma unroll
    for (int k = 0; k < TILE / NUM_THREADS; ++k) {
      const i64 at = unit * TILE + element(k);
      float y = 0.0f;
      if (at < numel) data[at] = y = data[at] * scale;
      count(stream, 0, num_slices - 1, at, magnitude_bits(y) >= kInfBits);
    }
  }
}
#endif
