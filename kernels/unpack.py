"""Wire bytes → gradients: x = decoded·scale, rounded to the gradient's dtype; one read of the wire, one write.

With ROTATED, what is decoded is rotated back before it is multiplied by the scale. With SUMS there are several messages
of one part each, one behind the other: x = (the fp32 sum, in their order, of what each has)·scale.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .constants import FP32, OPTIONS, WIRE_IDS
from .elements import (
    code_lane,
    decode,
    has_scales,
    load_scales,
    per_code,
    times_scales,
    to_gradient,
    vector_numel,
)
from .rotation import RUN, unrotate
from .sections import sections
from .tiles import extent, first_unit, offsets_of, place_of, section_of, tiles_of

if TYPE_CHECKING:
    from .bucket import Bucket


@triton.jit
def load_message(
    scales_in,
    codes_in,
    begin,
    numel,
    VEC: tl.constexpr,
    WIRE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    FULL: tl.constexpr,
    ROTATED: tl.constexpr,
):
    """fp32 [TILE], from a part's element `begin` on, of which `numel` exist (FULL: all of them)."""
    PER_CODE: tl.constexpr = per_code(WIRE)
    lane = code_lane(TILE, VEC, WIRE)
    places = codes_in + begin // PER_CODE + lane
    if FULL:
        values = decode(tl.load(places), WIRE)
    else:
        values = decode(tl.load(places, mask=lane * PER_CODE < numel, other=0), WIRE)
    if has_scales(WIRE):
        values = times_scales(values, load_scales(scales_in, begin, numel, 0, VEC, BLOCK, TILE), VEC)
    if ROTATED:
        values = unrotate(values)
    return values


@triton.jit
def load_gradients(
    scales_in,
    codes_in,
    stride,
    num_messages,
    begin,
    numel,
    scale,
    dtype: tl.constexpr,
    VEC: tl.constexpr,
    WIRE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    FULL: tl.constexpr,
    ROTATED: tl.constexpr,
    SUMS: tl.constexpr,
):
    """The same in the gradient's dtype; SUMS: of so many messages, `stride` bytes apart."""
    values = load_message(scales_in, codes_in, begin, numel, VEC, WIRE, BLOCK, TILE, FULL, ROTATED)
    if SUMS:
        for message in range(1, num_messages):
            scales, codes = section_of(scales_in, stride, message), section_of(codes_in, stride, message)
            values += load_message(scales, codes, begin, numel, VEC, WIRE, BLOCK, TILE, FULL, ROTATED)
    return to_gradient(values * scale, dtype)


@triton.jit
def unpack_tile(
    grads,
    starts,
    offsets,
    first,
    num_slices,
    numel,
    scales_in,
    codes_in,
    stride,
    num_messages,
    part_numel,
    part,
    tile,
    scale,
    WIRE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    FLAT: tl.constexpr,
    ROTATED: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Unpacks a tile of the part whose sections are given."""
    VEC: tl.constexpr = vector_numel(grads.dtype.element_ty, codes_in.dtype.element_ty)
    dtype: tl.constexpr = grads.dtype.element_ty
    begin, on_wire, real = extent(numel, part_numel, part, tile, TILE)
    offset, run, low, high = place_of(starts, offsets, first, num_slices, numel, part_numel, part, tile, TILE, FLAT)
    inside = tl.cast(tile, tl.int64) * TILE
    if (run >= TILE) & (real == TILE) & (offset % VEC == 0):
        lane = tl.max_contiguous(tl.arange(0, TILE), VEC)
        g = load_gradients(
            scales_in,
            codes_in,
            stride,
            num_messages,
            inside,
            TILE,
            scale,
            dtype,
            VEC,
            WIRE,
            BLOCK,
            TILE,
            True,
            ROTATED,
            SUMS,
        )
        tl.store(grads + offset // VEC * VEC + lane, g)
    else:
        # In pieces: an address for every element of a tile is more than the registers hold.
        PIECE: tl.constexpr = max(TILE // 4, RUN)
        piece_lane = tl.arange(0, PIECE)
        for piece in range(0, real, PIECE):
            left = real - piece
            mask = piece_lane < left
            # Also what lies past the stream's end, for a rotation has mixed it with what lies before.
            some = load_gradients(
                scales_in,
                codes_in,
                stride,
                num_messages,
                inside + piece,
                on_wire - piece,
                scale,
                dtype,
                1,
                WIRE,
                BLOCK,
                PIECE,
                False,
                ROTATED,
                SUMS,
            )
            places = offsets_of(starts, offsets, begin + piece, low, high, piece_lane, mask, FLAT)
            tl.store(grads + places, some, mask=mask)


@triton.jit
def unpack_stream(
    grads,
    starts,
    offsets,
    first,
    num_slices,
    numel,
    scales_in,
    codes_in,
    part_stride,
    part_numel,
    first_part,
    num_parts,
    num_messages,
    begin_unit,
    scale,
    WIRE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    FLAT: tl.constexpr,
    ROTATED: tl.constexpr,
    SUMS: tl.constexpr,
):
    num_tiles = tiles_of(part_numel, TILE)
    for unit in range(begin_unit, num_parts * num_tiles, tl.num_programs(0)):
        part = (unit // num_tiles).to(tl.int64)
        unpack_tile(
            grads,
            starts,
            offsets,
            first,
            num_slices,
            numel,
            section_of(scales_in, part_stride, part),
            section_of(codes_in, part_stride, part),
            part_stride,
            num_messages,
            part_numel,
            first_part + part,
            unit % num_tiles,
            scale,
            WIRE,
            BLOCK,
            TILE,
            FLAT,
            ROTATED,
            SUMS,
        )


@triton.jit(
    do_not_specialize=[
        *("num_slices", "numel", "exact_num_slices", "exact_numel"),
        *("part_numel", "part_exact_numel", "first_part", "num_parts", "num_messages", "scale"),
    ]
)
def unpack_kernel(
    grads,
    starts,
    offsets,
    first,
    num_slices: tl.int32,
    numel: tl.int64,
    exact_starts,
    exact_offsets,
    exact_first,
    exact_num_slices: tl.int32,
    exact_numel: tl.int64,
    exact_in,
    scales_in,
    codes_in,
    part_stride: tl.int64,
    part_numel: tl.int64,
    part_exact_numel: tl.int64,
    first_part: tl.int64,
    num_parts: tl.int32,
    num_messages: tl.int32,
    scale: tl.float32,
    WIRE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    FLAT: tl.constexpr,
    HAS_EXACT: tl.constexpr,
    ROTATED: tl.constexpr,
    SUMS: tl.constexpr,
):
    num_exact_units = 0
    if HAS_EXACT:
        num_exact_units = num_parts * tiles_of(part_exact_numel, TILE)
        unpack_stream(
            grads,
            exact_starts,
            exact_offsets,
            exact_first,
            exact_num_slices,
            exact_numel,
            scales_in,
            exact_in,
            part_stride,
            part_exact_numel,
            first_part,
            num_parts,
            num_messages,
            first_unit(0),
            scale,
            FP32,
            BLOCK,
            TILE,
            False,
            False,
            SUMS,
        )
    unpack_stream(
        grads,
        starts,
        offsets,
        first,
        num_slices,
        numel,
        scales_in,
        codes_in,
        part_stride,
        part_numel,
        first_part,
        num_parts,
        num_messages,
        first_unit(num_exact_units),
        scale,
        WIRE,
        BLOCK,
        TILE,
        FLAT,
        ROTATED,
        SUMS,
    )


def unpack(
    bucket: "Bucket",
    chunk: int,
    parts: torch.Tensor,
    scale: float,
    num_programs: int,
    num_messages: int = 1,
) -> None:
    """Writes the elements of one chunk to the slices of `bucket`, from `parts`, uint8 [layout.chunk_nbytes].

    `num_messages`: more than one, if the layout has one part: `parts` has so many messages, which are summed.
    ValueError if `parts` has another shape, dtype or alignment than 16 bytes.
    """
    layout = bucket.layout
    if num_messages > 1 and layout.num_parts != 1:
        raise ValueError(f"{num_messages} messages of {layout.num_parts} parts cannot be summed: use one part")
    exact_in, scales_in, codes_in = sections(layout, parts, layout.chunk_nbytes * num_messages)
    lossy, exact = bucket.lossy, bucket.exact
    unpack_kernel[(num_programs,)](
        *(bucket.grads, lossy.starts, lossy.offsets, lossy.first, lossy.num_slices, lossy.numel),
        *(exact.starts, exact.offsets, exact.first, exact.num_slices, exact.numel),
        *(exact_in, scales_in, codes_in, layout.part_stride, layout.part.lossy_numel, layout.part.exact_numel),
        *(chunk * layout.num_parts, layout.num_parts, num_messages, scale),
        WIRE=WIRE_IDS[layout.wire],
        BLOCK=layout.block_numel,
        TILE=bucket.tile,
        FLAT=bucket.flat,
        HAS_EXACT=not bucket.flat,
        ROTATED=layout.rotated,
        SUMS=num_messages > 1,
        **OPTIONS,
    )
