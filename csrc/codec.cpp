// Walks chunks, parts and slices, and hands contiguous runs to the kernels of the chosen instruction set.
//
// A chunk's work is cut into units of at most kUnitNumel elements of one section of one part. Units write disjoint
// bytes and fall on the block grid, so the result depends neither on their order nor on the number of threads.
#include "codec.h"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "codec_kernels.h"
#include "thread_pool.h"

namespace fusedcomm {
namespace {

// A multiple of every block; large enough to hide the hand-over of a unit, small enough to share out a 1 MiB chunk.
constexpr int64_t kUnitNumel = 32 << 10;
static_assert(kUnitNumel % kMaxBlockNumel == 0, "units must fall on the block grid");

// Outputs from these sizes on bypass the caches, which saves reading each line before it is overwritten: 10 to 15% of
// the stage. A smaller chunk should be in cache for the transport that sends it next, and a smaller bucket for its
// reader: pack, unpack and a first read of a 4 MiB bucket take 0.34 ns per element, and 0.40 with bypassing; at 16 MiB
// it is 0.47 and 0.44.
constexpr int64_t kStreamedChunkNbytes = 4 << 20;
constexpr int64_t kStreamedBucketNbytes = 16 << 20;

Format format_of(Wire wire) {
  return wire == Wire::kBf16 ? Format::kBf16 : wire == Wire::kFp16 ? Format::kFp16 : Format::kFp32;
}

Format format_of(GradDtype dtype) {
  return dtype == GradDtype::kBFloat16 ? Format::kBf16 : dtype == GradDtype::kFloat16 ? Format::kFp16 : Format::kFp32;
}

int index_of(Format format) { return static_cast<int>(format); }

// Of a wire that has scales.
int code_index(Wire wire) {
  const Code code = wire == Wire::kInt8   ? Code::kInt8
                    : wire == Wire::kFp8  ? Code::kFp8
                    : wire == Wire::kInt4 ? Code::kInt4
                                          : Code::kFp8E5m2;
  return static_cast<int>(code);
}

// The same bytes whatever the calling thread has set: rounding mode, denormals flushed to zero.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
};

// ---- units of work

// Elements [first, first + numel) of one section of one part, padding included.
struct Unit {
  int64_t part;
  bool exact;
  int64_t first;
  int64_t numel;
};

class Units {
 public:
  Units(const PartLayout& part, int64_t num_parts)
      : part_(part),
        num_exact_(ceil_div(part.exact_numel, kUnitNumel)),
        num_per_part_(num_exact_ + ceil_div(part.lossy_numel, kUnitNumel)),
        count_(num_per_part_ * num_parts) {}

  int64_t count() const { return count_; }

  Unit operator[](int64_t index) const {
    const int64_t within = index % num_per_part_;
    const bool exact = within < num_exact_;
    const int64_t first = (exact ? within : within - num_exact_) * kUnitNumel;
    const int64_t section_numel = exact ? part_.exact_numel : part_.lossy_numel;
    return {index / num_per_part_, exact, first, std::min(kUnitNumel, section_numel - first)};
  }

  // One unit of each part sees to the bytes between the part's sections.
  bool is_first_of_part(int64_t index) const { return index % num_per_part_ == 0; }

 private:
  const PartLayout& part_;
  int64_t num_exact_;
  int64_t num_per_part_;
  int64_t count_;
};

// Where a unit's bytes are within its part.
template <class Byte>
struct Section {
  Section(const BucketLayout& layout, const Unit& unit, Byte* part) {
    if (unit.exact) {
      codes = part + unit.first * 4;
      return;
    }
    codes = part + layout.part.code_offset + codes_nbytes(layout.wire, unit.first);
    scales = part + layout.part.scale_offset + scales_nbytes(layout.wire, unit.first / layout.block_numel);
  }
  Byte* codes;
  Byte* scales = nullptr;  // of the lossy section of a wire that has them
};

void zero(std::byte* begin, std::byte* end) { std::memset(begin, 0, static_cast<size_t>(end - begin)); }

void zero_padding(const BucketLayout& layout, std::byte* part) {
  const PartLayout& p = layout.part;
  const int64_t num_blocks = ceil_div(p.lossy_numel, layout.block_numel);
  zero(part + p.exact_numel * 4, part + p.scale_offset);
  zero(part + p.scale_offset + scales_nbytes(layout.wire, num_blocks), part + p.code_offset);
  zero(part + p.code_offset + codes_nbytes(layout.wire, p.lossy_numel), part + p.nbytes);
}

// The elements of `range` that the unit covers; fewer than unit.numel where the stream ends.
Range covered(const Range& range, const Unit& unit) {
  const int64_t begin = std::min(range.begin + unit.first, range.end);
  return {begin, std::min(begin + unit.numel, range.end)};
}

// ---- slices

// Goes through the elements [begin, end) of a stream, one contiguous run after another.
class Cursor {
 public:
  Cursor(const Stream& stream, const Range& range)
      : stream_(stream), nbytes_(grad_nbytes(stream.dtype())), position_(range.begin), end_(range.end) {
    const auto& starts = stream.starts();
    slice_ = static_cast<size_t>(std::upper_bound(starts.begin(), starts.end(), position_) - starts.begin()) - 1;
  }

  int64_t remaining() const { return end_ - position_; }
  int64_t run_numel() const { return std::min(end_, stream_.starts()[slice_ + 1]) - position_; }
  std::byte* data() const {
    return static_cast<std::byte*>(stream_.slices()[slice_].data) + (position_ - stream_.starts()[slice_]) * nbytes_;
  }
  // By at most run_numel().
  void advance(int64_t numel) {
    position_ += numel;
    if (position_ == stream_.starts()[slice_ + 1]) ++slice_;
  }

 private:
  const Stream& stream_;
  int64_t nbytes_;
  int64_t position_;
  int64_t end_;
  size_t slice_;
};

void check_stream(const Stream& stream, int64_t numel, const char* name) {
  if (stream.numel() != numel) {
    throw std::invalid_argument(std::string("the ") + name + " stream has " + std::to_string(stream.numel()) +
                                " elements, its layout " + std::to_string(numel));
  }
}

void check_bucket(const BucketLayout& layout, int64_t chunk, const BucketStreams& streams) {
  if (chunk < 0 || chunk >= layout.num_chunks) {
    throw std::invalid_argument("chunk " + std::to_string(chunk) + " is not one of " +
                                std::to_string(layout.num_chunks));
  }
  check_stream(streams.lossy, layout.lossy_numel, "lossy");
  check_stream(streams.exact, layout.exact_numel, "exact");
}

// ---- one unit of each stage

int64_t pack_elements(const KernelTable& kernels, Format wire, Cursor cursor, int64_t padded_numel, float scale,
                      std::byte* out, Format grad, bool streamed) {
  const ConvertFn convert = kernels.convert[index_of(grad)][index_of(wire)];
  std::byte* const end = out + padded_numel * format_nbytes(wire);
  int64_t nonfinite = 0;
  while (cursor.remaining() > 0) {
    const int64_t numel = cursor.run_numel();
    nonfinite += convert(cursor.data(), out, numel, scale, streamed);
    out += numel * format_nbytes(wire);
    cursor.advance(numel);
  }
  zero(out, end);
  return nonfinite;
}

// Goes through the blocks of a part's lossy section, one run of them after another.
template <class Byte>
class Blocks {
 public:
  Blocks(const KernelTable& kernels, const BucketLayout& layout, const Section<Byte>& section)
      : kernels_(kernels.blocks[code_index(layout.wire)]), layout_(layout), section_(section) {}

  int64_t block_numel() const { return layout_.block_numel; }

  // Encodes num_blocks of src·scale. Returns how many products are not finite.
  int64_t encode(const void* src, Format grad, int64_t num_blocks, float scale, bool streamed) {
    const auto& quantize = layout_.rotated ? kernels_.quantize_rotated : kernels_.quantize;
    const Section<Byte> out = take(num_blocks);
    return quantize[index_of(grad)](src, out.scales, out.codes, num_blocks, block_numel(), scale, streamed);
  }

  // dst = decoded·factor, of num_blocks.
  void decode(void* dst, Format grad, int64_t num_blocks, float factor, bool streamed) {
    const auto& dequantize = layout_.rotated ? kernels_.dequantize_rotated : kernels_.dequantize;
    const Section<Byte> in = take(num_blocks);
    dequantize[index_of(grad)](in.scales, in.codes, dst, num_blocks, block_numel(), factor, streamed);
  }

  // What blocks of zeros are encoded to, rotated or not.
  void zero(int64_t num_blocks) {
    const Section<Byte> out = take(num_blocks);
    std::memset(out.scales, 0, static_cast<size_t>(section_.scales - out.scales));
    std::memset(out.codes, 0, static_cast<size_t>(section_.codes - out.codes));
  }

 private:
  // Where the next num_blocks are.
  Section<Byte> take(int64_t num_blocks) {
    const Section<Byte> taken = section_;
    section_.scales += scales_nbytes(layout_.wire, num_blocks);
    section_.codes += codes_nbytes(layout_.wire, num_blocks * block_numel());
    return taken;
  }

  const BlockKernels& kernels_;
  const BucketLayout& layout_;
  Section<Byte> section_;
};

// The block's products as fp32, zeros after the last element. Multiplying these by one again changes nothing.
void gather_block(const KernelTable& kernels, Cursor& cursor, int64_t block_numel, float scale, float* tile,
                  Format grad) {
  const ConvertFn convert = kernels.convert[index_of(grad)][index_of(Format::kFp32)];
  int64_t filled = 0;
  while (filled < block_numel && cursor.remaining() > 0) {
    const int64_t numel = std::min(block_numel - filled, cursor.run_numel());
    convert(cursor.data(), tile + filled, numel, scale, false);
    cursor.advance(numel);
    filled += numel;
  }
  std::memset(tile + filled, 0, static_cast<size_t>(block_numel - filled) * sizeof(float));
}

// Rounds the block's values into the slices that it straddles, as far as the stream goes.
void scatter_block(const KernelTable& kernels, Cursor& cursor, int64_t block_numel, const float* tile, Format grad) {
  const ConvertFn convert = kernels.convert[index_of(Format::kFp32)][index_of(grad)];
  int64_t taken = 0;
  while (taken < block_numel && cursor.remaining() > 0) {
    const int64_t numel = std::min(block_numel - taken, cursor.run_numel());
    convert(tile + taken, cursor.data(), numel, 1.0f, false);
    cursor.advance(numel);
    taken += numel;
  }
}

int64_t pack_blocks(const KernelTable& kernels, Blocks<std::byte> blocks, Cursor cursor, int64_t padded_numel,
                    float scale, Format grad, bool streamed) {
  const int64_t block_numel = blocks.block_numel();
  int64_t num_left = ceil_div(padded_numel, block_numel);
  int64_t nonfinite = 0;
  alignas(64) float tile[kMaxBlockNumel];
  while (cursor.remaining() > 0) {
    int64_t num_blocks = cursor.run_numel() / block_numel;
    if (num_blocks > 0) {
      nonfinite += blocks.encode(cursor.data(), grad, num_blocks, scale, streamed);
      cursor.advance(num_blocks * block_numel);
    } else {
      num_blocks = 1;
      gather_block(kernels, cursor, block_numel, scale, tile, grad);
      nonfinite += blocks.encode(tile, Format::kFp32, 1, 1.0f, false);
    }
    num_left -= num_blocks;
  }
  blocks.zero(num_left);
  return nonfinite;
}

void unpack_blocks(const KernelTable& kernels, Blocks<const std::byte> blocks, Cursor cursor, float scale, Format grad,
                   bool streamed) {
  const int64_t block_numel = blocks.block_numel();
  alignas(64) float tile[kMaxBlockNumel];
  while (cursor.remaining() > 0) {
    const int64_t num_blocks = cursor.run_numel() / block_numel;
    if (num_blocks > 0) {
      blocks.decode(cursor.data(), grad, num_blocks, scale, streamed);
      cursor.advance(num_blocks * block_numel);
    } else {
      blocks.decode(tile, Format::kFp32, 1, scale, false);
      scatter_block(kernels, cursor, block_numel, tile, grad);
    }
  }
}

int64_t pack_unit(const KernelTable& kernels, const PackArgs& args, const Unit& unit, bool streamed) {
  const BucketLayout& layout = args.layout;
  const Stream& stream = unit.exact ? args.streams.exact : args.streams.lossy;
  const Range range =
      unit.exact ? layout.exact_range(args.chunk, unit.part) : layout.lossy_range(args.chunk, unit.part);
  const Cursor cursor(stream, covered(range, unit));
  const Section<std::byte> out(layout, unit, args.out + unit.part * layout.part.nbytes);
  const Format grad = format_of(stream.dtype());
  if (!unit.exact && has_scales(layout.wire)) {
    return pack_blocks(kernels, {kernels, layout, out}, cursor, unit.numel, args.scale, grad, streamed);
  }
  const Format wire = unit.exact ? Format::kFp32 : format_of(layout.wire);
  return pack_elements(kernels, wire, cursor, unit.numel, args.scale, out.codes, grad, streamed);
}

void unpack_unit(const KernelTable& kernels, const UnpackArgs& args, const Unit& unit, bool streamed) {
  const BucketLayout& layout = args.layout;
  const Stream& stream = unit.exact ? args.streams.exact : args.streams.lossy;
  const Range range =
      unit.exact ? layout.exact_range(args.chunk, unit.part) : layout.lossy_range(args.chunk, unit.part);
  const Section<const std::byte> in(layout, unit, args.parts + unit.part * layout.part.nbytes);
  const Format grad = format_of(stream.dtype());
  Cursor cursor(stream, covered(range, unit));
  if (!unit.exact && has_scales(layout.wire)) {
    unpack_blocks(kernels, {kernels, layout, in}, cursor, args.scale, grad, streamed);
    return;
  }
  const Format wire = unit.exact ? Format::kFp32 : format_of(layout.wire);
  const ConvertFn convert = kernels.convert[index_of(wire)][index_of(grad)];
  const std::byte* codes = in.codes;
  while (cursor.remaining() > 0) {
    const int64_t numel = cursor.run_numel();
    convert(codes, cursor.data(), numel, args.scale, streamed);
    codes += numel * format_nbytes(wire);
    cursor.advance(numel);
  }
}

// Sums one tile of every rank's part in rank order and encodes it into `out`, a part.
void reduce_tile(const KernelTable& kernels, const ReduceArgs& args, const Unit& tile, float* acc, std::byte* out) {
  const BucketLayout& layout = args.layout;
  const Section<const std::byte> first(layout, tile, args.parts);
  const Section<std::byte> encoded(layout, tile, out);
  const int fp32 = index_of(Format::kFp32);
  if (!tile.exact && has_scales(layout.wire)) {
    const BlockKernels& blocks = kernels.blocks[code_index(layout.wire)];
    const int64_t num_blocks = tile.numel / layout.block_numel;
    blocks.sum(first.scales, first.codes, layout.part.nbytes, layout.num_parts, acc, num_blocks, layout.block_numel);
    blocks.quantize[fp32](acc, encoded.scales, encoded.codes, num_blocks, layout.block_numel, args.scale, false);
  } else {
    const int wire = index_of(tile.exact ? Format::kFp32 : format_of(layout.wire));
    kernels.sum[wire](first.codes, layout.part.nbytes, layout.num_parts, acc, tile.numel);
    kernels.convert[fp32][wire](acc, encoded.codes, tile.numel, args.scale, false);
  }
}

// The accumulator of a tile stays in the first-level cache. Measured with 4 ranks: 1024 elements reach 0.9 of memcpy's
// rate for bf16 and 0.75 for int8; 4096, where reading and encoding overlap less, 0.8 and 0.5.
constexpr int64_t kTileNumel = 1024;

void reduce_unit(const KernelTable& kernels, const ReduceArgs& args, const Unit& unit) {
  alignas(64) float acc[std::max(kTileNumel, kMaxBlockNumel)];
  const int64_t tile_numel = std::max(kTileNumel, args.layout.block_numel);
  for (int64_t first = 0; first < unit.numel; first += tile_numel) {
    const Unit tile{0, unit.exact, unit.first + first, std::min(tile_numel, unit.numel - first)};
    reduce_tile(kernels, args, tile, acc, args.out);
  }
}

// Copies what reduce_unit wrote into the other copies.
void repeat_unit(const ReduceArgs& args, const Unit& unit) {
  const BucketLayout& layout = args.layout;
  const Section<const std::byte> from(layout, unit, args.out);
  const Wire wire = unit.exact ? Wire::kFp32 : layout.wire;
  const int64_t codes = codes_nbytes(wire, unit.numel);
  const int64_t scales = scales_nbytes(wire, ceil_div(unit.numel, layout.block_numel));
  for (int64_t copy = 1; copy < args.num_copies; ++copy) {
    const Section<std::byte> to(layout, unit, args.out + copy * layout.part.nbytes);
    std::memcpy(to.codes, from.codes, static_cast<size_t>(codes));
    if (scales > 0) std::memcpy(to.scales, from.scales, static_cast<size_t>(scales));
  }
}

std::vector<const KernelTable*> available_kernels() {
  std::vector<const KernelTable*> tables;
  for (const KernelTable* table : {portable_kernels(), neon_kernels(), avx2_kernels(), avx512_kernels()}) {
    if (table) tables.push_back(table);
  }
  return tables;
}

const KernelTable& kernels_named(const std::string& isa) {
  std::string choices = "auto";
  const auto tables = available_kernels();
  for (const KernelTable* table : tables) {
    if (isa == table->isa) return *table;
    choices += std::string(", ") + table->isa;
  }
  if (isa == "auto") return *tables.back();
  throw std::invalid_argument("isa='" + isa + "' is not possible here: use one of " + choices);
}

int checked_num_threads(int num_threads) {
  if (num_threads < 1) {
    throw std::invalid_argument("num_threads=" + std::to_string(num_threads) + " is not possible: use 1 or more");
  }
  return num_threads;
}

}  // namespace

// ---- Stream

void Stream::clear() {
  slices_.clear();
  starts_.resize(1);
}

void Stream::append(void* data, int64_t numel, GradDtype dtype) {
  if (numel < 0) throw std::invalid_argument("a slice of " + std::to_string(numel) + " elements is not possible");
  if (numel == 0) return;
  if (slices_.empty()) {
    dtype_ = dtype;
  } else if (dtype != dtype_) {
    throw std::invalid_argument("the slices of a stream must have one dtype");
  }
  const int64_t end = starts_.back() + numel;
  if (!slices_.empty()) {
    Slice& last = slices_.back();
    if (static_cast<std::byte*>(last.data) + last.numel * grad_nbytes(dtype) == data) {
      last.numel += numel;
      starts_.back() = end;
      return;
    }
  }
  slices_.push_back({data, numel});
  starts_.push_back(end);
}

// ---- Codec

struct Codec::Impl {
  Impl(const std::string& isa_name, int num_threads)
      : kernels(kernels_named(isa_name)),
        isa(kernels.isa),
        num_threads(checked_num_threads(num_threads)),
        pool(num_threads - 1) {}

  template <class Function>
  void for_each_unit(const Units& units, const Function& function) {
    pool.run(units.count(), [&](int64_t index) {
      const DefaultFloatEnvironment environment;
      function(units[index], units.is_first_of_part(index));
    });
  }

  const KernelTable& kernels;
  const std::string isa;
  const int num_threads;
  ThreadPool pool;
};

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const KernelTable* table : available_kernels()) names.emplace_back(table->isa);
  return names;
}

Codec::Codec(const std::string& isa, int num_threads) : impl_(std::make_unique<Impl>(isa, num_threads)) {}
Codec::~Codec() = default;

int64_t Codec::pack(const PackArgs& args) const {
  check_bucket(args.layout, args.chunk, args.streams);
  const bool streamed = args.layout.chunk_nbytes() >= kStreamedChunkNbytes;
  std::atomic<int64_t> nonfinite{0};
  impl_->for_each_unit(Units(args.layout.part, args.layout.num_parts), [&](const Unit& unit, bool first_of_part) {
    if (first_of_part) zero_padding(args.layout, args.out + unit.part * args.layout.part.nbytes);
    nonfinite.fetch_add(pack_unit(impl_->kernels, args, unit, streamed), std::memory_order_relaxed);
    if (streamed) impl_->kernels.fence();
  });
  return nonfinite.load(std::memory_order_relaxed);
}

void Codec::reduce(const ReduceArgs& args) const {
  impl_->for_each_unit(Units(args.layout.part, 1), [&](const Unit& unit, bool first_of_part) {
    for (int64_t copy = 0; first_of_part && copy < args.num_copies; ++copy) {
      zero_padding(args.layout, args.out + copy * args.layout.part.nbytes);
    }
    reduce_unit(impl_->kernels, args, unit);
    repeat_unit(args, unit);
  });
}

void Codec::unpack(const UnpackArgs& args) const {
  check_bucket(args.layout, args.chunk, args.streams);
  const bool streamed = args.streams.lossy.numel() * grad_nbytes(args.streams.lossy.dtype()) >= kStreamedBucketNbytes;
  impl_->for_each_unit(Units(args.layout.part, args.layout.num_parts), [&](const Unit& unit, bool) {
    unpack_unit(impl_->kernels, args, unit, streamed);
    if (streamed) impl_->kernels.fence();
  });
}

int64_t Codec::scale_in_place(const Stream& stream, float scale) const {
  std::atomic<int64_t> nonfinite{0};
  const ScaleFn scale_run = impl_->kernels.scale[index_of(format_of(stream.dtype()))];
  impl_->pool.run(ceil_div(stream.numel(), kUnitNumel), [&](int64_t index) {
    const DefaultFloatEnvironment environment;
    const int64_t begin = index * kUnitNumel;
    for (Cursor cursor(stream, {begin, std::min(begin + kUnitNumel, stream.numel())}); cursor.remaining() > 0;) {
      const int64_t numel = cursor.run_numel();
      nonfinite.fetch_add(scale_run(cursor.data(), numel, scale), std::memory_order_relaxed);
      cursor.advance(numel);
    }
  });
  return nonfinite.load(std::memory_order_relaxed);
}

const std::string& Codec::isa() const { return impl_->isa; }
int Codec::num_threads() const { return impl_->num_threads; }

}  // namespace fusedcomm
