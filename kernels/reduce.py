"""One part from every rank → the encoded mean of that part: fp32 sum in rank order, · scale, one rounding.

The output may have another wire and more parts than the input. A sum on two levels uses this between its levels: 16
bits within a host become few bits between hosts.

A rank's few bytes cost latency, not arithmetic, so several ranks are loaded before the first is added.
"""

import triton
import triton.language as tl

from .elements import FP32, code_lane, decode, has_scales, load_scales, per_code, times_scales, vector_numel
from .encode import encode_tile
from .residual import load_residual
from .tiles import exact_ratio, first_unit, part_of, section_of, tiles_of


@triton.jit
def minus_zero_unless(present, dtype: tl.constexpr):
    """-0, or +0 if `present`: a scalar of dtype fp32, or the bits of a float in an integer `dtype` of its width.

    Adding -0 changes nothing, not even the sign of a zero. It is made from bits, because Triton turns a literal -0.0
    into +0. It is chosen at run time, because Triton 3.6 to 3.8 load a 16-bit constant wrongly: where a register should
    hold it twice, they sign-extend it.
    """
    bits = tl.where(present, 0, -(2 ** (dtype.primitive_bitwidth - 1)))
    if dtype == tl.float32:
        return bits.to(tl.float32, bitcast=True)
    else:
        return bits.to(dtype)


@triton.jit
def load_rank(
    ranks, rank, begin, numel, VEC: tl.constexpr, WIRE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """(codes, scales [TILE // VEC]) of `numel` elements of a rank's part from `begin` on; without scales (codes, 0.0).

    ranks: (scales of the first rank, its codes, bytes from one rank to the next, number of ranks). begin: a multiple of
    VEC and, in a wire with scales, of BLOCK. If there is no such rank, the result decodes to -0.
    """
    scales_in, codes_in, in_stride, world_size = ranks
    PER_CODE: tl.constexpr = per_code(WIRE)
    present = rank < world_size
    numel = tl.where(present, numel, 0)
    lane = code_lane(TILE, VEC, WIRE)
    mask = lane < numel // VEC * (VEC // PER_CODE)
    codes = section_of(codes_in, in_stride, rank) + begin // VEC * (VEC // PER_CODE)
    if has_scales(WIRE):
        # Code 0 is +0 in every wire.
        scales = section_of(scales_in, in_stride, rank) + begin // BLOCK
        none = minus_zero_unless(present, scales_in.dtype.element_ty)
        return tl.load(codes + lane, mask=mask, other=0), load_scales(scales, 0, numel, none, VEC, BLOCK, TILE)
    else:
        none = minus_zero_unless(present, codes_in.dtype.element_ty)
        return tl.load(codes + lane, mask=mask, other=none), 0.0


@triton.jit
def add(total, codes, scales, VEC: tl.constexpr, WIRE: tl.constexpr):
    values = decode(codes, WIRE)
    if has_scales(WIRE):
        values = times_scales(values, scales, VEC)
    return total + values


@triton.jit
def reduce_tile(ranks, sections, part_numel, part, tile, scale, encoder, IN_WIRE: tl.constexpr, TILE: tl.constexpr):
    """Sums a tile and encodes it into the output part with these sections (scales, codes).

    ranks: as for load_rank. encoder: as for encode_tile.
    """
    residual = encoder[0]
    BLOCK: tl.constexpr = encoder[2]
    FEEDBACK: tl.constexpr = encoder[3]
    VEC: tl.constexpr = vector_numel(ranks[1].dtype.element_ty, sections[1].dtype.element_ty, residual.dtype.element_ty)
    numel = tl.minimum(part_numel - tl.cast(tile, tl.int64) * TILE, TILE).to(tl.int32)
    begin = part * part_numel + tl.cast(tile, tl.int64) * TILE
    kept = load_residual(residual, begin, numel, VEC, TILE, FEEDBACK)
    total = tl.full([TILE], minus_zero_unless(False, tl.float32), tl.float32)
    # With scales and residuals the registers do not hold four ranks at a time.
    AT_A_TIME: tl.constexpr = 2 if FEEDBACK and has_scales(IN_WIRE) else 4
    for rank in range(0, ranks[3], AT_A_TIME):
        c0, s0 = load_rank(ranks, rank, begin, numel, VEC, IN_WIRE, BLOCK, TILE)
        c1, s1 = load_rank(ranks, rank + 1, begin, numel, VEC, IN_WIRE, BLOCK, TILE)
        if AT_A_TIME == 4:
            c2, s2 = load_rank(ranks, rank + 2, begin, numel, VEC, IN_WIRE, BLOCK, TILE)
            c3, s3 = load_rank(ranks, rank + 3, begin, numel, VEC, IN_WIRE, BLOCK, TILE)
        total = add(total, c0, s0, VEC, IN_WIRE)
        total = add(total, c1, s1, VEC, IN_WIRE)
        if AT_A_TIME == 4:
            total = add(total, c2, s2, VEC, IN_WIRE)
            total = add(total, c3, s3, VEC, IN_WIRE)
    # Past the part's end the total is zero, and nothing is written.
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
        part, tile = part_of(unit - taken, num_tiles)
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
