"""The arithmetic of one element and one block as device functions: bit for bit what tests/helpers/reference defines.

A tile is a 1-D tensor [TILE]. VEC is the number of consecutive elements that a thread holds. A value that the elements
of a block share is computed or loaded once for each VEC elements, as [TILE // VEC]. Threads then need not exchange it.
"""

import triton
import triton.language as tl

from .constants import BF16_SCALES, INTERPRETED, PER_BYTE, WIRE_IDS, WITH_SCALES

# The wires, for comparison with a WIRE.
FP32 = tl.constexpr(WIRE_IDS["fp32"])
BF16 = tl.constexpr(WIRE_IDS["bf16"])
FP16 = tl.constexpr(WIRE_IDS["fp16"])
INT8 = tl.constexpr(WIRE_IDS["int8"])
FP8 = tl.constexpr(WIRE_IDS["fp8"])
INT4 = tl.constexpr(WIRE_IDS["int4"])

INF_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
FP16_NAN_BITS = tl.constexpr(0x7E00)
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
# 2^-100 as fp32 bits. A block whose absmax is below it becomes zeros.
LEAST_ABSMAX_BITS = tl.constexpr((127 - 100) << 23)
# The greatest finite bf16 number as fp32 bits.
BF16_GREATEST_BITS = tl.constexpr(0x7F7F0000)
SIGN_BIT = tl.constexpr(-(2**31))
# 1.5·2^23 has an ulp of one. Adding it rounds to a whole number, half to even, and leaves that in the lowest byte.
ROUND_TO_INTEGER = tl.constexpr(12582912.0)
# 2^23 as fp32 bits. It has an ulp of one, too.
TWO_TO_23_BITS = tl.constexpr((127 + 23) << 23)
TWO_TO_23 = tl.constexpr(2.0**23)


@triton.constexpr_function
def vector_numel(*dtypes):
    """Consecutive elements that each thread holds: 16 bytes of the widest of `dtypes`."""
    return 128 // max(dtype.primitive_bitwidth for dtype in dtypes)


@triton.constexpr_function
def has_scales(wire):
    return wire in WITH_SCALES


@triton.constexpr_function
def has_bf16_scales(wire):
    return wire in BF16_SCALES


@triton.constexpr_function
def per_code(wire):
    """Elements that share one integer of a codes section, the first in its lowest bits: 2 (int4) or 1."""
    return PER_BYTE[wire] if wire in PER_BYTE else 1


@triton.constexpr_function
def greatest_value(wire):
    return {INT8.value: 127.0, FP8.value: 448.0, INT4.value: 6853 / 1024}[wire]


@triton.constexpr_function
def least_value(wire):
    return {INT8.value: -127.0, FP8.value: -448.0, INT4.value: -8.0}[wire]


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
    """`y` (fp32) rounded to nearest even in bf16, as int16; a NaN becomes the canonical one.

    Rounds in integers, because not every conversion keeps denormals and rounds to nearest even: the interpreter's
    truncates.
    """
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
    """`y` (fp32) rounded to the gradient's dtype; a NaN becomes the canonical one."""
    if dtype == tl.bfloat16:
        return bf16_bits(y).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        return fp16_bits(y).to(tl.float16, bitcast=True)
    else:
        return canonical_bits(y).to(tl.float32, bitcast=True)


# ---- reduction within each thread


@triton.jit
def max_in_thread(x, LANES: tl.constexpr, VEC: tl.constexpr):
    """[LANES]: for each of LANES threads the maximum of its elements of `x`. The threads exchange nothing."""
    return tl.max(tl.max(tl.reshape(x, (x.shape[0] // (LANES * VEC), LANES, VEC)), axis=2), axis=0)


# ---- codes


@triton.jit
def decode(codes, WIRE: tl.constexpr):
    """fp32: the values of codes, without scales. A NaN need not be canonical: the next rounding makes it so."""
    if WIRE == FP32:
        return codes.to(tl.float32, bitcast=True)
    elif WIRE == BF16:
        return from_bf16_bits(codes)
    elif WIRE == FP16:
        return from_fp16_bits(codes)
    elif codes.dtype == tl.float8e4nv:
        return codes.to(tl.float32)
    elif WIRE == FP8:
        # e4m3 differs from fp32 in mantissa width and exponent bias only, for subnormals too: place the bits as
        # fp32's and multiply by 2^(127 - 7). The code with the greatest magnitude is NaN.
        bits = (codes.to(tl.int32) << 20) & (SIGN_BIT | (0x7F << 20))
        values = bits.to(tl.float32, bitcast=True) * 2.0**120
        return tl.where(tl.abs(values) > 448.0, float("nan"), values)
    elif WIRE == INT8:
        return int8_values(codes)
    else:
        tl.static_assert(WIRE == INT4)
        # The two's complement nibble of n, xor 8, is n + 8. In the lowest bits of 2^23 it makes 2^23 + n + 8.
        pairs = codes.to(tl.int32)
        values = tl.join(pairs & 0xF, (pairs >> 4) & 0xF)
        values = (values ^ (TWO_TO_23_BITS + 8)).to(tl.float32, bitcast=True) - (TWO_TO_23 + 8)
        return tl.reshape(level(values), (2 * codes.shape[0],))


# The two's complement byte of n, xor 128, is n + 128. In 2^23's lowest bits it makes 2^23 + n + 128. One xor serves
# four bytes, and prmt puts each in its place, with four times the rate of a conversion, or more.
WITH_128_ADDED = tl.constexpr(
    "{ .reg .b32 x; xor.b32 x, $4, 0x80808080; "
    + " ".join(f"prmt.b32 ${i}, x, 0x4B000000, 0x744{i};" for i in range(4))
    + " }"
)


@triton.jit
def int8_values(codes):
    if INTERPRETED:
        return codes.to(tl.float32)
    else:
        values = tl.inline_asm_elementwise(WITH_128_ADDED, "=r,=r,=r,=r,r", [codes], tl.float32, True, 4)
        return values - (TWO_TO_23 + 128)


@triton.jit
def level(code):
    """The value of an int4 code (fp32, whole). Exact."""
    return code * (code * code * (3 / 1024) + 832 / 1024)


@triton.jit
def code_places(codes, numel, VEC: tl.constexpr, WIRE: tl.constexpr, TILE: tl.constexpr):
    """(pointers [TILE // per_code(WIRE)], mask) of the codes of `numel` elements, a multiple of VEC, in integers of the
    codes section. codes: pointer to the first."""
    PER_CODE: tl.constexpr = per_code(WIRE)
    lane = tl.max_contiguous(tl.arange(0, TILE // PER_CODE), max(VEC // PER_CODE, 1))
    return codes + lane, lane < numel // VEC * (VEC // PER_CODE)


@triton.jit
def scale_places(scales, numel, VEC: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """(pointers [TILE // VEC], mask) of the scale of each VEC elements, for `numel` elements, a multiple of BLOCK.
    scales: pointer to the first."""
    element = tl.arange(0, TILE // VEC) * VEC
    return scales + element // BLOCK, element < numel


@triton.jit
def to_scales(loaded):
    """fp32: scales as they are stored, in fp32 or, as int16, in bf16."""
    if loaded.dtype == tl.int16:
        return from_bf16_bits(loaded)
    else:
        return loaded


@triton.jit
def times_scales(values, scales, VEC: tl.constexpr):
    """values [TILE] · scales [TILE // VEC]. Each scale multiplies VEC consecutive values."""
    TILE: tl.constexpr = values.shape[0]
    return tl.reshape(tl.reshape(values, (TILE // VEC, VEC)) * scales[:, None], (TILE,))
