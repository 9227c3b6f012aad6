"""The arithmetic of one element and one block: what fusedcomm/reference.py defines, bit for bit, as device functions.

Tiles are 1-D [TILE]. VEC is how many consecutive elements a thread holds: where elements of a block share a value it is
computed or loaded once for each VEC of them, as [TILE // VEC], and no exchange between threads is needed to spread it.
"""

import triton
import triton.language as tl

from .constants import BF16, FP8, FP8_E5M2, FP16, FP32, INT4, INT8

INF_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
FP16_NAN_BITS = tl.constexpr(0x7E00)
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
LEAST_ABSMAX_BITS = tl.constexpr((127 - 100) << 23)  # 2^-100: a block below it becomes zeros
SIGN_BIT = tl.constexpr(-(2**31))
# 1.5·2^23 has an ulp of one: adding it rounds to a whole number, half to even, which is then the lowest byte.
ROUND_TO_INTEGER = tl.constexpr(12582912.0)
# 2^23 has an ulp of one, too: as bits, and as a number.
TWO_TO_23_BITS = tl.constexpr((127 + 23) << 23)
TWO_TO_23 = tl.constexpr(2.0**23)


@triton.constexpr_function
def vector_numel(a, b):
    """Consecutive elements for each thread: 16 bytes of the wider of two dtypes."""
    return 128 // max(a.primitive_bitwidth, b.primitive_bitwidth)


@triton.constexpr_function
def has_scales(wire):
    return wire >= INT8.value


@triton.constexpr_function
def per_code(wire):
    """Elements that share one of a codes section's integers: the even one has the low half."""
    return 2 if wire == INT4.value else 1


@triton.constexpr_function
def greatest_value(wire):
    return {INT8.value: 127.0, FP8.value: 448.0, FP8_E5M2.value: 57344.0, INT4.value: 7.0}[wire]


# ---- bits


@triton.jit
def magnitude_bits(y):
    """|y| (fp32) as int32, which orders like |y|; Inf and NaN exceed every finite value."""
    return y.to(tl.int32, bitcast=True) & MAGNITUDE_BITS


@triton.jit
def canonical_bits(y):
    return tl.where(y != y, NAN_BITS, y.to(tl.int32, bitcast=True))


@triton.jit
def bf16_bits(y):
    """By integers: not every conversion keeps denormals and rounds to nearest even (the interpreter's truncates)."""
    bits = canonical_bits(y)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)


@triton.jit
def fp16_bits(y):
    return tl.where(y != y, FP16_NAN_BITS, y.to(tl.float16).to(tl.int16, bitcast=True)).to(tl.int16)


@triton.jit
def from_bf16_bits(bits):
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def from_fp16_bits(bits):
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


# ---- gradients


@triton.jit
def to_fp32(x):
    if x.dtype == tl.bfloat16:
        return from_bf16_bits(x.to(tl.int16, bitcast=True))
    else:
        return x.to(tl.float32)


@triton.jit
def to_gradient(y, dtype: tl.constexpr):
    """fp32 rounded to the gradient's dtype, NaNs canonical."""
    if dtype == tl.bfloat16:
        return bf16_bits(y).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        return fp16_bits(y).to(tl.float16, bitcast=True)
    else:
        return canonical_bits(y).to(tl.float32, bitcast=True)


# ---- folding a tile into LANES values, one for each thread, without exchange between threads


@triton.jit
def max_in_thread(x, LANES: tl.constexpr, VEC: tl.constexpr):
    return tl.max(tl.max(tl.reshape(x, (x.shape[0] // (LANES * VEC), LANES, VEC)), axis=2), axis=0)


@triton.jit
def sum_in_thread(x, LANES: tl.constexpr, VEC: tl.constexpr):
    return tl.sum(tl.sum(tl.reshape(x, (x.shape[0] // (LANES * VEC), LANES, VEC)), axis=2), axis=0)


# ---- codes


@triton.jit
def decode(codes, WIRE: tl.constexpr):
    """Codes as fp32; NaNs need not be canonical, because whatever is stored next makes them so."""
    if WIRE == FP32:
        return codes.to(tl.float32, bitcast=True)
    elif WIRE == BF16:
        return from_bf16_bits(codes)
    elif WIRE == FP16:
        return from_fp16_bits(codes)
    elif WIRE == INT8:
        return codes.to(tl.float32)
    elif WIRE == FP8:
        # e4m3 is fp32 but for the width of its mantissa and for its bias, subnormals and all.
        bits = (codes.to(tl.int32) << 20) & (SIGN_BIT | (0x7F << 20))
        values = bits.to(tl.float32, bitcast=True) * 2.0**120
        return tl.where(tl.abs(values) > 448.0, float("nan"), values)
    elif WIRE == FP8_E5M2:
        return from_fp16_bits((codes.to(tl.int32) << 8).to(tl.int16))
    else:
        tl.static_assert(WIRE == INT4)
        # The nibble of n, in two's complement, xor 8 is n + 8, and that in the lowest bits of 2^23 adds as much to it.
        pairs = codes.to(tl.int32)
        values = tl.join(pairs & 0xF, (pairs >> 4) & 0xF)
        values = (values ^ (TWO_TO_23_BITS + 8)).to(tl.float32, bitcast=True) - (TWO_TO_23 + 8)
        return tl.reshape(values, (2 * codes.shape[0],))


@triton.jit
def code_lane(TILE: tl.constexpr, VEC: tl.constexpr, WIRE: tl.constexpr):
    """Where the codes of TILE elements lie, counted in codes."""
    PER_CODE: tl.constexpr = per_code(WIRE)
    return tl.max_contiguous(tl.arange(0, TILE // PER_CODE), max(VEC // PER_CODE, 1))


@triton.jit
def load_scales(scales, begin, numel, other, VEC: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """fp32 [TILE // VEC]: the scale of each VEC elements of `numel` elements from `begin` on.

    Past them `other`, which is of the scales' own type: int4's are bf16, as int16.
    """
    element = tl.arange(0, TILE // VEC) * VEC
    loaded = tl.load(scales + (begin + element) // BLOCK, mask=element < numel, other=other)
    if loaded.dtype == tl.int16:
        return from_bf16_bits(loaded)
    else:
        return loaded


@triton.jit
def times_scales(values, scales, VEC: tl.constexpr):
    """values [TILE] · scales [TILE // VEC], each for VEC values."""
    TILE: tl.constexpr = values.shape[0]
    return tl.reshape(tl.reshape(values, (TILE // VEC, VEC)) * scales[:, None], (TILE,))


@triton.jit
def encode(y, WIRE: tl.constexpr):
    if WIRE == FP32:
        return canonical_bits(y)
    elif WIRE == BF16:
        return bf16_bits(y)
    else:
        tl.static_assert(WIRE == FP16)
        return fp16_bits(y)


@triton.jit
def fp8_code(v, MANTISSA_NBITS: tl.constexpr, BIAS: tl.constexpr, GREATEST: tl.constexpr):
    """int32: the code of `v` to nearest even, ±GREATEST where it lies beyond; by integers, as for bf16."""
    SHIFT: tl.constexpr = 23 - MANTISSA_NBITS
    REBIAS: tl.constexpr = (127 - BIAS) << 23
    # 1.5 times a power of two whose ulp is the step of the subnormals.
    ROUND_TO_STEP: tl.constexpr = 1.5 * 2.0 ** (24 - BIAS - MANTISSA_NBITS)
    bits = magnitude_bits(v)
    # Half an ulp less one, plus the lowest kept bit, carries exactly where nearest-even rounds up.
    code = (bits + ((1 << (SHIFT - 1)) - 1 - REBIAS) + ((bits >> SHIFT) & 1)) >> SHIFT
    subnormal = (tl.abs(v) + ROUND_TO_STEP).to(tl.int32, bitcast=True) & ((2 << MANTISSA_NBITS) - 1)
    code = tl.where(bits < REBIAS + (1 << 23), subnormal, tl.minimum(code, GREATEST))
    return code | ((v.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def quantise(y, VEC: tl.constexpr, WIRE: tl.constexpr, BLOCK: tl.constexpr):
    """(int8 codes [TILE], int4 [TILE // 2]; fp32 scales, int4 bf16 as int16, [TILE // BLOCK]) of `y` [TILE]."""
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
    else:
        inverse = tl.div_rn(of_greatest, absmax)
        scales = tl.where(normal, scales, tl.where(finite, 0.0, float("inf")))
    # In a block that is not normal the least fp32, 2^-149: everything but Inf and NaN then rounds to zero.
    inverse = tl.where(normal, inverse.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
    v = rows * spread(inverse, PER_BLOCK)
    if WIRE == FP8 or WIRE == FP8_E5M2:
        # … and to +0, as 2^-20 rounds to zero, too. Elsewhere -0 changes nothing (by bits: Triton makes a literal +0).
        v += spread(tl.where(normal, SIGN_BIT, (127 - 20) << 23).to(tl.float32, bitcast=True), PER_BLOCK)
        codes = fp8_code(v, 3, 7, 0x7E) if WIRE == FP8 else fp8_code(v, 2, 15, 0x7B)
    else:
        v = tl.minimum(tl.maximum(v, -GREATEST), GREATEST)
        codes = (v + ROUND_TO_INTEGER).to(tl.int32, bitcast=True)
    # Asked of the values, not of magnitude_bits: those need not stay in registers during the divisions.
    codes = tl.where(rows == rows, codes, 0)
    if WIRE == INT4:
        low, high = tl.split(tl.reshape(codes, (TILE // 2, 2)))
        return ((low & 0xF) | (high << 4)).to(tl.int8), scales
    else:
        return tl.reshape(codes.to(tl.int8), (TILE,)), scales


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
    places = tl.max_contiguous(out + row, [1, 1])
    tl.store(places, tl.broadcast_to(scales[:, None], SHAPE), mask=(column == 0) & (row * BLOCK < numel))


@triton.jit
def encode_and_store(
    y,
    scales_out,
    codes_out,
    tile,
    numel,
    part_numel,
    VEC: tl.constexpr,
    WIRE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the first `numel` elements of `y`, the part's tile number `tile`, into the part's sections.

    Elements past the end of their stream must be zeros. Zeroes the padding after a part's last scale, too.
    """
    TILE: tl.constexpr = y.shape[0]
    if has_scales(WIRE):
        codes, scales = quantise(y, VEC, WIRE, BLOCK)
        store_scales(scales_out + tile * (TILE // BLOCK), scales, numel, VEC, BLOCK)
        if tl.cast(tile, tl.int64) * TILE + numel == part_numel:
            IN_16_BYTES: tl.constexpr = 128 // scales.dtype.primitive_bitwidth
            num_scales = part_numel // BLOCK
            pad = num_scales + tl.arange(0, IN_16_BYTES)
            end = tl.cdiv(num_scales, IN_16_BYTES) * IN_16_BYTES
            tl.store(scales_out + pad, tl.zeros([IN_16_BYTES], scales.dtype), mask=pad < end)
    else:
        codes = encode(y, WIRE)
    PER_CODE: tl.constexpr = per_code(WIRE)
    lane = code_lane(TILE, VEC, WIRE)
    places = codes_out + tl.cast(tile, tl.int64) * (TILE // PER_CODE) + lane
    if numel == TILE:
        tl.store(places, codes)
    else:
        tl.store(places, codes, mask=lane < numel // VEC * (VEC // PER_CODE))
