// Gradients ⇄ wire bytes in CUDA C++: pack, reduce, unpack and scale. The kernels give the same bytes as
// fusedcomm/reference and as the Triton kernels beside this file, and they take the same parameters. They run where
// Triton cannot be used; see nvrtc.py.
//
// A thread block processes one tile after the other. A tile is at most TILE consecutive elements of one section of one
// part. In every step neighboring threads have neighboring elements, so a warp has 32 consecutive elements at a time:
// one run of the rotation. A block of the wire is one or more runs.
//
// Macros:
//   WIRE         format, as named in arithmetic.cuh, of what is encoded; unpack: of what is decoded
//   IN_WIRE      reduce: format of what is summed
//   GRAD         format of the gradients
//   FEEDBACK     format of the residual, or none
//   BLOCK        elements that share a scale
//   TILE         elements of a tile
//   NUM_THREADS  threads of a thread block, at least TILE / 16
//   FLAT, ROTATED, STOCHASTIC, SUMS: 0 or 1, the fields of KernelKey (csrc/devices/kernel_key.h)
//   PACK, REDUCE, UNPACK, SCALE: defined for each kernel to be compiled
//
// Compile without contraction (-fmad=false): every operation rounds once. This file includes no header of CUDA. NVRTC
// then needs no toolkit, and with tests/native/cuda_on_cpu.h a C++ compiler runs this file on a CPU, where the macros
// are variables.

#include "arithmetic.cuh"

// Most elements of a tile.
constexpr int kMaxTile = 8192;
// Most elements of a tile that one thread has.
constexpr int kPerThread = 16;

// Index, within the tile, of this thread's k-th element.
__device__ __forceinline__ int element(int k) { return k * NUM_THREADS + static_cast<int>(threadIdx.x); }

// ---- kernel parameters

// Slices laid end to end; see csrc/devices/slice_table.h.
struct SliceList {
  const i64* starts;
  const i64* offsets;
  const int* first;
  u64* counts;  // non-finite elements of each slice
  int num_slices;
  i64 numel;
};

// The scales and codes of one part. In an exact section the codes are fp32.
struct Sections {
  u8* scales;
  u8* codes;
};

// The sections of part number `part`, given those of part 0. `stride`: bytes from one part to the next.
__device__ __forceinline__ Sections sections(u8* scales, u8* codes, i64 stride, i64 part) {
  return {scales + part * stride, codes + part * stride};
}

// The value of element `index` of a part.
__device__ __forceinline__ float decoded(const Sections& in, i64 index, int format) {
  const float value = value_of(load_bits(in.codes, index, format), format);
  if (!has_scales(format)) return value;
  const int of_scales = scale_format(format);
  return value * value_of(load_bits(in.scales, index / BLOCK, of_scales), of_scales);
}

// The residual, if FEEDBACK, and the noise key, if STOCHASTIC.
struct Encoder {
  void* residual;
  i64 seed;
  int parameter, step, source;
};

__device__ __forceinline__ i64 tiles_of(i64 part_numel) { return (part_numel + TILE - 1) / TILE; }

// One tile of a part. Its first element has the index `begin` in the slice list and `inside` in the part. It has
// `numel` elements: the first `num_real` belong to the list, the others are zeros past its end. Its elements lie in the
// slices low … high, both included.
struct Tile {
  i64 begin, inside;
  int numel, num_real;
  int low, high;
};

__device__ __forceinline__ Tile tile_of(i64 list_numel, i64 part_numel, i64 part, i64 index) {
  const i64 inside = index * TILE, left = list_numel - part * part_numel - inside;
  const int numel = static_cast<int>(lesser(part_numel - inside, TILE));
  return {part * part_numel + inside, inside, numel, static_cast<int>(left < 0 ? 0 : lesser(left, numel)), 0, 0};
}

template <bool kExact>
__device__ __forceinline__ Tile tile_of(const SliceList& list, i64 part_numel, i64 part, i64 index) {
  Tile tile = tile_of(list.numel, part_numel, part, index);
  tile.high = list.num_slices - 1;
  if (kExact || !FLAT) {
    const int* first = list.first + part * tiles_of(part_numel) + index;
    tile.low = static_cast<int>(lesser(first[0], tile.high));
    // The table's next entry belongs to the element after the tile, even if that is the next part's first.
    if (tile.begin + tile.numel < list.numel) tile.high = static_cast<int>(lesser(first[1], tile.high));
  }
  return tile;
}

// The last of the slices low … high that starts at or before element `at`.
__device__ __forceinline__ int slice_of(const SliceList& list, int low, int high, i64 at) {
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (list.starts[middle] <= at) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Where the tile's element i lies, in elements from the bucket's origin.
template <bool kExact>
__device__ __forceinline__ i64 place_of(const SliceList& list, const Tile& tile, int i) {
  const i64 at = tile.begin + i;
  if (!kExact && FLAT) return at;
  const int slice = slice_of(list, tile.low, tile.high, at);
  return at + list.offsets[slice] - list.starts[slice];
}

// Adds the number of the warp's bad elements to list.counts, slice by slice, with one atomic addition for each slice.
// `at`: this lane's element, which lies in slices low … high.
__device__ __forceinline__ void count(const SliceList& list, int low, int high, i64 at, bool is_bad) {
  u32 left = __ballot_sync(kAllLanes, is_bad);
  if (left == 0) return;
  const int slice = is_bad ? slice_of(list, low, high, at) : -1;
  while (left != 0) {
    const int leader = __ffs(static_cast<int>(left)) - 1;
    const u32 same = __ballot_sync(kAllLanes, slice == __shfl_sync(kAllLanes, slice, leader));
    if (lane() == leader) atomicAdd(list.counts + slice, static_cast<u64>(__popc(same)));
    left &= ~same;
  }
}

// ---- encoding

// What the threads of a thread block share about a tile.
struct Scratch {
  u32 tops[kMaxTile / kRun];                                  // the greatest of each run's sort_bits
  float factors[kMaxTile / kRun], inverses[kMaxTile / kRun];  // each block's scale, and the factor of its elements
  u32 noise[kMaxTile / 2];                                    // 16 bits for each element
};

// Philox4x32-10 as in fusedcomm/reference: one counter for eight elements. `position`: the tile's first element.
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

// The bits of y's magnitude. With signed scales the bits of y, turned left by one.
__device__ __forceinline__ u32 sort_bits(float y) {
  const u32 bits = __float_as_uint(y);
  return signed_scales(WIRE) ? bits << 1 | bits >> 31 : bits & 0x7FFFFFFFu;
}

// Computes the blocks' scales from the runs' tops. Writes them to scratch and to the part, and zeroes
// the padding after the part's last scale.
__device__ __forceinline__ void make_scales(const Sections& out, const Tile& tile, i64 part_numel, Scratch& scratch) {
  const int format = scale_format(WIRE);
  const float greatest = greatest_value(WIRE);
  for (int block = static_cast<int>(threadIdx.x); block < TILE / BLOCK; block += NUM_THREADS) {
    u32 top = 0;
    for (int run = block * (BLOCK / kRun); run < (block + 1) * (BLOCK / kRun); ++run) {
      if (top < scratch.tops[run]) top = scratch.tops[run];
    }
    const u32 magnitude = signed_scales(WIRE) ? top >> 1 : top;
    const bool finite = magnitude < kInfBits, normal = finite && magnitude >= kLeastAbsmaxBits;
    const float absmax = __uint_as_float(normal ? magnitude : __float_as_uint(greatest));
    const u32 bits = !normal               ? rounded(__uint_as_float(finite ? 0 : kInfBits), format)
                     : signed_scales(WIRE) ? int4_scale(top)
                                           : rounded(absmax / greatest, format);
    const float factor = value_of(bits, format);
    scratch.factors[block] = factor;
    scratch.inverses[block] = !normal ? 0.0f : format == bf16 ? 1.0f / factor : greatest / absmax;
    if (block * BLOCK < tile.numel) store_bits(out.scales, tile.inside / BLOCK + block, bits, format);
  }
  if (tile.inside + tile.numel == part_numel) {
    const i64 num_scales = part_numel / BLOCK;
    const int padding = static_cast<int>(-num_scales & (format == bf16 ? 7 : 3));  // scales to a multiple of 16 bytes
    const int pad = static_cast<int>(threadIdx.x);
    if (pad < padding) store_bits(out.scales, num_scales + pad, 0, format);
  }
}

// Encodes the tile's values y, which must be zeros past its end, into the sections of its part. `position`: the
// bucket's lossy element that the tile starts with. `kept_at`: element of the residual that the tile starts with.
template <bool kExact>
__device__ __forceinline__ void encode_tile(float (&y)[kPerThread], const Sections& out, const Tile& tile,
                                            i64 part_numel, const Encoder& encoder, i64 position, i64 kept_at,
                                            Scratch& scratch) {
  const int wire = kExact ? fp32 : WIRE;
  const bool stochastic = !kExact && STOCHASTIC, rotated = !kExact && ROTATED;
  const bool scaled = has_scales(wire), feedback = !kExact && FEEDBACK != none;
  float turned[kPerThread];                   // y, rotated if ROTATED
  if (scaled || stochastic) __syncthreads();  // all threads have read the scratch of the tile before
  if (stochastic) draw_noise(encoder, position, scratch.noise);
#pragma unroll
  for (int k = 0; k < TILE / NUM_THREADS; ++k) {
    const int i = element(k);
    if (feedback && i < tile.numel) y[k] += value_of(load_bits(encoder.residual, kept_at + i, FEEDBACK), FEEDBACK);
    turned[k] = rotated ? rotate(y[k]) : y[k];
    if (scaled) {
      const u32 top = warp_max(sort_bits(turned[k]));
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
    const u32 next = in_pairs(wire) ? __shfl_xor_sync(kAllLanes, code, 1) : 0;
    if (i < tile.numel && (!in_pairs(wire) || i % 2 == 0))
      store_bits(out.codes, tile.inside + i, code | next << 4, wire);
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

// Calls take(Constant<whether the tile is exact>, elements of a part, part of the message, tile of the part) for each
// tile of this thread block: first those of the parts' exact sections, then those of the lossy ones.
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
  const SliceList lossy = {starts, offsets, first, counts, num_slices, numel};
  const SliceList exact = {exact_starts, exact_offsets, exact_first, exact_counts, exact_num_slices, exact_numel};
  const Encoder encoder = {residual, noise_seed, noise_parameter, noise_step, noise_source};
  for_each_tile(part_numel, part_exact_numel, num_parts, [&](auto is_exact, i64 of_part, i64 part, i64 index) {
    constexpr bool kExact = decltype(is_exact)::value;
    const SliceList& list = kExact ? exact : lossy;
    const Sections out = sections(scales_out, kExact ? exact_out : codes_out, part_stride, part);
    const Tile tile = tile_of<kExact>(list, of_part, first_part + part, index);
    float y[kPerThread];
#pragma unroll
    for (int k = 0; k < TILE / NUM_THREADS; ++k) {
      y[k] = 0.0f;
      if (element(k) < tile.num_real) {
        y[k] = value_of(load_bits(grads, place_of<kExact>(list, tile, element(k)), GRAD), GRAD) * scale;
      }
    }
#pragma unroll
    for (int k = 0; k < TILE / NUM_THREADS; ++k) {
      count(list, tile.low, tile.high, tile.begin + element(k), magnitude_bits(y[k]) >= kInfBits);
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
    // Each rank's input holds the elements of the output's parts one after the other.
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
  const SliceList lossy = {starts, offsets, first, nullptr, num_slices, numel};
  const SliceList exact = {exact_starts, exact_offsets, exact_first, nullptr, exact_num_slices, exact_numel};
  for_each_tile(part_numel, part_exact_numel, num_parts, [&](auto is_exact, i64 of_part, i64 part, i64 index) {
    constexpr bool kExact = decltype(is_exact)::value;
    const SliceList& list = kExact ? exact : lossy;
    const Tile tile = tile_of<kExact>(list, of_part, first_part + part, index);
    float total[kPerThread];
#pragma unroll 1
    for (int message = 0; message < (SUMS ? num_messages : 1); ++message) {
      const Sections in = sections(scales_in, kExact ? exact_in : codes_in, part_stride, part + message);
#pragma unroll
      for (int k = 0; k < TILE / NUM_THREADS; ++k) {
        const int i = element(k);
        // Elements past the list's end are decoded, too: a rotation has mixed them with those before.
        float value = i < tile.numel ? decoded(in, tile.inside + i, kExact ? fp32 : WIRE) : 0.0f;
        if (!kExact && ROTATED) value = unrotate(value);
        total[k] = message == 0 ? value : total[k] + value;
      }
    }
#pragma unroll
    for (int k = 0; k < TILE / NUM_THREADS; ++k) {
      if (element(k) >= tile.num_real) continue;
      store_bits(grads, place_of<kExact>(list, tile, element(k)), rounded(total[k] * scale, GRAD), GRAD);
    }
  });
}
#endif

#ifdef SCALE
extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    scale_kernel(float* data, i64 numel, float scale, const i64* starts, u64* counts, int num_slices) {
  const SliceList list = {starts, nullptr, nullptr, counts, num_slices, numel};
  for (i64 unit = blockIdx.x; unit < tiles_of(numel); unit += gridDim.x) {
#pragma unroll
    for (int k = 0; k < TILE / NUM_THREADS; ++k) {
      const i64 at = unit * TILE + element(k);
      float y = 0.0f;
      if (at < numel) data[at] = y = data[at] * scale;
      count(list, 0, num_slices - 1, at, magnitude_bits(y) >= kInfBits);
    }
  }
}
#endif
