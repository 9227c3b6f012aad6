#include "codec/stages.h"

#include <algorithm>
#include <cstring>

#include "codec/tile_encoder.h"

namespace fusedcomm {
namespace {

int64_t pack_elements(const KernelTable& kernels, Format wire, Cursor cursor, int64_t padded_numel, float scale,
                      std::byte* out, Format grad, bool streamed) {
  const ConvertFn convert = kernels.convert[index_of(grad)][index_of(wire)];
  std::byte* const end = out + padded_numel * format_nbytes(wire);
  int64_t nonfinite = 0;
  while (cursor.remaining() > 0) {
    const int64_t numel = cursor.run_numel();
    if (cursor.data() == nullptr) {
      zero(out, out + numel * format_nbytes(wire));
    } else {
      nonfinite += convert(cursor.data(), out, numel, scale, streamed);
    }
    out += numel * format_nbytes(wire);
    cursor.advance(numel);
  }
  zero(out, end);
  return nonfinite;
}

// Walks the blocks of a part's lossy section. Every call processes the next num_blocks.
template <class Byte>
class Blocks {
 public:
  Blocks(const KernelTable& kernels, const BucketLayout& layout, const Section<Byte>& section)
      : kernels_(kernels.blocks[scaled_index(layout.wire)]), layout_(layout), section_(section) {}

  int64_t block_numel() const { return layout_.block_numel; }

  // Encodes src·scale. Returns how many products are not finite.
  int64_t encode(const void* src, Format grad, int64_t num_blocks, float scale, bool streamed) {
    const Section<Byte> out = take(num_blocks);
    return kernels_.quantize[index_of(grad)](src, out.scales, out.codes, num_blocks, block_numel(), scale, streamed);
  }

  // dst = decoded·factor
  void decode(void* dst, Format grad, int64_t num_blocks, float factor, bool streamed) {
    const Section<Byte> in = take(num_blocks);
    kernels_.dequantize[index_of(grad)](in.scales, in.codes, dst, num_blocks, block_numel(), factor, streamed);
  }

  // Writes blocks of zeros, whose scales and codes are zero bytes.
  void zero(int64_t num_blocks) {
    const Section<Byte> out = take(num_blocks);
    std::memset(out.scales, 0, static_cast<size_t>(section_.scales - out.scales));
    std::memset(out.codes, 0, static_cast<size_t>(section_.codes - out.codes));
  }

 private:
  // Returns the section of the next num_blocks and steps over them.
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

// Fills the tile with the next `numel` elements times `scale`, as fp32, and with zeros in holes and after the cursor's
// last element.
// Encoding the tile with scale 1 afterwards changes no value. Returns how many products are not finite.
int64_t gather(const KernelTable& kernels, Cursor& cursor, int64_t numel, float scale, float* tile, Format grad) {
  const ConvertFn convert = kernels.convert[index_of(grad)][index_of(Format::kFp32)];
  int64_t filled = 0, nonfinite = 0;
  while (filled < numel && cursor.remaining() > 0) {
    const int64_t run = std::min(numel - filled, cursor.run_numel());
    if (cursor.data() == nullptr) {
      std::fill_n(tile + filled, run, 0.0F);
    } else {
      nonfinite += convert(cursor.data(), tile + filled, run, scale, false);
    }
    cursor.advance(run);
    filled += run;
  }
  std::memset(tile + filled, 0, static_cast<size_t>(numel - filled) * sizeof(float));
  return nonfinite;
}

// Writes tile·scale, rounded to the gradient's format, to the slices that the tile straddles, up to the cursor's end.
void scatter(const KernelTable& kernels, Cursor& cursor, int64_t tile_numel, const float* tile, float scale,
             Format grad, bool streamed) {
  const ConvertFn convert = kernels.convert[index_of(Format::kFp32)][index_of(grad)];
  int64_t taken = 0;
  while (taken < tile_numel && cursor.remaining() > 0) {
    const int64_t numel = std::min(tile_numel - taken, cursor.run_numel());
    if (cursor.data() != nullptr) convert(tile + taken, cursor.data(), numel, scale, streamed);
    taken += numel;
    cursor.advance(numel);
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
    if (num_blocks > 0 && cursor.data() == nullptr) {
      blocks.zero(num_blocks);
      cursor.advance(num_blocks * block_numel);
    } else if (num_blocks > 0) {
      nonfinite += blocks.encode(cursor.data(), grad, num_blocks, scale, streamed);
      cursor.advance(num_blocks * block_numel);
    } else {
      num_blocks = 1;
      gather(kernels, cursor, block_numel, scale, tile, grad);
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
    const int64_t num_blocks = cursor.data() == nullptr ? 0 : cursor.run_numel() / block_numel;
    if (num_blocks > 0) {
      blocks.decode(cursor.data(), grad, num_blocks, scale, streamed);
      cursor.advance(num_blocks * block_numel);
    } else {
      blocks.decode(tile, Format::kFp32, 1, scale, false);
      scatter(kernels, cursor, block_numel, tile, 1.0f, grad, false);
    }
  }
}

// Packs the lossy section with a TileEncoder. It needs whole tiles, so a tile that straddles slices is gathered first.
int64_t pack_tiles(const KernelTable& kernels, const PackArgs& args, const Unit& unit, Cursor cursor, Format grad) {
  const BucketLayout& layout = args.layout;
  std::byte* const part = args.out + part_place(layout, unit.part);
  const int64_t part_begin = (args.chunk * layout.num_parts + unit.part) * layout.part.lossy_numel;
  TileEncoder encoder(kernels, layout, args.residual);
  alignas(64) float tile[kMaxTileNumel];
  int64_t nonfinite = 0;
  for (int64_t first = 0; first < unit.numel;) {
    const int64_t numel = std::min(encoder.tile_numel(), unit.numel - first);
    nonfinite += gather(kernels, cursor, numel, args.scale, tile, grad);
    const int64_t begin = part_begin + unit.first + first;
    encoder.encode(tile, numel, begin, {layout, {unit.part, false, unit.first + first, numel}, part});
    first += numel;
  }
  return nonfinite;
}

// acc = the sum, in rank order, of the elements of `unit` in the from.num_parts parts. Ignores unit.part.
void sum_unit(const KernelTable& kernels, const BucketLayout& from, const std::byte* parts, const Unit& unit,
              float* acc) {
  const Section<const std::byte> first(from, unit, parts + part_place(from, 0));
  if (!unit.exact && has_scales(from.wire)) {
    kernels.blocks[scaled_index(from.wire)].sum(first.scales, first.codes, from.part_stride, from.num_parts, acc,
                                                unit.numel / from.block_numel, from.block_numel);
  } else {
    const int wire = index_of(unit.exact ? Format::kFp32 : format_of(from.wire));
    kernels.sum[wire](first.codes, from.part_stride, from.num_parts, acc, unit.numel);
  }
}

// unpack_unit for several messages.
void unpack_sum(const KernelTable& kernels, const UnpackArgs& args, const Unit& unit, Cursor cursor, Format grad,
                bool streamed) {
  BucketLayout from = args.layout;
  from.num_parts = args.num_messages;
  const int64_t tile_numel = std::max(kTileNumel, from.block_numel);
  alignas(64) float acc[kMaxTileNumel];
  for (int64_t first = 0; cursor.remaining() > 0; first += tile_numel) {
    const Unit tile{0, unit.exact, unit.first + first, std::min(tile_numel, unit.numel - first)};
    sum_unit(kernels, from, args.parts, tile, acc);
    scatter(kernels, cursor, tile.numel, acc, args.scale, grad, streamed);
  }
}

}  // namespace

int64_t pack_unit(const KernelTable& kernels, const PackArgs& args, const Unit& unit, bool streamed) {
  const BucketLayout& layout = args.layout;
  const SliceList& list = unit.exact ? args.slices.exact : args.slices.lossy;
  const Range range =
      unit.exact ? layout.exact_range(args.chunk, unit.part) : layout.lossy_range(args.chunk, unit.part);
  const Cursor cursor(list, covered(range, unit));
  const Section<std::byte> out(layout, unit, args.out + part_place(layout, unit.part));
  const Format grad = format_of(list.dtype());
  if (!unit.exact && args.residual.data) return pack_tiles(kernels, args, unit, cursor, grad);
  if (!unit.exact && has_scales(layout.wire)) {
    return pack_blocks(kernels, {kernels, layout, out}, cursor, unit.numel, args.scale, grad, streamed);
  }
  const Format wire = unit.exact ? Format::kFp32 : format_of(layout.wire);
  return pack_elements(kernels, wire, cursor, unit.numel, args.scale, out.codes, grad, streamed);
}

void reduce_unit(const KernelTable& kernels, const ReduceArgs& args, const Unit& unit) {
  const BucketLayout& to = args.to;
  std::byte* const part = args.out + part_place(to, unit.part);
  const int fp32 = index_of(Format::kFp32);
  TileEncoder encoder(kernels, to, args.residual);
  const int64_t residual_begin = (args.chunk * args.num_parts + unit.part) * to.part.lossy_numel;
  alignas(64) float acc[kMaxTileNumel];
  for (int64_t first = unit.first; first < unit.first + unit.numel;) {
    const Unit tile{unit.part, unit.exact, first, std::min(encoder.tile_numel(), unit.first + unit.numel - first)};
    const Section<std::byte> out(to, tile, part);
    const int64_t section_numel = tile.exact ? to.part.exact_numel : to.part.lossy_numel;
    sum_unit(kernels, args.from, args.parts, {0, tile.exact, unit.part * section_numel + first, tile.numel}, acc);
    if (tile.exact) {
      kernels.convert[fp32][fp32](acc, out.codes, tile.numel, args.scale, false);
    } else if (args.residual.data) {
      kernels.scale(acc, tile.numel, args.scale);
      encoder.encode(acc, tile.numel, residual_begin + first, out);
    } else if (has_scales(to.wire)) {
      kernels.blocks[scaled_index(to.wire)].quantize[fp32](acc, out.scales, out.codes, tile.numel / to.block_numel,
                                                           to.block_numel, args.scale, false);
    } else {
      kernels.convert[fp32][index_of(format_of(to.wire))](acc, out.codes, tile.numel, args.scale, false);
    }
    first += tile.numel;
  }
}

void unpack_unit(const KernelTable& kernels, const UnpackArgs& args, const Unit& unit, bool streamed) {
  const BucketLayout& layout = args.layout;
  const SliceList& list = unit.exact ? args.slices.exact : args.slices.lossy;
  const Range range =
      unit.exact ? layout.exact_range(args.chunk, unit.part) : layout.lossy_range(args.chunk, unit.part);
  const Section<const std::byte> in(layout, unit, args.parts + part_place(layout, unit.part));
  const Format grad = format_of(list.dtype());
  Cursor cursor(list, covered(range, unit));
  if (args.num_messages > 1) {
    unpack_sum(kernels, args, unit, cursor, grad, streamed);
    return;
  }
  if (!unit.exact && has_scales(layout.wire)) {
    unpack_blocks(kernels, {kernels, layout, in}, cursor, args.scale, grad, streamed);
    return;
  }
  const Format wire = unit.exact ? Format::kFp32 : format_of(layout.wire);
  const ConvertFn convert = kernels.convert[index_of(wire)][index_of(grad)];
  const std::byte* codes = in.codes;
  while (cursor.remaining() > 0) {
    const int64_t numel = cursor.run_numel();
    if (cursor.data() != nullptr) convert(codes, cursor.data(), numel, args.scale, streamed);
    codes += numel * format_nbytes(wire);
    cursor.advance(numel);
  }
}

}  // namespace fusedcomm
