"""Blocks of a tile → codes and scales, and the scales' way to memory; see fusedcomm/reference for the arithmetic."""

import triton
import triton.language as tl

from .constants import FP8, INT4
from .elements import (
    INF_BITS,
    LEAST_ABSMAX_BITS,
    ROUND_TO_INTEGER,
    SIGN_BIT,
    TWO_TO_23,
    bf16_bits,
    decode,
    floor,
    from_bf16_bits,
    greatest_value,
    magnitude_bits,
)
from .noise import fraction

# Triton 3.6 would give scales to other threads, through shared memory, unless a row's places follow each other. They
# may, since only the first column is written; later versions spill by it.
ROWS_IN_ORDER = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7))

# fp8 is e4m3fn, beside fp32.
MANTISSA_NBITS, BIAS = 3, 7
FP8_GREATEST = tl.constexpr(0x7E)  # the code of 448
FP8_SHIFT = tl.constexpr(23 - MANTISSA_NBITS)  # mantissa bits that fp32 has more
FP8_NOISE_SHIFT = tl.constexpr(23 - MANTISSA_NBITS - 16)
FP8_REBIAS = tl.constexpr((127 - BIAS) << 23)  # from its exponents to fp32's
FP8_LEAST_NORMAL = tl.constexpr((128 - BIAS) << 23)  # the bits of 2^-6 in fp32
FP8_SUBNORMALS = tl.constexpr((2 << MANTISSA_NBITS) - 1)
FP8_HALF = tl.constexpr((1 << (22 - MANTISSA_NBITS)) - 1)  # an ulp, less one
# 1.5 times a power of two whose ulp is the step of the subnormals.
FP8_ROUND_TO_STEP = tl.constexpr(1.5 * 2.0 ** (24 - BIAS - MANTISSA_NBITS))
FP8_STEPS = tl.constexpr(2.0 ** (BIAS - 1 + MANTISSA_NBITS))  # of the subnormals, to 1.0


@triton.jit
def fp8_code(v):
    """int32: the code of `v` to nearest even, ±448 where it lies beyond; by integers, as for bf16."""
    bits = magnitude_bits(v)
    # Half an ulp less one, plus the lowest kept bit, carries exactly where nearest-even rounds up.
    code = (bits + (FP8_HALF - FP8_REBIAS) + ((bits >> FP8_SHIFT) & 1)) >> FP8_SHIFT
    subnormal = (tl.abs(v) + FP8_ROUND_TO_STEP).to(tl.int32, bitcast=True)
    return with_fp8_sign(v, bits, code, subnormal)


@triton.jit
def stochastic_fp8_code(v, noise):
    """As fp8_code, rounded up where `noise`, of 16 bits, carries into what is kept."""
    bits = magnitude_bits(v)
    code = (bits + (noise << FP8_NOISE_SHIFT).to(tl.int32) - FP8_REBIAS) >> FP8_SHIFT
    # As a whole number in the lowest bits of 2^23.
    subnormal = floor(tl.abs(v) * FP8_STEPS + fraction(noise)) + TWO_TO_23
    return with_fp8_sign(v, bits, code, subnormal.to(tl.int32, bitcast=True))


@triton.jit
def with_fp8_sign(v, bits, code, subnormal):
    """The magnitude `code` of `v`, whose magnitude_bits are given, with its sign.

    At most 448's. Below the least normal number it is in the lowest bits of `subnormal` instead.
    """
    code = tl.where(bits < FP8_LEAST_NORMAL, subnormal & FP8_SUBNORMALS, tl.minimum(code, FP8_GREATEST))
    return code | ((v.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def quantise(y, noise, VEC: tl.constexpr, WIRE: tl.constexpr, BLOCK: tl.constexpr):
    """(codes, scales, decoded) of `y` (fp32 [TILE]), rounded stochastically if `noise` (uint32 [TILE]) is not None.

    codes int8 [TILE], int4 [TILE // 2]; scales fp32, int4 bf16 as int16, [TILE // BLOCK]; decoded fp32 [TILE], where
    what is not finite need not be right, as long as y - decoded is not finite either.
    """
    TILE: tl.constexpr = y.shape[0]
    GREATEST: tl.constexpr = greatest_value(WIRE)
    PER_BLOCK: tl.constexpr = BLOCK // VEC
    rows = tl.reshape(y, (TILE // VEC, VEC))
    greatest = tl.max(tl.reshape(tl.max(magnitude_bits(rows), axis=1), (TILE // BLOCK, PER_BLOCK)), axis=1)
    finite = greatest < INF_BITS
    normal = finite & (greatest >= LEAST_ABSMAX_BITS)
    absmax = tl.where(normal, greatest.to(tl.float32, bitcast=True), GREATEST)
    of_greatest = tl.full(absmax.shape, GREATEST, tl.float32)
    scales = tl.div_rn(absmax, of_greatest)
    if WIRE == INT4:
        bits = bf16_bits(scales)
        inverse = tl.div_rn(tl.full(absmax.shape, 1.0, tl.float32), from_bf16_bits(bits))
        scales = tl.where(normal, bits, tl.where(finite, 0, INF_BITS >> 16).to(tl.int16))
        factors = from_bf16_bits(scales)
    else:
        inverse = tl.div_rn(of_greatest, absmax)
        scales = tl.where(normal, scales, tl.where(finite, 0.0, float("inf")))
        factors = scales
    # In a block that is not normal the least fp32, 2^-149: everything but Inf and NaN then rounds to zero.
    inverse = tl.where(normal, inverse.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
    v = rows * spread(inverse, PER_BLOCK)
    if WIRE == FP8:
        if noise is None:
            # … and to +0, as 2^-20 rounds to zero, too. Elsewhere -0 changes nothing (by bits: Triton makes a literal
            # +0).
            v += spread(tl.where(normal, SIGN_BIT, (127 - 20) << 23).to(tl.float32, bitcast=True), PER_BLOCK)
            codes = fp8_code(v)
        else:
            codes = stochastic_fp8_code(v, tl.reshape(noise, (TILE // VEC, VEC)))
    else:
        if noise is not None:
            v = floor(v + fraction(tl.reshape(noise, (TILE // VEC, VEC))))
        v = tl.minimum(tl.maximum(v, -GREATEST), GREATEST)
        whole = v + ROUND_TO_INTEGER
        codes = whole.to(tl.int32, bitcast=True)
    # Asked of the values, not of magnitude_bits: those need not stay in registers during the divisions.
    if noise is None:
        codes = tl.where(rows == rows, codes, 0)
    else:
        # Noise rounds up also what is tiny.
        codes = tl.where(spread(normal, PER_BLOCK) | (tl.abs(rows) == float("inf")), codes, 0)
    if WIRE == FP8:
        values = decode(codes.to(tl.int8), WIRE)
    else:
        values = whole - ROUND_TO_INTEGER
    decoded = tl.reshape(values * spread(factors, PER_BLOCK), (TILE,))
    if WIRE == INT4:
        low, high = tl.split(tl.reshape(codes, (TILE // 2, 2)))
        return ((low & 0xF) | (high << 4)).to(tl.int8), scales, decoded
    else:
        return tl.reshape(codes.to(tl.int8), (TILE,)), scales, decoded


@triton.jit
def spread(of_blocks, PER_BLOCK: tl.constexpr):
    """[blocks · PER_BLOCK, 1] of [blocks]."""
    NUM_BLOCKS: tl.constexpr = of_blocks.shape[0]
    rows = tl.broadcast_to(of_blocks[:, None], (NUM_BLOCKS, PER_BLOCK))
    return tl.reshape(rows, (NUM_BLOCKS * PER_BLOCK,))[:, None]


@triton.jit
def store_scales(out, scales, numel, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the scales of the first `numel` elements' blocks.

    As a matrix in which one column is written: the scales then stay with the threads that computed them, and no barrier
    is needed to hand them over.
    """
    NUM_BLOCKS: tl.constexpr = scales.shape[0]
    SHAPE: tl.constexpr = (NUM_BLOCKS, BLOCK // VEC)
    row = tl.broadcast_to(tl.arange(0, NUM_BLOCKS)[:, None], SHAPE)
    column = tl.broadcast_to(tl.arange(0, BLOCK // VEC)[None, :], SHAPE)
    if ROWS_IN_ORDER:
        places = tl.max_contiguous(out + row + column, [1, BLOCK // VEC])
    else:
        places = tl.max_contiguous(out + row, [1, 1])
    tl.store(places, tl.broadcast_to(scales[:, None], SHAPE), mask=(column == 0) & (row * BLOCK < numel))
