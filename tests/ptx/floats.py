"""fp32 arithmetic and conversions: PTX ISA, sections "Floating Point Instructions" and "Data Movement and Conversion
Instructions: cvt".

fp32 arithmetic gives the canonical NaN. Approximate instructions are refused: the ISA leaves their bits open.
"""

import operator
from collections.abc import Iterator
from functools import reduce

import numpy as np

from .operation import DTYPES, Function, Modifiers, Operation, Unsupported, nbits_of, require, same

NAN, HALF_NAN = np.uint32(0x7FFFFFFF), np.uint16(0x7FFF)
SIGN = np.uint32(0x80000000)
LEAST_NORMAL = np.float32(2.0**-126)


# ---- Floating Point Instructions: fp32


def canonical(y: np.ndarray) -> np.ndarray:
    """`y` (fp32) with the canonical NaN for every NaN."""
    nan = y != y
    return np.where(nan, NAN, y.view(np.uint32)).view(np.float32) if nan.any() else y


def flushed(y: np.ndarray) -> np.ndarray:
    """`y` (fp32) with zeros of the same sign for subnormal numbers."""
    return np.where(np.abs(y) < LEAST_NORMAL, y.view(np.uint32) & SIGN, y.view(np.uint32)).view(np.float32)


def to_odd(value: np.ndarray, error: np.ndarray) -> np.ndarray:
    """`value` + `error` (fp64), rounded to odd: further rounding to fp32 is then correct in every mode."""
    bits = value.view(np.int64)
    moves = (error != 0) & np.isfinite(value) & (bits & 1 == 0)
    return np.where(moves, bits + np.where((error > 0) == (value > 0), 1, -1), bits).view(np.float64)


def exact_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b (fp64), rounded to odd."""
    total = a + b
    from_b = total - a
    return to_odd(total, (a - (total - from_b)) + (b - from_b))


def beside(y: np.ndarray, above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """`y` as fp64, moved a little down where it is above the exact result, and up where it is below."""
    wide = y.astype(np.float64)
    return np.where(above, np.nextafter(wide, -np.inf), np.where(below, np.nextafter(wide, np.inf), wide))


def exact_quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    y = a / b
    remainder = (y.astype(np.float64) * b - a) * np.where(np.signbit(b), -1.0, 1.0)
    return beside(y, remainder > 0, remainder < 0)


def exact_root(a: np.ndarray) -> np.ndarray:
    y = np.sqrt(a)
    square = y.astype(np.float64) * y
    return beside(y, square > a, square < a)


def rounded(exact: np.ndarray, mode: str, dtype: type = np.float32) -> np.ndarray:
    """`exact` (fp64, rounded to odd) as `dtype`. Modes: rn to nearest even, rz to zero, rm down, rp up."""
    y = exact.astype(dtype)
    back = y.astype(np.float64)
    if mode == "rz":
        return np.where(np.abs(back) > np.abs(exact), np.nextafter(y, dtype(0)), y)
    if mode == "rm":
        return np.where(back > exact, np.nextafter(y, dtype(-np.inf)), y)
    if mode == "rp":
        return np.where(back < exact, np.nextafter(y, dtype(np.inf)), y)
    return y


def wide(*operands: np.ndarray) -> Iterator[np.ndarray]:
    return (x.astype(np.float64) for x in operands)


def signed_zero(total: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Rounded down, a sum of opposite values is -0."""
    return np.where((total == 0) & (np.signbit(a) != np.signbit(b)), -0.0, total)


def sum_to_round(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    a, b = wide(a, b)
    total = exact_sum(a, b)
    return signed_zero(total, a, b) if mode == "rm" else total


def fma_to_round(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: str) -> np.ndarray:
    a, b, c = wide(a, b, c)
    return sum_to_round(a * b, c, mode)  # the product of two fp32 is exact in fp64


# By name: the operation in fp32, which rounds to nearest even, and the exact result for the other modes.
FLOAT = {
    "add": (np.add, sum_to_round),
    "sub": (np.subtract, lambda a, b, mode: sum_to_round(a, -b, mode)),
    "mul": (np.multiply, lambda a, b, mode: operator.mul(*wide(a, b))),
    "div": (np.divide, lambda a, b, mode: exact_quotient(a, b)),
    "fma": (lambda a, b, c: fma_to_round(a, b, c, "rn").astype(np.float32), fma_to_round),
    "sqrt": (np.sqrt, lambda a, mode: exact_root(a)),
    "rcp": (lambda a: np.float32(1) / a, lambda a, mode: exact_quotient(np.ones(1, np.float32), a)),
}
NUM_SOURCES = {"fma": 3, "mad": 3, "sqrt": 1, "rcp": 1}


def float_operation(name: str, modifiers: Modifiers, kind: str) -> Operation:
    """Arithmetic with a rounding mode. Without one the ISA lets the assembler fuse operations."""
    require(kind, "f32")
    mode = modifiers.one("rn", "rz", "rm", "rp")
    to_nearest, exact = FLOAT["fma" if name == "mad" else name]
    flush, saturate = modifiers.has("ftz"), name in ("add", "sub", "mul", "fma", "mad") and modifiers.has("sat")

    def compute(*operands):
        if flush:
            operands = [flushed(x) for x in operands]
        y = to_nearest(*operands) if mode == "rn" else rounded(exact(*operands, mode=mode), mode)
        if flush:
            y = flushed(y)
        return np.where(y > 0, np.minimum(y, np.float32(1)), np.float32(0)) if saturate else canonical(y)

    return same("f32", NUM_SOURCES.get(name, 2), compute)


def float_min_max(name: str, modifiers: Modifiers) -> Operation:
    """-0 is less than +0. A NaN loses, or with .NaN wins; it is then the canonical one."""
    flush, nan_wins = modifiers.has("ftz"), modifiers.has("NaN")
    function = {("min", False): np.fmin, ("max", False): np.fmax, ("min", True): np.minimum, ("max", True): np.maximum}
    choose = function[name, nan_wins]
    of_zeros = {"min": np.bitwise_or, "max": np.bitwise_and}[name]

    def two(a, b):
        zeros = (a == 0) & (b == 0)
        bits = of_zeros(a.view(np.uint32), b.view(np.uint32))
        return canonical(np.where(zeros, bits, choose(a, b).view(np.uint32)).view(np.float32))

    return same("f32", 2, lambda *x: reduce(two, map(flushed, x) if flush else x))


def with_sign_of(name: str, modifiers: Modifiers, kind: str) -> Operation:
    require(kind, "f32")
    return same(kind, 2, lambda a, b: ((a.view(np.uint32) & SIGN) | (b.view(np.uint32) & ~SIGN)).view(np.float32))


# ---- Data Movement and Conversion Instructions: cvt

TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def conversion(name: str, modifiers: Modifiers, source: str) -> Operation:
    if modifiers.has("f16x2"):
        return packed_conversion(modifiers, "f16", source, "f16x2")
    if modifiers.has("bf16x2"):
        return packed_conversion(modifiers, "bf16", source, "bf16x2")
    result = modifiers.one(*(kind for kind in DTYPES if kind[0] in "usf" or kind == "bf16"))
    require(source, *(kind for kind in DTYPES if kind[0] in "usf" or kind == "bf16"))
    floats = ("f32", "f16", "bf16")
    if source not in floats and result not in floats:
        convert = between_integers(result, modifiers.has("sat"))
    elif source not in floats:
        convert = from_integer(result, modifiers.one("rn", "rz", "rm", "rp"), nbits_of(source))
    elif result not in floats:
        mode, _ = TO_INTEGER[modifiers.one(*TO_INTEGER)], modifiers.has("sat")  # saturates in any case
        flush = source == "f32" and modifiers.has("ftz")

        def convert(x):
            return float_to_integer(mode(to_fp32(x, source, flush).astype(np.float64)), result)

    else:
        convert = between_floats(result, source, modifiers)
    return Operation((source,), result, convert, any_width=True)


def between_integers(result: str, saturates: bool) -> Function:
    dtype = DTYPES[result]
    limits = np.iinfo(dtype)

    def convert(x):
        if saturates:
            low, high = (
                min(max(limit, np.iinfo(x.dtype).min), np.iinfo(x.dtype).max) for limit in (limits.min, limits.max)
            )
            x = np.clip(x, x.dtype.type(low), x.dtype.type(high))
        return x.astype(dtype)

    return convert


def from_integer(result: str, mode: str, nbits: int) -> Function:
    require(result, "f32", "f16")
    if mode != "rn" and nbits == 64:
        raise Unsupported(f".{mode} of 64-bit integers")
    dtype = DTYPES[result].type
    return (lambda x: x.astype(dtype)) if mode == "rn" else (lambda x: rounded(x.astype(np.float64), mode, dtype))


def to_fp32(x: np.ndarray, source: str, flush: bool) -> np.ndarray:
    if source == "bf16":
        x = (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    elif source == "f16":
        x = x.astype(np.float32)
    return flushed(x) if flush else x


def float_to_integer(whole: np.ndarray, result: str) -> np.ndarray:
    """`whole` (fp64, whole numbers) limited to the type's range. A NaN gives 0, or in 64 bits the highest bit alone."""
    dtype = DTYPES[result]
    limits, nbits = np.iinfo(dtype), nbits_of(result)
    fits = (whole >= limits.min) & (whole < 2.0 ** (nbits - (dtype.kind == "i")))
    inside = np.where(fits, whole, 0.0).astype(dtype)
    of_nan = np.array([0 if nbits < 64 else limits.min or 1 << 63], dtype)
    outside = np.where(whole != whole, of_nan, np.where(whole > 0, dtype.type(limits.max), dtype.type(limits.min)))
    return np.where(fits, inside, outside)


def between_floats(result: str, source: str, modifiers: Modifiers) -> Function:
    flush = "f32" in (source, result) and modifiers.has("ftz")
    if nbits_of(result) < nbits_of(source):
        narrow = narrower(result, modifiers.one("rn", "rz", *(("rm", "rp") if result == "f16" else ())))
        return lambda x: narrow(flushed(x) if flush else x)
    require(result, "f32")
    whole = next((function for mode, function in TO_INTEGER.items() if modifiers.has(mode)), lambda x: x)
    saturate = modifiers.has("sat")

    def convert(x):
        y = whole(to_fp32(x, source, flush))
        return np.where(y > 0, np.minimum(y, np.float32(1)), np.float32(0)) if saturate else canonical(y)

    return convert


def narrower(result: str, mode: str) -> Function:
    """A function that rounds fp32 to fp16, or to the bits of bf16. A NaN becomes 0x7fff."""

    def to_fp16(x):
        y = x.astype(np.float16) if mode == "rn" else rounded(x.astype(np.float64), mode, np.float16)
        return np.where(x != x, HALF_NAN, y.view(np.uint16)).view(np.float16)

    def to_bf16(x):
        bits = x.view(np.uint32)
        if mode == "rn":
            bits = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
        return np.where(x != x, HALF_NAN, (bits >> np.uint32(16)).astype(np.uint16))

    return to_fp16 if result == "f16" else to_bf16


def packed_conversion(modifiers: Modifiers, half: str, source: str, result: str) -> Operation:
    require(source, "f32")
    narrow = narrower(half, modifiers.one("rn", "rz"))

    def compute(high, low):
        high, low = (narrow(x).view(np.uint16).astype(np.uint32) for x in (high, low))
        return high << np.uint32(16) | low

    return Operation((source, source), result, compute)
