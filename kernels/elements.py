"""The arithmetic of one element and one block: what fusedcomm/reference.py defines, bit for bit, as device functions.

Tiles are 1-D [TILE]. VEC is how many consecutive elements a thread holds: where elements of a block share a value it is
computed or loaded once for each VEC of them, as [TILE // VEC], and no exchange between threads is needed to spread it.
"""

import triton
import triton.language as tl

from .constants import BF16, FP16, FP32, INT8

INF_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
FP16_NAN_BITS = tl.constexpr(0x7E00)
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
LEAST_ABSMAX_BITS = tl.constexpr((127 - 100) << 23)  # 2^-100: a block below it becomes zeros
BITS_OF_127 = tl.constexpr(0x42FE0000)
# 1.5·2^23 has an ulp of one: adding it rounds to a whole number, half to even, which is then the lowest byte.
ROUND_TO_INTEGER = tl.constexpr(12582912.0)


@triton.constexpr_function
def vector_numel(a, b):
    """Consecutive elements for each thread: 16 bytes of the wider of two dtypes."""
    return 128 // max(a.primitive_bitwidth, b.primitive_bitwidth)


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
    else:
        return codes.to(tl.float32)


@triton.jit
def load_scales(scales, begin, numel, other, VEC: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """fp32 [TILE // VEC]: the scale of each VEC elements of `numel` elements from `begin` on, `other` past them."""
    element = tl.arange(0, TILE // VEC) * VEC
    return tl.load(scales + (begin + element) // BLOCK, mask=element < numel, other=other)


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
def quantise(y, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """int8 codes [TILE] of `y` and fp32 scales [TILE // BLOCK] of its blocks."""
    TILE: tl.constexpr = y.shape[0]
    PER_BLOCK: tl.constexpr = BLOCK // VEC
    rows = tl.reshape(y, (TILE // VEC, VEC))
    greatest = tl.max(tl.reshape(tl.max(magnitude_bits(rows), axis=1), (TILE // BLOCK, PER_BLOCK)), axis=1)
    finite = greatest < INF_BITS
    normal = finite & (greatest >= LEAST_ABSMAX_BITS)
    absmax = tl.where(normal, greatest, BITS_OF_127).to(tl.float32, bitcast=True)
    of_127 = tl.full(absmax.shape, 127.0, tl.float32)
    scales = tl.where(normal, tl.div_rn(absmax, of_127), tl.where(finite, 0.0, float("inf")))
    inverse = tl.where(normal, tl.div_rn(of_127, absmax), 0.0)
    inverse = tl.reshape(tl.broadcast_to(inverse[:, None], (TILE // BLOCK, PER_BLOCK)), (TILE // VEC,))
    codes = (rows * inverse[:, None] + ROUND_TO_INTEGER).to(tl.int32, bitcast=True)
    # Asked of the values, not of magnitude_bits: those need not stay in registers during the divisions.
    codes = tl.where(rows == rows, codes, 0)
    codes = tl.where(tl.abs(rows) == float("inf"), tl.where(rows < 0, -127, 127), codes)
    return tl.reshape(codes.to(tl.int8), (TILE,)), scales


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
    lane = tl.max_contiguous(tl.arange(0, TILE), VEC)
    begin = tl.cast(tile, tl.int64) * TILE
    if WIRE == INT8:
        codes, scales = quantise(y, VEC, BLOCK)
        store_scales(scales_out + tile * (TILE // BLOCK), scales, numel, VEC, BLOCK)
        if begin + numel == part_numel:
            num_scales = part_numel // BLOCK
            pad = num_scales + tl.arange(0, 4)
            tl.store(scales_out + pad, tl.zeros([4], tl.float32), mask=pad < (num_scales + 3) // 4 * 4)
    else:
        codes = encode(y, WIRE)
    if numel == TILE:
        tl.store(codes_out + begin + lane, codes)
    else:
        tl.store(codes_out + begin + lane, codes, mask=lane < numel // VEC * VEC)
