// Gradient slices ⇄ wire bytes for buckets that are lists of many slices: pack_kernel and unpack_kernel of the Triton
// files beside this one, with FLAT=False and HAS_EXACT=True, in CUDA C++.
//
// Why it exists: in such a bucket Triton has to walk over the slices of a tile with masked accesses of the whole tile,
// one pass for each slice, and loses the alignment of every pointer it takes from a table. Here a warp looks up the
// slice of every element by shuffles, at a cost that does not grow with the number of slices, and uses 16-byte accesses
// wherever a slice lies at a multiple of them. The engine uses it where bench/kernels.py shows it ahead of Triton:
// AHEAD_OF_TRITON in ragged_cuda.py.
//
// Work: a tile is TILE elements; the warps of a block take 512 consecutive elements each (a run), lanes 16 of those.
// A lane holds V consecutive elements at a time,
//     element of the run = (k · 32 + lane) · V + i        k < 16 / V, i < V
// with V such that neither the gradient's nor the wire's V elements exceed 16 bytes: every access of a warp is then one
// stretch of memory. The wire side, which starts at a multiple of 16 bytes, is always moved so. The gradient side is
// where every lane's V elements lie in one slice and aligned; where not, the run's gradients pass through shared
// memory, and the warp moves 32 consecutive elements at a time, one a lane: still stretches of memory.
// No warp waits for another, unless a block of int8 spans several runs.
//
// Macros: WIRE  0 fp32, 1 bf16, 2 fp16, 3 int8 (Wire in csrc/wire/layout.h)    GRAD  0, 1, 2: same words
//         BLOCK elements that share a scale    TILE  16 · threads
// Arithmetic as fusedcomm/reference.py, byte for byte: every operation rounds once, so compile without contraction.
// No header: NVRTC compiles it with no toolkit, and tests/native/cuda_on_cpu.h lets a C++ compiler do so too.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int kFp32 = 0, kBf16 = 1, kFp16 = 2, kInt8 = 3;

constexpr int kLaneNumel = 16;
constexpr int kRunNumel = 32 * kLaneNumel;
constexpr int kNumThreads = TILE / kLaneNumel;
constexpr int kNumWarps = kNumThreads / 32;
constexpr u32 kAllLanes = 0xFFFFFFFFu;

static_assert(TILE % kRunNumel == 0 && TILE % BLOCK == 0 && kNumThreads <= 1024, "TILE: runs and blocks, whole");
static_assert(BLOCK >= 32 && (BLOCK & (BLOCK - 1)) == 0, "BLOCK: a power of two, 32 or more");

constexpr u32 kInfBits = 0x7F800000u;
constexpr u32 kMagnitudeMask = 0x7FFFFFFFu;
// Blocks of smaller values become zeros, so that neither scale nor 127/absmax comes near overflow or a denormal.
[[maybe_unused]] constexpr u32 kLeastAbsmaxBits = (127u - 100u) << 23;  // 2^-100; used by int8 alone

template <class T>
__device__ __forceinline__ T lesser(T a, T b) {
  return b < a ? b : a;
}
template <class T>
__device__ __forceinline__ T greater(T a, T b) {
  return a < b ? b : a;
}

// Of all lanes, which must all take part.
__device__ __forceinline__ u32 warp_max(u32 value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = greater(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
#else
  return __reduce_max_sync(kAllLanes, value);
#endif
}

// ---- elements

#ifdef __CUDACC_RTC__
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

// Left to themselves, compilers have been seen to store such a group word by word.
__device__ __forceinline__ void store_words(void* to, const u32 (&words)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3]));
}
__device__ __forceinline__ void store_words(void* to, const u32 (&words)[2]) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(words[0]), "r"(words[1]));
}
__device__ __forceinline__ void store_words(void* to, const u32 (&words)[1]) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(words[0]));
}
#endif

// What memory holds of an element of a format.
template <int kFormat>
struct Element {
  using Bits = u32;
};
template <>
struct Element<kBf16> {
  using Bits = u16;
};
template <>
struct Element<kFp16> {
  using Bits = u16;
};
template <>
struct Element<kInt8> {
  using Bits = u8;
};

template <int kFormat>
__device__ __forceinline__ float value_of(typename Element<kFormat>::Bits bits) {
  if constexpr (kFormat == kFp32) return __uint_as_float(bits);
  if constexpr (kFormat == kBf16) return __uint_as_float(static_cast<u32>(bits) << 16);
  if constexpr (kFormat == kFp16) return float_of_half(bits);
  if constexpr (kFormat == kInt8) return static_cast<float>(static_cast<signed char>(bits));
}

// To nearest even, NaNs canonical. int8: |value| ≤ 127.
template <int kFormat>
__device__ __forceinline__ typename Element<kFormat>::Bits rounded(float value) {
  const bool nan = value != value;
  const u32 bits = nan ? 0x7FC00000u : __float_as_uint(value);
  if constexpr (kFormat == kFp32) return bits;
  // Half an ulp less one, plus the lowest kept bit, carries exactly where nearest-even rounds up.
  if constexpr (kFormat == kBf16) return static_cast<u16>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
  if constexpr (kFormat == kFp16) return nan ? static_cast<u16>(0x7E00u) : half_of_float(value);
  // 1.5·2^23 has an ulp of one, so the addition rounds to a whole number, in the low bits.
  if constexpr (kFormat == kInt8) return static_cast<u8>(__float_as_uint(__fadd_rn(value, 12582912.0f)));
}

// V consecutive elements, moved by one access (floats: by one or two).
template <int kFormat, int V>
struct alignas(V * sizeof(typename Element<kFormat>::Bits)) Vector {
  typename Element<kFormat>::Bits bits[V];
};

// To global memory.
template <int kFormat, int V>
__device__ __forceinline__ void store_vector(typename Element<kFormat>::Bits* to, const Vector<kFormat, V>& vector) {
  constexpr int kBits = 8 * sizeof(vector.bits[0]);
  constexpr int kNumWords = V * kBits / 32;
  u32 words[kNumWords];
#pragma unroll
  for (int k = 0; k < kNumWords; ++k) {
    words[k] = 0;
#pragma unroll
    for (int i = 0; i < 32 / kBits; ++i) words[k] |= static_cast<u32>(vector.bits[k * (32 / kBits) + i]) << (i * kBits);
  }
  store_words(to, words);
}

template <int V>
struct alignas(16) Values {
  float values[V];
};

using Grad = Element<GRAD>::Bits;
using Code = Element<WIRE>::Bits;

// The V of this gradient and a wire.
template <int kWire>
struct VectorNumel {
  static constexpr int kCodeNbytes = sizeof(typename Element<kWire>::Bits);
  static constexpr int value = 16 / (kCodeNbytes > sizeof(Grad) ? kCodeNbytes : static_cast<int>(sizeof(Grad)));
};

// ---- the bucket

// One of its two streams.
struct Stream {
  const i64* starts;
  const i64* offsets;
  const int* first;
  int num_slices;
  i64 numel;
  i64 part_numel;

  __device__ int tiles_per_part() const { return static_cast<int>((part_numel + TILE - 1) / TILE); }
};

// Field by field: chosen by its address it would lie in local memory.
__device__ __forceinline__ Stream chosen(bool first, const Stream& a, const Stream& b) {
  return {first ? a.starts : b.starts,         first ? a.offsets : b.offsets, first ? a.first : b.first,
          first ? a.num_slices : b.num_slices, first ? a.numel : b.numel,     first ? a.part_numel : b.part_numel};
}

struct Tile {
  bool exact;
  int part;   // of the chunk
  int index;  // of the section
  int first;  // slice of its first element
};

__device__ __forceinline__ Tile tile_at(int unit, const Stream& lossy, const Stream& exact, i64 first_part) {
  const int tiles = exact.tiles_per_part() + lossy.tiles_per_part();
  Tile tile;
  tile.part = unit / tiles;
  tile.index = unit - tile.part * tiles;
  tile.exact = tile.index < exact.tiles_per_part();
  if (!tile.exact) tile.index -= exact.tiles_per_part();
  const Stream stream = chosen(tile.exact, exact, lossy);
  tile.first = stream.first[(first_part + tile.part) * stream.tiles_per_part() + tile.index];
  return tile;
}

// A warp's share of a tile: `numel` elements from `begin` of the stream, which is `in_part` of the part's section; the
// first `num_real` are elements of the stream, the others zeros past its end. Both may be 0.
struct Run {
  i64 begin;
  i64 in_part;
  int numel;
  int num_real;
};

__device__ __forceinline__ int clipped(i64 numel, i64 limit) {
  return static_cast<int>(greater<i64>(lesser<i64>(numel, limit), 0));
}

__device__ __forceinline__ Run run_of(const Tile& tile, const Stream& stream, i64 first_part, int warp) {
  Run run;
  run.in_part = static_cast<i64>(tile.index) * TILE + warp * kRunNumel;
  run.begin = (first_part + tile.part) * stream.part_numel + run.in_part;
  run.numel = clipped(stream.part_numel - run.in_part, kRunNumel);
  run.num_real = clipped(stream.numel - run.begin, run.numel);
  return run;
}

template <int V>
__device__ __forceinline__ int element_of(int k, int lane) {
  return (k * 32 + lane) * V;
}

// ---- where elements lie

// 32 consecutive slices, one a lane, as seen from a run. Past the last slice stand empty ones.
struct Cursor {
  int first;    // lane 0's
  int end;      // the element of the run at which the lane's slice ends; 0 if before the run
  i64 to_grad;  // element of the run + to_grad = element of grads
};

__device__ __forceinline__ Cursor cursor_from(const Stream& stream, const Run& run, int first, int lane) {
  const int slice = first + lane;
  Cursor cursor = {first, kRunNumel, 0};
  if (slice < stream.num_slices) {
    cursor.end = clipped(stream.starts[slice + 1] - run.begin, kRunNumel);
    cursor.to_grad = stream.offsets[slice] - stream.starts[slice] + run.begin;
  }
  return cursor;
}

// With the slice of the run's first element among the cursor's; `first` is that slice or one before it.
__device__ __forceinline__ Cursor seek(const Stream& stream, const Run& run, int first, int lane) {
  const Cursor cursor = cursor_from(stream, run, first, lane);
  if (__any_sync(kAllLanes, cursor.end > 0)) return cursor;
  // The last slice that starts at or before the run, from `low` on and before `high`: 32 probes at a time.
  int low = first, high = stream.num_slices;
  while (high - low > 32) {
    const int stride = (high - low + 31) / 32;
    const int probe = low + lane * stride;
    const bool before = probe < high && stream.starts[probe] <= run.begin;
    low += (__popc(__ballot_sync(kAllLanes, before)) - 1) * stride;
    high = lesser(low + stride, high);
  }
  return cursor_from(stream, run, low, lane);
}

struct Place {
  i64 at;     // element of grads
  int slice;  // which
  int end;    // the element of the run at which the slice ends, at most 512
};

// Of the run's first element, by a cursor fresh from seek().
__device__ __forceinline__ Place head_of(const Cursor& cursor) {
  const int k = __popc(__ballot_sync(kAllLanes, cursor.end == 0));
  return {__shfl_sync(kAllLanes, cursor.to_grad, k), cursor.first + k, __shfl_sync(kAllLanes, cursor.end, k)};
}

// Of `element` of the run, every lane its own; in no slice before the cursor's. Moves the cursor on if need be.
__device__ __forceinline__ Place locate(const Stream& stream, const Run& run, int element, int lane, Cursor& cursor) {
  Place place = {0, 0, 0};
  for (;;) {
    int k = 0;  // how many of the first 31 slices end at or before the element
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      if (__shfl_sync(kAllLanes, cursor.end, k + step - 1) <= element) k += step;
    }
    const int end = __shfl_sync(kAllLanes, cursor.end, k);
    const i64 to_grad = __shfl_sync(kAllLanes, cursor.to_grad, k);
    if (place.end == 0 && end > element) place = {to_grad + element, cursor.first + k, end};
    if (__all_sync(kAllLanes, place.end > 0)) return place;
    cursor = cursor_from(stream, run, cursor.first + 32, lane);
  }
}

// Can the run's gradients be moved V at a time? If so, lane's k-th V of them `at[k]`.
template <int V>
__device__ __forceinline__ bool locate_vectors(const Stream& stream, const Run& run, const Place& head, int lane,
                                               Cursor cursor, i64 (&at)[kLaneNumel / V]) {
  if (run.num_real < kRunNumel) return false;
  if (head.end >= kRunNumel) {
#pragma unroll
    for (int k = 0; k < kLaneNumel / V; ++k) at[k] = head.at + element_of<V>(k, lane);
    return head.at % V == 0;
  }
  bool possible = true;
#pragma unroll
  for (int k = 0; k < kLaneNumel / V; ++k) {
    const int element = element_of<V>(k, lane);
    const Place place = locate(stream, run, element, lane, cursor);
    possible = possible && place.end >= element + V && place.at % V == 0;
    at[k] = place.at;
  }
  return __all_sync(kAllLanes, possible);
}

// Calls move(element of the run, element of grads, m) for the run's real elements, 32 neighbours at a time, one a lane,
// and kGroup times 32 together, m < kGroup; then flush(the lane's element for m = 0).
constexpr int kGroup = 4;

template <class Move, class Flush>
__device__ __forceinline__ void for_each_real(const Stream& stream, const Run& run, const Place& head, int lane,
                                              Cursor cursor, const Move& move, const Flush& flush) {
#pragma unroll 1
  for (int base = 0; base < kLaneNumel; base += kGroup) {
    i64 at[kGroup];
#pragma unroll
    for (int m = 0; m < kGroup; ++m) {
      const int element = element_of<1>(base + m, lane);
      // Asked also of elements past the end, as all lanes take part.
      at[m] = head.end >= run.num_real ? head.at + element : locate(stream, run, element, lane, cursor).at;
    }
#pragma unroll
    for (int m = 0; m < kGroup; ++m) {
      const int element = element_of<1>(base + m, lane);
      if (element < run.num_real) move(element, at[m], m);
    }
    flush(element_of<1>(base, lane));
  }
}

// ---- pack

// The run's scaled elements, zeros past the end. `staged` has 512 elements.
template <int V>
__device__ __forceinline__ void load_run(const Grad* grads, const Stream& stream, const Run& run, int first, int lane,
                                         float scale, float* staged, float (&y)[kLaneNumel]) {
#pragma unroll
  for (int j = 0; j < kLaneNumel; ++j) y[j] = 0.0f;
  if (run.num_real == 0) return;

  const Cursor cursor = seek(stream, run, first, lane);
  const Place head = head_of(cursor);
  i64 at[kLaneNumel / V];
  if (locate_vectors<V>(stream, run, head, lane, cursor, at)) {
    Vector<GRAD, V> vectors[kLaneNumel / V];
#pragma unroll
    for (int k = 0; k < kLaneNumel / V; ++k) vectors[k] = *reinterpret_cast<const Vector<GRAD, V>*>(grads + at[k]);
#pragma unroll
    for (int j = 0; j < kLaneNumel; ++j) y[j] = __fmul_rn(value_of<GRAD>(vectors[j / V].bits[j % V]), scale);
    return;
  }

  // Reads together, then writes: so that kGroup reads are on their way at once.
  float values[kGroup] = {};
  for_each_real(
      stream, run, head, lane, cursor,
      [&](int, i64 from, int m) { values[m] = __fmul_rn(value_of<GRAD>(grads[from]), scale); },
      [&](int element) {
#pragma unroll
        for (int m = 0; m < kGroup; ++m) {
          staged[element + 32 * m] = element + 32 * m < run.num_real ? values[m] : 0.0f;
        }
      });
  __syncwarp();
#pragma unroll
  for (int k = 0; k < kLaneNumel / V; ++k) {
    const auto vector = *reinterpret_cast<const Values<V>*>(staged + element_of<V>(k, lane));
#pragma unroll
    for (int i = 0; i < V; ++i) y[k * V + i] = vector.values[i];
  }
  __syncwarp();
}

// Rare, so it reads the run again.
__device__ __forceinline__ void count_nonfinite(const Grad* grads, const Stream& stream, const Run& run, int first,
                                                int lane, float scale, u64* counts) {
  Cursor cursor = seek(stream, run, first, lane);
  const int head_slice = head_of(cursor).slice;
  int in_head = 0;  // counted together, for atomics on one address queue up
#pragma unroll 1
  for (int j = 0; j < kLaneNumel; ++j) {
    const int element = element_of<1>(j, lane);
    const Place place = locate(stream, run, element, lane, cursor);
    bool nonfinite = false;
    if (element < run.num_real) {
      const float y = __fmul_rn(value_of<GRAD>(grads[place.at]), scale);
      nonfinite = (__float_as_uint(y) & kMagnitudeMask) >= kInfBits;
    }
    in_head += __popc(__ballot_sync(kAllLanes, nonfinite && place.slice == head_slice));
    if (nonfinite && place.slice != head_slice) atomicAdd(counts + place.slice, static_cast<u64>(1));
  }
  if (lane == 0 && in_head > 0) atomicAdd(counts + head_slice, static_cast<u64>(in_head));
}

// Blocks of a run, or the one that it is part of.
constexpr int kRunBlocks = BLOCK < kRunNumel ? kRunNumel / BLOCK : 1;
constexpr int kBlockRuns = BLOCK > kRunNumel ? BLOCK / kRunNumel : 1;

// Greatest magnitude, as bits, of block `lane` of the run, for BLOCK < 512.
template <int V>
__device__ __forceinline__ u32 block_absmax(const float (&y)[kLaneNumel], int lane) {
  constexpr int kNumVectors = kLaneNumel / V;
  constexpr int kWindow = 32 * V;  // elements that the lanes hold for one k
  u32 tops[kNumVectors];
#pragma unroll
  for (int k = 0; k < kNumVectors; ++k) {
    tops[k] = 0;
#pragma unroll
    for (int i = 0; i < V; ++i) tops[k] = greater(tops[k], __float_as_uint(y[k * V + i]) & kMagnitudeMask);
  }
  u32 absmax = 0;
  if constexpr (BLOCK >= kWindow) {
#pragma unroll
    for (int block = 0; block < kRunBlocks; ++block) {
      constexpr int kBlockVectors = BLOCK / kWindow;
      u32 top = 0;
#pragma unroll
      for (int k = 0; k < kBlockVectors; ++k) top = greater(top, tops[(block * kBlockVectors + k) % kNumVectors]);
      top = warp_max(top);
      if (lane == block) absmax = top;
    }
  } else {
    constexpr int kBlockLanes = BLOCK / V;
    constexpr int kWindowBlocks = kWindow / BLOCK;
#pragma unroll
    for (int k = 0; k < kNumVectors; ++k) {
#pragma unroll
      for (int step = kBlockLanes / 2; step > 0; step /= 2) {
        tops[k] = greater(tops[k], __shfl_xor_sync(kAllLanes, tops[k], step));
      }
      const u32 top = __shfl_sync(kAllLanes, tops[k], lane % kWindowBlocks * kBlockLanes);
      if (lane / kWindowBlocks == k) absmax = top;
    }
  }
  return absmax;
}

// int8: the run's codes and the scales of its blocks. Block `lane`'s absmax is given if BLOCK ≥ 512.
// |code| ≤ 127: |y| ≤ absmax and inverse ≤ (127/absmax)(1 + 2^-24), so |y·inverse| ≤ 127(1 + 2^-24)² < 127.5.
template <int V>
__device__ __forceinline__ void store_quantized(const float (&y)[kLaneNumel], const Run& run, i64 part_numel,
                                                u32 run_absmax, bool any_nonfinite, int lane, float* scales,
                                                u8* codes) {
  u32 absmax_bits = run_absmax;
  if constexpr (BLOCK < kRunNumel) absmax_bits = block_absmax<V>(y, lane);

  // Each lane divides for one block. A block of finite elements of y·0 has the codes that it needs.
  const bool normal = absmax_bits >= kLeastAbsmaxBits && absmax_bits < kInfBits;
  const float absmax = normal ? __uint_as_float(absmax_bits) : 127.0f;
  const float inverse = normal ? __fdiv_rn(127.0f, absmax) : 0.0f;
  const u32 abnormal_bits = absmax_bits < kInfBits ? 0u : kInfBits;
  const float scale = normal ? __fdiv_rn(absmax, 127.0f) : __uint_as_float(abnormal_bits);

  const bool starts_block = BLOCK <= kRunNumel || run.in_part % BLOCK == 0;
  if (lane < kRunBlocks && starts_block && lane * BLOCK < run.numel) scales[run.in_part / BLOCK + lane] = scale;
  if (run.in_part + run.numel == part_numel) {
    const i64 num_scales = part_numel / BLOCK;
    if (lane < (-num_scales & 3)) scales[num_scales + lane] = 0.0f;  // padding up to the codes
  }

#pragma unroll
  for (int k = 0; k < kLaneNumel / V; ++k) {
    const int element = element_of<V>(k, lane);
    const float factor = __shfl_sync(kAllLanes, inverse, element / BLOCK % kRunBlocks);
    Vector<kInt8, V> vector;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float value = y[k * V + i];
      vector.bits[i] = rounded<kInt8>(__fmul_rn(value, factor));
      if (any_nonfinite && (__float_as_uint(value) & kMagnitudeMask) >= kInfBits) {
        vector.bits[i] = static_cast<u8>(value != value ? 0 : value > 0 ? 127 : -127);
      }
    }
    if (element < run.numel) store_vector<kInt8, V>(codes + element, vector);
  }
}

// Writes a run of a section: its codes, and the scales of its blocks if the wire has any.
template <int kWire, int V>
__device__ __forceinline__ void store_run(const float (&y)[kLaneNumel], const Run& run, i64 part_numel, u32 run_absmax,
                                          bool any_nonfinite, int lane, float* scales,
                                          typename Element<kWire>::Bits* codes) {
  if constexpr (kWire == kInt8) {
    store_quantized<V>(y, run, part_numel, run_absmax, any_nonfinite, lane, scales, codes + run.in_part);
  } else {
#pragma unroll
    for (int k = 0; k < kLaneNumel / V; ++k) {
      Vector<kWire, V> vector;
#pragma unroll
      for (int i = 0; i < V; ++i) vector.bits[i] = rounded<kWire>(y[k * V + i]);
      const int element = element_of<V>(k, lane);
      if (element < run.numel) store_vector<kWire, V>(codes + run.in_part + element, vector);
    }
  }
}

constexpr int kLossyV = VectorNumel<WIRE>::value;
constexpr int kExactV = VectorNumel<kFp32>::value;

template <class T>
__device__ __forceinline__ T* of_part(T* section, int part, i64 part_stride) {
  return reinterpret_cast<T*>(reinterpret_cast<char*>(section) + part * part_stride);
}
template <class T>
__device__ __forceinline__ const T* of_part(const T* section, int part, i64 part_stride) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(section) + part * part_stride);
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    ragged_pack_kernel(const Grad* __restrict__ grads, const i64* __restrict__ starts, const i64* __restrict__ offsets,
                       const int* __restrict__ first, u64* counts, int num_slices, i64 numel,
                       const i64* __restrict__ exact_starts, const i64* __restrict__ exact_offsets,
                       const int* __restrict__ exact_first, u64* exact_counts, int exact_num_slices, i64 exact_numel,
                       u32* exact_out, float* scales_out, Code* codes_out, i64 part_stride, i64 part_numel,
                       i64 part_exact_numel, i64 first_part, int num_parts, float scale, const void*, i64, int, int,
                       int) {  // what only other variants use: residuals and noise
  const Stream lossy = {starts, offsets, first, num_slices, numel, part_numel};
  const Stream exact = {exact_starts, exact_offsets, exact_first, exact_num_slices, exact_numel, part_exact_numel};
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);  // so that it is known to be uniform
  const int stride = static_cast<int>(gridDim.x);
  const int num_units = num_parts * (lossy.tiles_per_part() + exact.tiles_per_part());

  alignas(16) __shared__ float staged[kNumWarps][kRunNumel];
  // For blocks longer than a run; two, so that one barrier a tile is enough.
  __shared__ u32 run_tops[2][kNumWarps];
  int turn = 0;

  int unit = static_cast<int>(blockIdx.x);
  if (unit >= num_units) return;
  Tile next = tile_at(unit, lossy, exact, first_part);
  for (; unit < num_units; unit += stride) {
    const Tile tile = next;
    if (unit + stride < num_units) next = tile_at(unit + stride, lossy, exact, first_part);  // its latency hides here
    const Stream stream = chosen(tile.exact, exact, lossy);
    const Run run = run_of(tile, stream, first_part, warp);

    float y[kLaneNumel];
    if (kExactV == kLossyV || !tile.exact) {
      load_run<kLossyV>(grads, stream, run, tile.first, lane, scale, staged[warp], y);
    } else {
      load_run<kExactV>(grads, stream, run, tile.first, lane, scale, staged[warp], y);
    }

    u32 top = 0;
#pragma unroll
    for (int j = 0; j < kLaneNumel; ++j) top = greater(top, __float_as_uint(y[j]) & kMagnitudeMask);
    const bool any_nonfinite = __any_sync(kAllLanes, top >= kInfBits);
    if constexpr (WIRE == kInt8 && BLOCK >= kRunNumel) {
      if (!tile.exact) {
        top = warp_max(top);
        if constexpr (BLOCK > kRunNumel) {
          if (lane == 0) run_tops[turn][warp] = top;
          __syncthreads();
          for (int k = 0; k < kBlockRuns; ++k) top = greater(top, run_tops[turn][warp / kBlockRuns * kBlockRuns + k]);
          turn ^= 1;
        }
      }
    }

    if (run.numel > 0) {
      float* scales = of_part(scales_out, tile.part, part_stride);
      if (tile.exact) {
        u32* out = of_part(exact_out, tile.part, part_stride);
        store_run<kFp32, kExactV>(y, run, part_exact_numel, top, any_nonfinite, lane, scales, out);
      } else {
        Code* out = of_part(codes_out, tile.part, part_stride);
        store_run<WIRE, kLossyV>(y, run, part_numel, top, any_nonfinite, lane, scales, out);
      }
      if (any_nonfinite) {
        count_nonfinite(grads, stream, run, tile.first, lane, scale, tile.exact ? exact_counts : counts);
      }
    }
  }
}

// ---- unpack

template <int kWire>
__device__ __forceinline__ void unpack_run(Grad* grads, const Stream& stream, const Run& run, int first, int lane,
                                           const typename Element<kWire>::Bits* codes, const float* scales, float scale,
                                           Grad* staged) {
  constexpr int V = VectorNumel<kWire>::value;
  Vector<kWire, V> coded[kLaneNumel / V];
#pragma unroll
  for (int k = 0; k < kLaneNumel / V; ++k) {
    const int element = element_of<V>(k, lane);
    coded[k] = {};
    if (element < run.numel) coded[k] = *reinterpret_cast<const Vector<kWire, V>*>(codes + run.in_part + element);
  }
  float block_scale = 0;  // of block `lane` of the run
  if constexpr (kWire == kInt8) {
    if (lane < kRunBlocks && lane * BLOCK < run.numel) block_scale = scales[run.in_part / BLOCK + lane];
  }

  const Cursor cursor = seek(stream, run, first, lane);
  const Place head = head_of(cursor);
  i64 at[kLaneNumel / V];
  const bool vectors = locate_vectors<V>(stream, run, head, lane, cursor, at);
#pragma unroll
  for (int k = 0; k < kLaneNumel / V; ++k) {
    const int element = element_of<V>(k, lane);
    float factor = 0;
    if constexpr (kWire == kInt8) factor = __shfl_sync(kAllLanes, block_scale, element / BLOCK % kRunBlocks);
    Vector<GRAD, V> vector;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      float value = value_of<kWire>(coded[k].bits[i]);
      if constexpr (kWire == kInt8) value = __fmul_rn(value, factor);
      vector.bits[i] = rounded<GRAD>(__fmul_rn(value, scale));
    }
    if (vectors) {
      store_vector<GRAD, V>(grads + at[k], vector);
    } else {
      *reinterpret_cast<Vector<GRAD, V>*>(staged + element) = vector;
    }
  }
  if (vectors) return;
  __syncwarp();
  for_each_real(
      stream, run, head, lane, cursor, [&](int element, i64 to, int) { grads[to] = staged[element]; }, [](int) {});
  __syncwarp();
}

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    ragged_unpack_kernel(Grad* grads, const i64* __restrict__ starts, const i64* __restrict__ offsets,
                         const int* __restrict__ first, int num_slices, i64 numel, const i64* __restrict__ exact_starts,
                         const i64* __restrict__ exact_offsets, const int* __restrict__ exact_first,
                         int exact_num_slices, i64 exact_numel, const u32* __restrict__ exact_in,
                         const float* __restrict__ scales_in, const Code* __restrict__ codes_in, i64 part_stride,
                         i64 part_numel, i64 part_exact_numel, i64 first_part, int num_parts, int /*num_messages*/,
                         float scale) {
  const Stream lossy = {starts, offsets, first, num_slices, numel, part_numel};
  const Stream exact = {exact_starts, exact_offsets, exact_first, exact_num_slices, exact_numel, part_exact_numel};
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);  // so that it is known to be uniform
  const int stride = static_cast<int>(gridDim.x);
  const int num_units = num_parts * (lossy.tiles_per_part() + exact.tiles_per_part());
  alignas(16) __shared__ Grad staged[kNumWarps][kRunNumel];

  int unit = static_cast<int>(blockIdx.x);
  Tile next = {};
  if (unit < num_units) next = tile_at(unit, lossy, exact, first_part);
  for (; unit < num_units; unit += stride) {
    const Tile tile = next;
    if (unit + stride < num_units) next = tile_at(unit + stride, lossy, exact, first_part);  // its latency hides here
    const Stream stream = chosen(tile.exact, exact, lossy);
    const Run run = run_of(tile, stream, first_part, warp);
    if (run.num_real == 0) continue;

    if (tile.exact) {
      const u32* codes = of_part(exact_in, tile.part, part_stride);
      unpack_run<kFp32>(grads, stream, run, tile.first, lane, codes, nullptr, scale, staged[warp]);
    } else {
      const Code* codes = of_part(codes_in, tile.part, part_stride);
      const float* scales = of_part(scales_in, tile.part, part_stride);
      unpack_run<WIRE>(grads, stream, run, tile.first, lane, codes, scales, scale, staged[warp]);
    }
  }
}
