"""The arithmetic of one element and one block: what fusedcomm/reference defines, bit for bit, as device functions.

Tiles are 1-D [TILE]. VEC is how many consecutive elements a thread holds: where elements of a block share a value it is
computed or loaded once for each VEC of them, as [TILE // VEC], and no exchange between threads is needed to spread it.
"""

import triton
import triton.language as tl

from .constants import BF16, FP8, FP16, FP32, INT4, INT8, WITH_SCALES

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
def vector_numel(*dtypes):
    """Consecutive elements for each thread: 16 bytes of the widest of some dtypes."""
    return 128 // max(dtype.primitive_bitwidth for dtype in dtypes)


@triton.constexpr_function
def has_scales(wire):
    return wire in WITH_SCALES


@triton.constexpr_function
def per_code(wire):
    """Elements that share one of a codes section's integers: the even one has the low half."""
    return 2 if wire == INT4.value else 1


@triton.constexpr_function
def greatest_value(wire):
    return {INT8.value: 127.0, FP8.value: 448.0, INT4.value: 7.0}[wire]


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


@triton.jit
def floor(x):
    """Of |x| < 2^22, +0 for a zero. tl.floor takes a denormal for a zero on its way."""
    nearest = (x + ROUND_TO_INTEGER) - ROUND_TO_INTEGER
    return nearest - tl.where(nearest > x, 1.0, 0.0)


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
