"""One part from every rank → the encoded mean of that part: fp32 sum in rank order, · scale, one rounding.

The output may have another wire and more parts than the input. A sum on two levels uses this between its levels: 16
bits within a host become few bits between hosts.

A rank's few bytes cost latency, not arithmetic, so several ranks are loaded before the first is added.
"""

import triton
import triton.language as tl

from .elements import (
    FP32,
    code_places,
    decode,
    has_scales,
    per_code,
    scale_places,
    times_scales,
    to_scales,
    vector_numel,
)
from .encode import encode_tile
from .residual import load_residual
from .tiles import exact_ratio, first_unit, part_of, section_of, tiles_of


@triton.jit
def load_rank(rank, message, WIRE: tl.constexpr):
    """(codes, scales [TILE // VEC]) of a rank's tile; without scales (codes, 0.0). Undefined if there is no such rank.

    message: (pointers and mask of the first rank's codes, those of its scales, bytes from one rank to the next, number
    of ranks).
    """
    codes_at, in_codes, scales_at, in_scales, stride, world_size = message
    here = rank < world_size
    # Compared with 0, because the interpreter takes no other combinations with a scalar as masks.
    codes = tl.load(section_of(codes_at, stride, rank), mask=(in_codes & here) != 0)
    if has_scales(WIRE):
        return codes, tl.load(section_of(scales_at, stride, rank), mask=(in_scales & here) != 0)
    else:
        return codes, 0.0


@triton.jit
def values_of(codes, scales, VEC: tl.constexpr, WIRE: tl.constexpr):
    if has_scales(WIRE):
        return times_scales(decode(codes, WIRE), to_scales(scales), VEC)
    else:
        return decode(codes, WIRE)


@triton.jit
def add_ranks(total, first, message, VEC: tl.constexpr, WIRE: tl.constexpr, NUMEL: tl.constexpr):
    """`total`, and the values of ranks `first` … first + NUMEL - 1, as far as there are such; if `first` is 0, these
    alone. NUMEL: 2 or 4. message: as for load_rank."""
    world_size = message[5]
    c0, s0 = load_rank(first, message, WIRE)
    c1, s1 = load_rank(first + 1, message, WIRE)
    if NUMEL == 4:
        c2, s2 = load_rank(first + 2, message, WIRE)
        c3, s3 = load_rank(first + 3, message, WIRE)
    if total is None:
        total = values_of(c0, s0, VEC, WIRE)
    else:
        total += values_of(c0, s0, VEC, WIRE)
    if first + 1 < world_size:
        total += values_of(c1, s1, VEC, WIRE)
    if NUMEL == 4:
        if first + 2 < world_size:
            total += values_of(c2, s2, VEC, WIRE)
        if first + 3 < world_size:
            total += values_of(c3, s3, VEC, WIRE)
    return total


@triton.jit
def reduce_tile(ranks, sections, part_numel, part, tile, scale, encoder, IN_WIRE: tl.constexpr, TILE: tl.constexpr):
    """Sums a tile and encodes it into the output part with these sections (scales, codes).

    ranks: (scales of the first rank, its codes, bytes from one rank to the next, number of ranks). encoder: as for
    encode_tile.
    """
    residual = encoder[0]
    BLOCK: tl.constexpr = encoder[2]
    FEEDBACK: tl.constexpr = encoder[3]
    VEC: tl.constexpr = vector_numel(ranks[1].dtype.element_ty, sections[1].dtype.element_ty, residual.dtype.element_ty)
    numel = tl.minimum(part_numel - tl.cast(tile, tl.int64) * TILE, TILE).to(tl.int32)
    begin = part * part_numel + tl.cast(tile, tl.int64) * TILE
    kept = load_residual(residual, begin, numel, VEC, TILE, FEEDBACK)
    first = ranks[1] + begin // VEC * (VEC // per_code(IN_WIRE))
    codes_at, in_codes = code_places(first, numel, VEC, IN_WIRE, TILE)
    if has_scales(IN_WIRE):
        scales_at, in_scales = scale_places(ranks[0] + begin // BLOCK, numel, VEC, BLOCK, TILE)
    else:
        scales_at, in_scales = None, None
    message = (codes_at, in_codes, scales_at, in_scales, ranks[2], ranks[3])
    # The registers do not hold four ranks at a time of fp32, or with scales and residuals.
    AT_A_TIME: tl.constexpr = 2 if IN_WIRE == FP32 or (FEEDBACK and has_scales(IN_WIRE)) else 4
    total = add_ranks(None, 0, message, VEC, IN_WIRE, AT_A_TIME)
    for rank in range(AT_A_TIME, ranks[3], AT_A_TIME):
        total = add_ranks(total, rank, message, VEC, IN_WIRE, AT_A_TIME)
    # Past the part's end the total is undefined. Blocks end there, and nothing is written.
    encode_tile(total * scale, sections, tile, numel, part_numel, kept, begin, VEC, encoder)


@triton.jit
def reduce_section(ranks, sections, parts, taken, scale, encoder, IN_WIRE: tl.constexpr, TILE: tl.constexpr):
    """Sums this program's tiles of a section.

    sections: (scales, codes) of the first output part. parts: (bytes from one output part to the next, elements of a
    part, number of parts). taken: number of units before the section.
    """
    stride, part_numel, num_parts = parts
    num_tiles = tiles_of(part_numel, TILE)
    for unit in range(first_unit(taken), taken + num_parts * num_tiles, tl.num_programs(0)):
        part, tile = tl.cast(0, tl.int64), unit - taken
        if tile >= num_tiles:  # seldom, and it is a division
            part, tile = part_of(tile, num_tiles)
        own = (section_of(sections[0], stride, part), section_of(sections[1], stride, part))
        reduce_tile(ranks, own, part_numel, part, tile, scale, encoder, IN_WIRE, TILE)


@triton.jit(do_not_specialize=["shape", "num_parts", "world_size", "scale"])
def reduce_kernel(
    message,  # Sections of the input
    out,  # Sections of the output
    in_stride: tl.int64,  # bytes from one rank's part of the input to the next
    shape,  # PartShape of the output
    num_parts: tl.int32,
    world_size: tl.int32,
    scale: tl.float32,
    residual,
    IN_WIRE: tl.constexpr,
    WIRE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    FEEDBACK: tl.constexpr,
):
    EXACT_TILE: tl.constexpr = TILE // exact_ratio(
        vector_numel(message.codes.dtype.element_ty, out.codes.dtype.element_ty, residual.dtype.element_ty)
    )
    # The encoder tuples are not assigned to variables: Triton 3.6 would turn their constants into variables.
    reduce_section(
        (message.scales, message.exact, in_stride, world_size),
        (out.scales, out.exact),
        (shape.stride, shape.exact_numel, num_parts),
        0,
        scale,
        (residual, FP32, BLOCK, 0),
        FP32,
        EXACT_TILE,
    )
    reduce_section(
        (message.scales, message.codes, in_stride, world_size),
        (out.scales, out.codes),
        (shape.stride, shape.numel, num_parts),
        num_parts * tiles_of(shape.exact_numel, EXACT_TILE),
        scale,
        (residual, WIRE, BLOCK, FEEDBACK),
        IN_WIRE,
        TILE,
    )
