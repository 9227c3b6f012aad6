"""Wire bytes → gradients: x = decoded·scale, rounded to the gradient's dtype; one read of the wire, one write.

With ROTATED, what is decoded is rotated back before it is multiplied by the scale. With SUMS there are several messages
of one part each, one behind the other: x = (the fp32 sum, in their order, of what each has)·scale.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .arguments import shape_of, slices_of
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
def load_message(scales_in, codes_in, begin, numel, VEC: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr, decoder):
    """fp32 [TILE], from a part's element `begin` on, of which `numel` exist (FULL: all of them)."""
    WIRE: tl.constexpr = decoder[0]
    BLOCK: tl.constexpr = decoder[1]
    ROTATED: tl.constexpr = decoder[2]
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
    messages,
    begin,
    numel,
    scale,
    dtype: tl.constexpr,
    VEC: tl.constexpr,
    TILE: tl.constexpr,
    FULL: tl.constexpr,
    decoder,
):
    """The same in the gradient's dtype; with SUMS, the sum of all messages.

    messages: (scales and codes of the part in the first, bytes from one to the next, how many). decoder: constants
    (WIRE, BLOCK, ROTATED, SUMS).
    """
    scales_in, codes_in, stride, num_messages = messages
    SUMS: tl.constexpr = decoder[3]
    values = load_message(scales_in, codes_in, begin, numel, VEC, TILE, FULL, decoder)
    if SUMS:
        for message in range(1, num_messages):
            scales, codes = section_of(scales_in, stride, message), section_of(codes_in, stride, message)
            values += load_message(scales, codes, begin, numel, VEC, TILE, FULL, decoder)
    return to_gradient(values * scale, dtype)


@triton.jit
def unpack_tile(
    grads, slices, messages, part_numel, part, tile, scale, decoder, TILE: tl.constexpr, FLAT: tl.constexpr
):
    """Unpacks a tile of the part whose messages are given; these and `decoder` as for load_gradients."""
    VEC: tl.constexpr = vector_numel(grads.dtype.element_ty, messages[1].dtype.element_ty)
    dtype: tl.constexpr = grads.dtype.element_ty
    begin, on_wire, real = extent(slices.numel, part_numel, part, tile, TILE)
    offset, run, low, high = place_of(slices, part_numel, part, tile, TILE, FLAT)
    inside = tl.cast(tile, tl.int64) * TILE
    if (run >= TILE) & (real == TILE) & (offset % VEC == 0):
        lane = tl.max_contiguous(tl.arange(0, TILE), VEC)
        g = load_gradients(messages, inside, TILE, scale, dtype, VEC, TILE, True, decoder)
        tl.store(grads + offset // VEC * VEC + lane, g)
    else:
        # In pieces: an address for every element of a tile is more than the registers hold.
        PIECE: tl.constexpr = max(TILE // 4, RUN)
        piece_lane = tl.arange(0, PIECE)
        for piece in range(0, real, PIECE):
            left = real - piece
            mask = piece_lane < left
            # Also what lies past the stream's end, for a rotation has mixed it with what lies before.
            some = load_gradients(messages, inside + piece, on_wire - piece, scale, dtype, 1, PIECE, False, decoder)
            places = offsets_of(slices, begin + piece, low, high, piece_lane, mask, FLAT)
            tl.store(grads + places, some, mask=mask)


@triton.jit
def unpack_stream(
    grads, slices, sections, parts, num_messages, begin_unit, scale, decoder, TILE: tl.constexpr, FLAT: tl.constexpr
):
    """Unpacks this program's tiles of a stream.

    sections: (scales, codes) of part 0; parts: (stride, elements in each, number of the first, how many).
    """
    stride, part_numel, first_part, num_parts = parts
    num_tiles = tiles_of(part_numel, TILE)
    for unit in range(begin_unit, num_parts * num_tiles, tl.num_programs(0)):
        part = (unit // num_tiles).to(tl.int64)
        scales, codes = section_of(sections[0], stride, part), section_of(sections[1], stride, part)
        messages = (scales, codes, stride, num_messages)
        unpack_tile(
            grads, slices, messages, part_numel, first_part + part, unit % num_tiles, scale, decoder, TILE, FLAT
        )


@triton.jit(
    do_not_specialize=["lossy", "exact", "shape", "first_part", "num_parts", "num_messages", "scale"],
)
def unpack_kernel(
    grads,
    lossy,  # Slices, as the next
    exact,
    message,  # Sections
    shape,  # PartShape
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
    # The decoders' tuples are no variables: Triton 3.6 would make variables of the constants in them.
    if HAS_EXACT:
        num_exact_units = num_parts * tiles_of(shape.exact_numel, TILE)
        unpack_stream(
            grads,
            exact,
            (message.scales, message.exact),
            (shape.stride, shape.exact_numel, first_part, num_parts),
            num_messages,
            first_unit(0),
            scale,
            (FP32, BLOCK, False, SUMS),
            TILE,
            False,
        )
    unpack_stream(
        grads,
        lossy,
        (message.scales, message.codes),
        (shape.stride, shape.numel, first_part, num_parts),
        num_messages,
        first_unit(num_exact_units),
        scale,
        (WIRE, BLOCK, ROTATED, SUMS),
        TILE,
        FLAT,
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
    message = sections(layout, parts, layout.chunk_nbytes * num_messages)
    unpack_kernel[(num_programs,)](
        *(bucket.grads, slices_of(bucket.lossy), slices_of(bucket.exact), message, shape_of(layout)),
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
