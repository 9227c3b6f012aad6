"""One part from every rank → the encoded mean of that part: fp32 sum in rank order, · scale, one rounding.

Latency, not arithmetic, is what a rank's few bytes cost, so a few ranks are loaded before the first is added.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .constants import FP32, OPTIONS, TILE, WIRE_IDS
from .elements import (
    code_lane,
    decode,
    encode_and_store,
    has_scales,
    load_scales,
    per_code,
    times_scales,
    vector_numel,
)
from .sections import sections
from .tiles import first_unit, section_of, tiles_of

if TYPE_CHECKING:
    from fusedcomm.native import _C


@triton.jit
def minus_zeros(shape: tl.constexpr, dtype: tl.constexpr):
    """-0: adding it changes nothing, not even the sign of a zero. By bits, for Triton makes a literal -0.0 +0.

    Of dtype fp32; or its bits, in an integer of its float's width.
    """
    if dtype == tl.float32:
        return tl.full(shape, -(2**31), tl.int32).to(tl.float32, bitcast=True)
    else:
        SIGN_BIT: tl.constexpr = -(2 ** (dtype.primitive_bitwidth - 1))
        return tl.full(shape, SIGN_BIT, dtype)


@triton.jit
def load_rank(
    scales_in,
    codes_in,
    part_nbytes,
    world_size,
    rank,
    tile,
    numel,
    VEC: tl.constexpr,
    WIRE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """(codes, scales [TILE // VEC]) of a rank's tile; values that decode to -0 if there is no such rank."""
    PER_CODE: tl.constexpr = per_code(WIRE)
    numel = tl.where(rank < world_size, numel, 0)
    lane = code_lane(TILE, VEC, WIRE)
    mask = lane < numel // VEC * (VEC // PER_CODE)
    codes = section_of(codes_in, part_nbytes, rank) + tl.cast(tile, tl.int64) * (TILE // PER_CODE)
    if has_scales(WIRE):
        # Code 0 is +0 in every wire.
        scales = section_of(scales_in, part_nbytes, rank) + tile * (TILE // BLOCK)
        none = minus_zeros([TILE // VEC], scales_in.dtype.element_ty)
        return tl.load(codes + lane, mask=mask, other=0), load_scales(scales, 0, numel, none, VEC, BLOCK, TILE)
    else:
        none = minus_zeros([TILE], codes_in.dtype.element_ty)
        return tl.load(codes + lane, mask=mask, other=none), 0.0


@triton.jit
def add(total, codes, scales, VEC: tl.constexpr, WIRE: tl.constexpr):
    values = decode(codes, WIRE)
    if has_scales(WIRE):
        values = times_scales(values, scales, VEC)
    return total + values


@triton.jit
def reduce_tile(
    scales_in,
    codes_in,
    scales_out,
    codes_out,
    part_nbytes,
    part_numel,
    world_size,
    tile,
    scale,
    WIRE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    VEC: tl.constexpr = vector_numel(codes_in.dtype.element_ty, codes_out.dtype.element_ty)
    numel = tl.minimum(part_numel - tl.cast(tile, tl.int64) * TILE, TILE).to(tl.int32)
    total = minus_zeros([TILE], tl.float32)
    for rank in range(0, world_size, 4):
        c0, s0 = load_rank(scales_in, codes_in, part_nbytes, world_size, rank, tile, numel, VEC, WIRE, BLOCK, TILE)
        c1, s1 = load_rank(scales_in, codes_in, part_nbytes, world_size, rank + 1, tile, numel, VEC, WIRE, BLOCK, TILE)
        c2, s2 = load_rank(scales_in, codes_in, part_nbytes, world_size, rank + 2, tile, numel, VEC, WIRE, BLOCK, TILE)
        c3, s3 = load_rank(scales_in, codes_in, part_nbytes, world_size, rank + 3, tile, numel, VEC, WIRE, BLOCK, TILE)
        total = add(total, c0, s0, VEC, WIRE)
        total = add(total, c1, s1, VEC, WIRE)
        total = add(total, c2, s2, VEC, WIRE)
        total = add(total, c3, s3, VEC, WIRE)
    # Past the part's end the total is -0 still, and nothing there is written.
    encode_and_store(total * scale, scales_out, codes_out, tile, numel, part_numel, VEC, WIRE, BLOCK)


@triton.jit(do_not_specialize=["part_numel", "part_exact_numel", "world_size", "scale"])
def reduce_kernel(
    exact_in,
    scales_in,
    codes_in,
    exact_out,
    scales_out,
    codes_out,
    part_nbytes: tl.int64,
    part_numel: tl.int64,
    part_exact_numel: tl.int64,
    world_size: tl.int32,
    scale: tl.float32,
    WIRE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    HAS_EXACT: tl.constexpr,
):
    num_exact_tiles = 0
    if HAS_EXACT:
        num_exact_tiles = tiles_of(part_exact_numel, TILE)
        for tile in range(first_unit(0), num_exact_tiles, tl.num_programs(0)):
            reduce_tile(
                scales_in,
                exact_in,
                scales_out,
                exact_out,
                part_nbytes,
                part_exact_numel,
                world_size,
                tile,
                scale,
                FP32,
                BLOCK,
                TILE,
            )
    for tile in range(first_unit(num_exact_tiles), tiles_of(part_numel, TILE), tl.num_programs(0)):
        reduce_tile(
            scales_in,
            codes_in,
            scales_out,
            codes_out,
            part_nbytes,
            part_numel,
            world_size,
            tile,
            scale,
            WIRE,
            BLOCK,
            TILE,
        )


def reduce(
    layout: "_C.BucketLayout",
    parts: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    num_programs: int,
    tile: int = TILE,
) -> None:
    """Writes to `out`, uint8 [layout.part.nbytes], the scaled sum of `parts`, uint8 [layout.chunk_nbytes].

    `parts` holds every rank's encoding of the same part, in rank order, which is the order of summation. Both start at
    multiples of 16 bytes. ValueError if either has another shape, dtype or alignment.
    """
    reduce_kernel[(num_programs,)](
        *sections(layout, parts, layout.chunk_nbytes),
        *sections(layout, out, layout.part.nbytes),
        *(layout.part.nbytes, layout.part.lossy_numel, layout.part.exact_numel, layout.num_parts, scale),
        WIRE=WIRE_IDS[layout.wire],
        BLOCK=layout.block_numel,
        TILE=tile,
        HAS_EXACT=layout.part.exact_numel > 0,
        **OPTIONS,
    )
