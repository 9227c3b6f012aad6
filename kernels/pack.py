"""Gradients → wire bytes: y = x·scale, rounded to the wire's dtype. Each gradient is read once, each byte written once.

With FEEDBACK, the residual is added to y first. With ROTATED, y is rotated, in registers, before it is rounded. The
count of elements that are not finite is of y before either.

The main loop only notes whether it has met an element that is not finite. A program that has met one goes over its
tiles again and counts by slice. That is rare, so it may be slow.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .arguments import counted_slices_of, shape_of
from .constants import FEEDBACK_IDS, NUM_THREADS, OPTIONS, WIRE_IDS
from .elements import FP32, INF_BITS, magnitude_bits, max_in_thread, to_fp32, vector_numel
from .encode import encode_tile
from .encoding import NEAREST, Encoding, encoding_args
from .residual import load_residual
from .sections import sections
from .tiles import count_by_slice, extent, first_unit, offsets_of, place_of, section_of, slice_of, tiles_of

if TYPE_CHECKING:
    from .bucket import Bucket


@triton.jit
def load_scattered(grads, slices, begin, real, low, high, lane, scale, FLAT: tl.constexpr):
    """fp32, shaped like `lane`: the scaled gradients of the elements begin + lane, +0 past the first `real`.

    The zeros are not scaled: the product could be NaN or -0.
    """
    mask = lane < real
    x = tl.load(grads + offsets_of(slices, begin, low, high, lane, mask, FLAT), mask=mask)
    return tl.where(mask, to_fp32(x) * scale, 0.0)


@triton.jit
def pack_tile(
    seen, grads, slices, sections, part_numel, part, tile, scale, encoder, TILE: tl.constexpr, FLAT: tl.constexpr
):
    """Packs a tile into the part with these sections (scales, codes).

    Returns `seen`, each thread's greatest magnitude so far, updated. encoder: as for encode_tile.
    """
    residual = encoder[0]
    FEEDBACK: tl.constexpr = encoder[6]
    VEC: tl.constexpr = vector_numel(grads.dtype.element_ty, sections[1].dtype.element_ty, residual.dtype.element_ty)
    begin, on_wire, real = extent(slices.numel, part_numel, part, tile, TILE)
    offset, run, low, high = place_of(slices, part_numel, part, tile, TILE, FLAT)
    lane = tl.max_contiguous(tl.arange(0, TILE), VEC)
    if (run >= TILE) & (on_wire == TILE) & (offset % VEC == 0):
        kept = load_residual(residual, begin, TILE, VEC, TILE, FEEDBACK)
        y = to_fp32(tl.load(grads + offset // VEC * VEC + lane)) * scale
    else:
        y = load_scattered(grads, slices, begin, real, low, high, lane, scale, FLAT)
        # The residual is loaded last, because the gradients' addresses take most registers.
        kept = load_residual(residual, begin, on_wire, VEC, TILE, FEEDBACK)
    seen = tl.maximum(seen, max_in_thread(magnitude_bits(y), seen.shape[0], VEC))
    encode_tile(y, sections, tile, on_wire, part_numel, begin, kept, begin, VEC, encoder)
    return seen


@triton.jit
def pack_slices(
    seen, grads, slices, sections, parts, begin_unit, scale, encoder, TILE: tl.constexpr, FLAT: tl.constexpr
):
    """Packs this program's tiles of a slice list.

    sections: (scales, codes) of part 0. parts: (bytes from one part to the next, elements of a part, number of the
    first part, number of parts).
    """
    stride, part_numel, first_part, num_parts = parts
    num_tiles = tiles_of(part_numel, TILE)
    for unit in range(begin_unit, num_parts * num_tiles, tl.num_programs(0)):
        part = (unit // num_tiles).to(tl.int64)
        seen = pack_tile(
            seen,
            grads,
            slices,
            (section_of(sections[0], stride, part), section_of(sections[1], stride, part)),
            part_numel,
            first_part + part,
            unit % num_tiles,
            scale,
            encoder,
            TILE,
            FLAT,
        )
    return seen


@triton.jit
def count_slices(grads, slices, parts, begin_unit, scale, TILE: tl.constexpr, FLAT: tl.constexpr):
    """Goes over the tiles of pack_slices again and adds the number of non-finite elements to slices.counts."""
    _stride, part_numel, first_part, num_parts = parts
    PIECE: tl.constexpr = TILE // 4  # this size leaves pack_slices's loop the most registers
    lane = tl.arange(0, PIECE)
    num_tiles = tiles_of(part_numel, TILE)
    for unit in range(begin_unit, num_parts * num_tiles, tl.num_programs(0)):
        part = first_part + (unit // num_tiles).to(tl.int64)
        tile = unit % num_tiles
        begin, _, real = extent(slices.numel, part_numel, part, tile, TILE)
        _, _, low, high = place_of(slices, part_numel, part, tile, TILE, FLAT)
        if FLAT:
            low = slice_of(slices, 0, slices.num_slices - 1, begin)
            high = slice_of(slices, low, slices.num_slices - 1, begin + TILE - 1)
        for piece in range(0, real, PIECE):
            at = begin + piece
            y = load_scattered(grads, slices, at, real - piece, low, high, lane, scale, FLAT)
            count_by_slice(slices, low, high, at, magnitude_bits(y) >= INF_BITS)


@triton.jit(do_not_specialize=["lossy", "exact", "shape", "first_part", "num_parts", "scale", "key"])
def pack_kernel(
    grads,
    lossy,  # CountedSlices
    exact,  # CountedSlices
    out,  # Sections
    shape,  # PartShape
    first_part: tl.int64,
    num_parts: tl.int32,
    scale: tl.float32,
    residual,
    key,  # Noise
    WIRE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    FLAT: tl.constexpr,
    HAS_EXACT: tl.constexpr,
    ROTATED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FEEDBACK: tl.constexpr,
):
    parts = (shape.stride, shape.numel, first_part, num_parts)
    exact_parts = (shape.stride, shape.exact_numel, first_part, num_parts)
    exact_unit = first_unit(0)
    seen = tl.zeros([min(NUM_THREADS, TILE // 16)], tl.int32)
    # The encoder tuples are not assigned to variables: Triton 3.6 would turn their constants into variables.
    if HAS_EXACT:
        unit = first_unit(num_parts * tiles_of(shape.exact_numel, TILE))
        seen = pack_slices(
            seen,
            grads,
            exact,
            (out.scales, out.exact),
            exact_parts,
            exact_unit,
            scale,
            (residual, key, FP32, BLOCK, False, False, 0),
            TILE,
            False,
        )
    else:
        unit = exact_unit
    seen = pack_slices(
        seen,
        grads,
        lossy,
        (out.scales, out.codes),
        parts,
        unit,
        scale,
        (residual, key, WIRE, BLOCK, ROTATED, STOCHASTIC, FEEDBACK),
        TILE,
        FLAT,
    )
    if tl.max(seen, axis=0) >= INF_BITS:
        if HAS_EXACT:
            count_slices(grads, exact, exact_parts, exact_unit, scale, TILE, False)
        count_slices(grads, lossy, parts, unit, scale, TILE, FLAT)


def pack(
    bucket: "Bucket", chunk: int, scale: float, out: torch.Tensor, num_programs: int, encoding: Encoding = NEAREST
) -> None:
    """Packs chunk number `chunk` of `bucket` into the message `out`, uint8 [layout.chunk_nbytes], 16-byte aligned.

    Writes every byte of the layout's piece of each part. Adds the number of each slice's elements that are not finite,
    after scaling, to the lists' `counts`. A residual has layout.padded_numel elements. `num_programs`: size of the
    launch's grid. Raises ValueError if `out` or the residual has another shape, dtype or alignment.
    """
    layout = bucket.layout
    pack_kernel[(num_programs,)](
        *(bucket.grads, counted_slices_of(bucket.lossy), counted_slices_of(bucket.exact)),
        *(
            sections(layout, out, layout.chunk_nbytes),
            shape_of(layout),
            chunk * layout.num_parts,
            layout.num_parts,
            scale,
        ),
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
