"""Wire bytes → gradients: x = decoded·scale, rounded to the gradient's dtype. Each byte is read once.

With ROTATED, decoded values are rotated back before they are multiplied by the scale. With SUMS there are several
messages of one part each, one after the other. Then x = (fp32 sum of the decoded messages, in their order)·scale.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .arguments import shape_of, slices_of
from .constants import OPTIONS, WIRE_IDS
from .elements import (
    FP32,
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
    """fp32 [TILE]: the decoded elements of a part from `begin` on. `numel` of them exist; with FULL, all of them.

    decoder: constants (WIRE, BLOCK, ROTATED, …).
    """
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
    """[TILE]: what load_message gives, times `scale`, in the gradient's dtype; with SUMS, the sum over all messages.

    messages: (the part's scales in the first message, its codes there, bytes from one message to the next, number of
    messages). decoder: constants (WIRE, BLOCK, ROTATED, SUMS).
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
    """Unpacks a tile of a part. messages, decoder: as for load_gradients."""
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
        # In pieces, because the registers do not hold an address for every element of a tile.
        PIECE: tl.constexpr = max(TILE // 4, RUN)
        piece_lane = tl.arange(0, PIECE)
        for piece in range(0, real, PIECE):
            left = real - piece
            mask = piece_lane < left
            # Elements past the list's end are loaded, too: a rotation has mixed them with those before.
            some = load_gradients(messages, inside + piece, on_wire - piece, scale, dtype, 1, PIECE, False, decoder)
            places = offsets_of(slices, begin + piece, low, high, piece_lane, mask, FLAT)
            tl.store(grads + places, some, mask=mask)


@triton.jit
def unpack_slices(
    grads, slices, sections, parts, num_messages, begin_unit, scale, decoder, TILE: tl.constexpr, FLAT: tl.constexpr
):
    """Unpacks this program's tiles of a slice list.

    sections: (scales, codes) of part 0. parts: (bytes from one part to the next, elements of a part, number of the
    first part, number of parts).
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
    lossy,  # Slices
    exact,  # Slices
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
    # The decoder tuples are not assigned to variables: Triton 3.6 would turn their constants into variables.
    if HAS_EXACT:
        num_exact_units = num_parts * tiles_of(shape.exact_numel, TILE)
        unpack_slices(
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
    unpack_slices(
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
    """Decodes chunk number `chunk` from `parts` and writes its elements to the slices of `bucket`.

    Args:
        parts: uint8 [num_messages · layout.chunk_nbytes], 16-byte aligned.
        num_programs: size of the launch's grid.
        num_messages: the messages in `parts`, which are summed. More than one only if the layout has one part.

    Raises:
        ValueError: `parts` has another shape, dtype or alignment, or the layout of several messages has several parts.
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
