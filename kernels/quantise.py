"""Blocks of a tile → codes and scales, and the store of the scales. tests/helpers/reference defines the arithmetic."""

import triton
import triton.language as tl

from .elements import (
    BF16_GREATEST_BITS,
    FP8,
    INF_BITS,
    INT4,
    LEAST_ABSMAX_BITS,
    ROUND_TO_INTEGER,
    SIGN_BIT,
    bf16_bits,
    decode,
    from_bf16_bits,
    greatest_value,
    has_bf16_scales,
    least_value,
    level,
    magnitude_bits,
    per_code,
)

# Whether the addresses of a row in store_scales follow each other. They may, since only the first column is written.
# Otherwise Triton 3.6 would hand scales to other threads through shared memory. Later versions spill registers if they
# do.
ROWS_IN_ORDER = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7))

# fp8 is e4m3fn: 3 mantissa bits, exponent bias 7.
MANTISSA_NBITS, BIAS = 3, 7
# The code of 448.
FP8_GREATEST = tl.constexpr(0x7E)
# Mantissa bits that fp32 has beyond fp8's.
FP8_SHIFT = tl.constexpr(23 - MANTISSA_NBITS)
# The difference of fp32's and fp8's exponent bias, in fp32 bits.
FP8_REBIAS = tl.constexpr((127 - BIAS) << 23)
# The least normal number, 2^-6, as fp32 bits.
FP8_LEAST_NORMAL = tl.constexpr((128 - BIAS) << 23)
# The code bits of subnormals and of the least normal number, to which a subnormal may be rounded.
FP8_SUBNORMALS = tl.constexpr((2 << MANTISSA_NBITS) - 1)
# Half an ulp of fp8, less one, as fp32 bits.
FP8_HALF = tl.constexpr((1 << (22 - MANTISSA_NBITS)) - 1)
# 1.5·2^14, whose ulp is 2^-9: the step of the subnormals.
FP8_ROUND_TO_STEP = tl.constexpr(1.5 * 2.0 ** (24 - BIAS - MANTISSA_NBITS))


@triton.jit
def fp8_code(v):
    """int32: the code of `v`, rounded to nearest even; beyond ±448 it is the code of ±448.

    Rounds in integers, for the reason given in bf16_bits.
    """
    bits = magnitude_bits(v)
    # Half an ulp less one, plus the lowest kept bit, carries exactly where nearest-even rounds up.
    code = (bits + (FP8_HALF - FP8_REBIAS) + ((bits >> FP8_SHIFT) & 1)) >> FP8_SHIFT
    subnormal = (tl.abs(v) + FP8_ROUND_TO_STEP).to(tl.int32, bitcast=True)
    return with_fp8_sign(v, bits, code, subnormal)


@triton.jit
def with_fp8_sign(v, bits, code, subnormal):
    """The code of `v`, given the code of its magnitude; adds the sign.

    bits: magnitude_bits(v). code: the magnitude's code, limited here to 448's code. subnormal: has the code in its
    lowest bits if `v` is below the least normal number.
    """
    code = tl.where(bits < FP8_LEAST_NORMAL, subnormal & FP8_SUBNORMALS, tl.minimum(code, FP8_GREATEST))
    return code | ((v.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def quantise(y, dtype: tl.constexpr, VEC: tl.constexpr, WIRE: tl.constexpr, BLOCK: tl.constexpr):
    """(codes, scales, decoded) of `y` (fp32 [TILE]).

    codes: [TILE // per_code(WIRE)] in `dtype`: int8, or float8e4nv where the GPU converts fp8.
    scales: fp32 [TILE // BLOCK]; in int4 bf16 as int16.
    decoded: fp32 [TILE]. Where `y` is not finite it may be wrong, as long as y - decoded is not finite there either.
    """
    TILE: tl.constexpr = y.shape[0]
    GREATEST: tl.constexpr = greatest_value(WIRE)
    PER_BLOCK: tl.constexpr = BLOCK // VEC
    rows = tl.reshape(y, (TILE // VEC, VEC))
    if has_bf16_scales(WIRE):
        tops = tl.max(tl.reshape(tl.max(turned_bits(rows), axis=1), (TILE // BLOCK, PER_BLOCK)), axis=1)
        greatest = (tops >> 1).to(tl.int32)
    else:
        greatest = tl.max(tl.reshape(tl.max(magnitude_bits(rows), axis=1), (TILE // BLOCK, PER_BLOCK)), axis=1)
    finite = greatest < INF_BITS
    normal = finite & (greatest >= LEAST_ABSMAX_BITS)
    absmax = tl.where(normal, greatest.to(tl.float32, bitcast=True), GREATEST)
    of_greatest = tl.full(absmax.shape, GREATEST, tl.float32)
    if has_bf16_scales(WIRE):
        bits = bf16_scale(tops, absmax, WIRE)
        inverse = tl.div_rn(tl.full(absmax.shape, 1.0, tl.float32), from_bf16_bits(bits))
        scales = tl.where(normal, bits, tl.where(finite, 0, INF_BITS >> 16).to(tl.int16))
        factors = from_bf16_bits(scales)
    else:
        scales = tl.div_rn(absmax, of_greatest)
        inverse = tl.div_rn(of_greatest, absmax)
        scales = tl.where(normal, scales, tl.where(finite, 0.0, float("inf")))
        factors = scales
    # A block that is not normal has the least fp32 number, 2^-149, so that all but Inf and NaN round to zero.
    inverse = tl.where(normal, inverse.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
    v = rows * spread(inverse, PER_BLOCK)
    if WIRE == FP8:
        # In a block that is not normal adding 2^-20, which also rounds to zero, makes every zero +0. In others adding
        # -0 changes nothing. The -0 is made from bits, because Triton turns a literal -0.0 into +0.
        v += spread(tl.where(normal, SIGN_BIT, (127 - 20) << 23).to(tl.float32, bitcast=True), PER_BLOCK)
        if dtype == tl.float8e4nv:
            codes = tl.where(rows == rows, v, 0.0).to(dtype)  # saturates
        else:
            codes = fp8_code(v)
    else:
        v = tl.minimum(tl.maximum(v, least_value(WIRE)), GREATEST)
        if WIRE == INT4:
            whole = v * (9856 / 8192 - v * v * (29 / 8192)) + ROUND_TO_INTEGER
        else:
            whole = v + ROUND_TO_INTEGER
        codes = whole.to(tl.int32, bitcast=True)
    if dtype == tl.int8:
        # Tests the values, not magnitude_bits, which then need not stay in registers during the divisions.
        codes = tl.where(rows == rows, codes, 0)
    if WIRE == FP8:
        values = decode(codes.to(dtype), WIRE)
    elif WIRE == INT4:
        values = level(whole - ROUND_TO_INTEGER)
    else:
        values = whole - ROUND_TO_INTEGER
    decoded = tl.reshape(values * spread(factors, PER_BLOCK), (TILE,))
    if per_code(WIRE) == 2:
        low, high = tl.split(tl.reshape(codes, (TILE // 2, 2)))
        return ((low & 0xF) | (high << 4)).to(tl.int8), scales, decoded
    else:
        return tl.reshape(codes.to(dtype), (TILE,)), scales, decoded


@triton.jit
def turned_bits(y):
    """The bits of `y` (fp32) turned left by one, as uint32: they order by magnitude, then negative after positive."""
    bits = y.to(tl.uint32, bitcast=True)
    return (bits << 1) | (bits >> 31)


@triton.jit
def bf16_scale(tops, absmax, WIRE: tl.constexpr):
    """bf16 as int16: the scales of blocks by greatest turned_bits. absmax: fp32; the greatest value if not normal."""
    bits = tl.minimum(absmax.to(tl.int32, bitcast=True), BF16_GREATEST_BITS)
    absmax = bits.to(tl.float32, bitcast=True)
    # The element of greatest magnitude gets the least code.
    STEP: tl.constexpr = -1.0 / least_value(WIRE)
    return bf16_bits(absmax * tl.where((tops & 1) == 1, STEP, -STEP))


@triton.jit
def spread(of_blocks, PER_BLOCK: tl.constexpr):
    """[blocks · PER_BLOCK, 1] from [blocks]: each value PER_BLOCK times."""
    NUM_BLOCKS: tl.constexpr = of_blocks.shape[0]
    rows = tl.broadcast_to(of_blocks[:, None], (NUM_BLOCKS, PER_BLOCK))
    return tl.reshape(rows, (NUM_BLOCKS * PER_BLOCK,))[:, None]


@triton.jit
def store_scales(out, scales, numel, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the scales of the first `numel` elements' blocks.

    The store has the shape of a matrix with only one column written. The scales then stay with the threads that
    computed them, and no barrier is needed to hand them over.
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
