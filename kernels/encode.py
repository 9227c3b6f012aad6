"""Encodes a tile, for pack and reduce: adds the residual, rounds, stores, and updates the residual.

A step that a variant does not have costs nothing: its parameters are not read, and no registers are used for it.
"""

import triton
import triton.language as tl

from .elements import (
    BF16,
    FP16,
    FP32,
    bf16_bits,
    canonical_bits,
    code_places,
    decode,
    fp16_bits,
    has_scales,
    per_code,
)
from .quantise import quantise, store_scales
from .residual import store_residual


@triton.jit
def encode(y, WIRE: tl.constexpr):
    """The codes of `y` (fp32), as integers, rounded to nearest even. For wires without scales."""
    if WIRE == FP32:
        return canonical_bits(y)
    elif WIRE == BF16:
        return bf16_bits(y)
    else:
        tl.static_assert(WIRE == FP16)
        return fp16_bits(y)


@triton.jit
def encode_and_store(y, sections, tile, numel, part_numel, VEC: tl.constexpr, WIRE: tl.constexpr, BLOCK: tl.constexpr):
    """Rounds `y` (fp32 [TILE]), tile number `tile` of a part, and writes its first `numel` elements.

    sections: the part's (scales, codes). The padding after the part's last scale is zeroed. Returns the written codes
    decoded, fp32 [TILE].
    """
    TILE: tl.constexpr = y.shape[0]
    scales_out, codes_out = sections
    if has_scales(WIRE):
        codes, scales, decoded = quantise(y, codes_out.dtype.element_ty, VEC, WIRE, BLOCK)
        store_scales(scales_out + tile * (TILE // BLOCK), scales, numel, VEC, BLOCK)
        if tl.cast(tile, tl.int64) * TILE + numel == part_numel:
            IN_16_BYTES: tl.constexpr = 128 // scales.dtype.primitive_bitwidth
            num_scales = part_numel // BLOCK
            pad = num_scales + tl.arange(0, IN_16_BYTES)
            end = tl.cdiv(num_scales, IN_16_BYTES) * IN_16_BYTES
            tl.store(scales_out + pad, tl.zeros([IN_16_BYTES], scales.dtype), mask=pad < end)
    else:
        codes = encode(y, WIRE)
        decoded = decode(codes, WIRE)
    first = codes_out + tl.cast(tile, tl.int64) * (TILE // per_code(WIRE))
    places, mask = code_places(first, numel, VEC, WIRE, TILE)
    if numel == TILE:
        tl.store(places, codes)
    else:
        tl.store(places, codes, mask=mask)
    return decoded


@triton.jit
def encode_tile(y, sections, tile, numel, part_numel, kept, kept_at, VEC: tl.constexpr, encoder):
    """Encodes `y` as encode_and_store does, with the variant's residual.

    kept: the tile's residual, fp32 [TILE]. kept_at: element of the residual that the tile starts with. encoder:
    (residual, WIRE, BLOCK, FEEDBACK); the last three are constants.
    """
    residual = encoder[0]
    WIRE: tl.constexpr = encoder[1]
    BLOCK: tl.constexpr = encoder[2]
    FEEDBACK: tl.constexpr = encoder[3]
    if FEEDBACK:
        y += kept
    decoded = encode_and_store(y, sections, tile, numel, part_numel, VEC, WIRE, BLOCK)
    if FEEDBACK:
        store_residual(residual, y - decoded, kept_at, numel, VEC)
