"""fp32 arithmetic and conversions: PTX ISA, sections "Floating Point Instructions" and "Data Movement and Conversion
Instructions: cvt".

fp32 arithmetic rounds to nearest even and gives the canonical NaN. Other rounding, flushing of subnormal numbers and
fused operations are refused, because the kernels must not have them. So are approximate instructions, whose bits the
ISA leaves open.
"""

from functools import reduce

import numpy as np

from .operation import DTYPES, Function, Modifiers, Operation, nbits_of, require, same

NAN, HALF_NAN = np.uint32(0x7FFFFFFF), np.uint16(0x7FFF)
SIGN = np.uint32(0x80000000)


# ---- Floating Point Instructions: fp32


def canonical(y: np.ndarray) -> np.ndarray:
    """`y` (fp32) with the canonical NaN for every NaN."""
    nan = y != y
    return np.where(nan, NAN, y.view(np.uint32)).view(np.float32) if nan.any() else y


FLOAT = {
    **{"add": (2, np.add), "sub": (2, np.subtract), "mul": (2, np.multiply), "div": (2, np.divide)},
    **{"sqrt": (1, np.sqrt), "rcp": (1, lambda a: np.float32(1) / a)},
}
"""By name: the number of operands, and the operation."""


def float_operation(name: str, modifiers: Modifiers, kind: str) -> Operation:
    """Arithmetic that rounds to nearest. Without .rn the ISA lets the assembler fuse operations."""
    require(kind, "f32")
    modifiers.one("rn")
    numel, function = FLOAT[name]
    return same("f32", numel, lambda *operands: canonical(function(*operands)))


def float_min_max(name: str, modifiers: Modifiers) -> Operation:
    """-0 is less than +0. A NaN loses, or with .NaN wins; it is then the canonical one."""
    nan_wins = modifiers.has("NaN")
    function = {("min", False): np.fmin, ("max", False): np.fmax, ("min", True): np.minimum, ("max", True): np.maximum}
    choose = function[name, nan_wins]
    of_zeros = {"min": np.bitwise_or, "max": np.bitwise_and}[name]

    def two(a, b):
        zeros = (a == 0) & (b == 0)
        bits = of_zeros(a.view(np.uint32), b.view(np.uint32))
        return canonical(np.where(zeros, bits, choose(a, b).view(np.uint32)).view(np.float32))

    return same("f32", 2, lambda *x: reduce(two, x))


# ---- Data Movement and Conversion Instructions: cvt

TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def conversion(name: str, modifiers: Modifiers, source: str) -> Operation:
    for half in ("f16", "bf16"):
        if modifiers.has(f"{half}x2"):
            return packed_conversion(modifiers, half, source)
    result = modifiers.one(*(kind for kind in DTYPES if kind[0] in "usf" or kind == "bf16"))
    require(source, *(kind for kind in DTYPES if kind[0] in "usf" or kind == "bf16"))
    floats = ("f32", "f16", "bf16")
    if source not in floats and result not in floats:
        convert = between_integers(result, modifiers.has("sat"))
    elif source not in floats:
        modifiers.one("rn")
        require(result, "f32", "f16")
        dtype = DTYPES[result].type

        def convert(x):
            return x.astype(dtype)

    elif result not in floats:
        mode, _ = TO_INTEGER[modifiers.one(*TO_INTEGER)], modifiers.has("sat")  # saturates in any case

        def convert(x):
            return float_to_integer(mode(to_fp32(x, source).astype(np.float64)), result)

    elif nbits_of(result) < nbits_of(source):
        modifiers.one("rn")
        convert = narrower(result)
    else:
        require(result, "f32")

        def convert(x):
            return canonical(to_fp32(x, source))

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


def to_fp32(x: np.ndarray, source: str) -> np.ndarray:
    if source == "bf16":
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x.astype(np.float32)


def float_to_integer(whole: np.ndarray, result: str) -> np.ndarray:
    """`whole` (fp64, whole numbers) limited to the type's range. A NaN gives 0, or in 64 bits the highest bit alone."""
    dtype = DTYPES[result]
    limits, nbits = np.iinfo(dtype), nbits_of(result)
    fits = (whole >= limits.min) & (whole < 2.0 ** (nbits - (dtype.kind == "i")))
    inside = np.where(fits, whole, 0.0).astype(dtype)
    of_nan = np.array([0 if nbits < 64 else limits.min or 1 << 63], dtype)
    outside = np.where(whole != whole, of_nan, np.where(whole > 0, dtype.type(limits.max), dtype.type(limits.min)))
    return np.where(fits, inside, outside)


def narrower(result: str) -> Function:
    """A function that rounds fp32 to fp16, or to the bits of bf16. A NaN becomes 0x7fff."""

    def to_fp16(x):
        return np.where(x != x, HALF_NAN, x.astype(np.float16).view(np.uint16)).view(np.float16)

    def to_bf16(x):
        bits = x.view(np.uint32)
        bits = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
        return np.where(x != x, HALF_NAN, (bits >> np.uint32(16)).astype(np.uint16))

    return to_fp16 if result == "f16" else to_bf16


def packed_conversion(modifiers: Modifiers, half: str, source: str) -> Operation:
    require(source, "f32")
    modifiers.one("rn")
    narrow = narrower(half)

    def compute(high, low):
        high, low = (narrow(x).view(np.uint16).astype(np.uint32) for x in (high, low))
        return high << np.uint32(16) | low

    return Operation((source, source), f"{half}x2", compute)
