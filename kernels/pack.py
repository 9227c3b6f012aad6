"""Gradients → wire bytes: y = x·scale, rounded to the wire's dtype; one read of the gradient, one write of the wire.

With FEEDBACK, what was left out before is added to y first; with ROTATED, y is rotated before it is rounded, in
registers. What is counted as not finite is y before either.

The loop only remembers whether it has met an element that is not finite. A program that has goes over its tiles once
more and finds out whose they are: rare, and so it may be slow.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .constants import FEEDBACK_IDS, FP32, NUM_THREADS, OPTIONS, WIRE_IDS
from .elements import INF_BITS, magnitude_bits, max_in_thread, to_fp32, vector_numel
from .encode import encode_tile
from .encoding import NEAREST, Encoding, encoding_args
from .residual import load_residual
from .sections import sections
from .tiles import count_by_slice, extent, first_unit, offsets_of, place_of, section_of, slice_of, tiles_of

if TYPE_CHECKING:
    from .bucket import Bucket


@triton.jit
def load_scattered(grads, starts, offsets, begin, real, low, high, lane, scale, FLAT: tl.constexpr):
    """fp32, like `lane`, scaled: zeros past the first `real` elements (scaled zeros could be NaN or -0)."""
    mask = lane < real
    x = tl.load(grads + offsets_of(starts, offsets, begin, low, high, lane, mask, FLAT), mask=mask)
    return tl.where(mask, to_fp32(x) * scale, 0.0)


@triton.jit
def pack_tile(
    seen,
    grads,
    starts,
    offsets,
    first,
    num_slices,
    numel,
    scales_out,
    codes_out,
    part_numel,
    part,
    tile,
    scale,
    residual,
    key,
    WIRE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    FLAT: tl.constexpr,
    ROTATED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FEEDBACK: tl.constexpr,
):
    """Packs a tile into the part whose sections are given; returns `seen`, grown by the magnitudes met."""
    VEC: tl.constexpr = vector_numel(grads.dtype.element_ty, codes_out.dtype.element_ty, residual.dtype.element_ty)
    begin, on_wire, real = extent(numel, part_numel, part, tile, TILE)
    offset, run, low, high = place_of(starts, offsets, first, num_slices, numel, part_numel, part, tile, TILE, FLAT)
    lane = tl.max_contiguous(tl.arange(0, TILE), VEC)
    if (run >= TILE) & (on_wire == TILE) & (offset % VEC == 0):
        kept = load_residual(residual, begin, TILE, VEC, TILE, FEEDBACK)
        y = to_fp32(tl.load(grads + offset // VEC * VEC + lane)) * scale
    else:
        y = load_scattered(grads, starts, offsets, begin, real, low, high, lane, scale, FLAT)
        # Only now, since the addresses of the gradients take most registers.
        kept = load_residual(residual, begin, on_wire, VEC, TILE, FEEDBACK)
    seen = tl.maximum(seen, max_in_thread(magnitude_bits(y), seen.shape[0], VEC))
    encode_tile(
        y,
        scales_out,
        codes_out,
        tile,
        on_wire,
        part_numel,
        key,
        begin,
        residual,
        kept,
        begin,
        VEC,
        WIRE,
        BLOCK,
        ROTATED,
        STOCHASTIC,
        FEEDBACK,
    )
    return seen


@triton.jit
def pack_stream(
    seen,
    grads,
    starts,
    offsets,
    first,
    num_slices,
    numel,
    scales_out,
    codes_out,
    part_stride,
    part_numel,
    first_part,
    num_parts,
    begin_unit,
    scale,
    residual,
    key,
    WIRE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    FLAT: tl.constexpr,
    ROTATED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FEEDBACK: tl.constexpr,
):
    num_tiles = tiles_of(part_numel, TILE)
    for unit in range(begin_unit, num_parts * num_tiles, tl.num_programs(0)):
        part = (unit // num_tiles).to(tl.int64)
        seen = pack_tile(
            seen,
            grads,
            starts,
            offsets,
            first,
            num_slices,
            numel,
            section_of(scales_out, part_stride, part),
            section_of(codes_out, part_stride, part),
            part_numel,
            first_part + part,
            unit % num_tiles,
            scale,
            residual,
            key,
            WIRE,
            BLOCK,
            TILE,
            FLAT,
            ROTATED,
            STOCHASTIC,
            FEEDBACK,
        )
    return seen


@triton.jit
def count_stream(
    grads,
    starts,
    offsets,
    first,
    counts,
    num_slices,
    numel,
    part_numel,
    first_part,
    num_parts,
    begin_unit,
    scale,
    TILE: tl.constexpr,
    FLAT: tl.constexpr,
):
    """Goes over the tiles of pack_stream once more, and counts."""
    PIECE: tl.constexpr = TILE // 4  # which leaves the loop above the most registers
    lane = tl.arange(0, PIECE)
    num_tiles = tiles_of(part_numel, TILE)
    for unit in range(begin_unit, num_parts * num_tiles, tl.num_programs(0)):
        part = first_part + (unit // num_tiles).to(tl.int64)
        tile = unit % num_tiles
        begin, _, real = extent(numel, part_numel, part, tile, TILE)
        _, _, low, high = place_of(starts, offsets, first, num_slices, numel, part_numel, part, tile, TILE, FLAT)
        if FLAT:
            low = slice_of(starts, 0, num_slices - 1, begin)
            high = slice_of(starts, low, num_slices - 1, begin + TILE - 1)
        for piece in range(0, real, PIECE):
            at = begin + piece
            y = load_scattered(grads, starts, offsets, at, real - piece, low, high, lane, scale, FLAT)
            count_by_slice(counts, starts, low, high, at, magnitude_bits(y) >= INF_BITS)


@triton.jit(
    do_not_specialize=[
        *("num_slices", "numel", "exact_num_slices", "exact_numel"),
        *("part_numel", "part_exact_numel", "first_part", "num_parts", "scale"),
        *("noise_seed", "noise_parameter", "noise_step", "noise_source"),
    ]
)
def pack_kernel(
    grads,
    starts,
    offsets,
    first,
    counts,
    num_slices: tl.int32,
    numel: tl.int64,
    exact_starts,
    exact_offsets,
    exact_first,
    exact_counts,
    exact_num_slices: tl.int32,
    exact_numel: tl.int64,
    exact_out,
    scales_out,
    codes_out,
    part_stride: tl.int64,
    part_numel: tl.int64,
    part_exact_numel: tl.int64,
    first_part: tl.int64,
    num_parts: tl.int32,
    scale: tl.float32,
    residual,
    noise_seed: tl.int64,
    noise_parameter: tl.int32,
    noise_step: tl.int32,
    noise_source: tl.int32,
    WIRE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    FLAT: tl.constexpr,
    HAS_EXACT: tl.constexpr,
    ROTATED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FEEDBACK: tl.constexpr,
):
    key = (noise_seed, noise_parameter, noise_step, noise_source)
    exact_unit = first_unit(0)
    seen = tl.zeros([min(NUM_THREADS, TILE // 16)], tl.int32)
    if HAS_EXACT:
        lossy_unit = first_unit(num_parts * tiles_of(part_exact_numel, TILE))
        seen = pack_stream(
            seen,
            grads,
            exact_starts,
            exact_offsets,
            exact_first,
            exact_num_slices,
            exact_numel,
            scales_out,
            exact_out,
            part_stride,
            part_exact_numel,
            first_part,
            num_parts,
            exact_unit,
            scale,
            residual,
            key,
            FP32,
            BLOCK,
            TILE,
            False,
            False,
            False,
            0,
        )
    else:
        lossy_unit = exact_unit
    seen = pack_stream(
        seen,
        grads,
        starts,
        offsets,
        first,
        num_slices,
        numel,
        scales_out,
        codes_out,
        part_stride,
        part_numel,
        first_part,
        num_parts,
        lossy_unit,
        scale,
        residual,
        key,
        WIRE,
        BLOCK,
        TILE,
        FLAT,
        ROTATED,
        STOCHASTIC,
        FEEDBACK,
    )
    if tl.max(seen, axis=0) >= INF_BITS:
        if HAS_EXACT:
            count_stream(
                grads,
                exact_starts,
                exact_offsets,
                exact_first,
                exact_counts,
                exact_num_slices,
                exact_numel,
                part_exact_numel,
                first_part,
                num_parts,
                exact_unit,
                scale,
                TILE,
                False,
            )
        count_stream(
            grads,
            starts,
            offsets,
            first,
            counts,
            num_slices,
            numel,
            part_numel,
            first_part,
            num_parts,
            lossy_unit,
            scale,
            TILE,
            FLAT,
        )


def pack(
    bucket: "Bucket", chunk: int, scale: float, out: torch.Tensor, num_programs: int, encoding: Encoding = NEAREST
) -> None:
    """Packs one chunk of `bucket` into `out`, uint8 [layout.chunk_nbytes], 16-byte aligned: a message, of which every
    byte of the layout's pieces is written.

    Adds how many elements of each slice are not finite, after scaling, to the streams' `counts`. A residual has
    layout.padded_numel elements. ValueError if `out` or the residual has another shape, dtype or alignment.
    """
    layout = bucket.layout
    exact_out, scales_out, codes_out = sections(layout, out, layout.chunk_nbytes)
    lossy, exact = bucket.lossy, bucket.exact
    pack_kernel[(num_programs,)](
        *(bucket.grads, lossy.starts, lossy.offsets, lossy.first, lossy.counts, lossy.num_slices, lossy.numel),
        *(exact.starts, exact.offsets, exact.first, exact.counts, exact.num_slices, exact.numel),
        *(exact_out, scales_out, codes_out, layout.part_stride, layout.part.lossy_numel, layout.part.exact_numel),
        *(chunk * layout.num_parts, layout.num_parts, scale),
        *encoding_args(encoding, 0, layout.padded_numel, out),
        WIRE=WIRE_IDS[layout.wire],
        BLOCK=layout.block_numel,
        TILE=bucket.tile,
        FLAT=bucket.flat,
        HAS_EXACT=not bucket.flat,
        ROTATED=layout.rotated,
        STOCHASTIC=encoding.is_stochastic(layout.wire),
        FEEDBACK=FEEDBACK_IDS[encoding.feedback],
        **OPTIONS,
    )
