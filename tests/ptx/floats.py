"""fp32 arithmetic and conversions: PTX ISA, sections "Floating Point Instructions" and "Data Movement and Conversion
Instructions: cvt".

fp32 arithmetic rounds to nearest even and gives the canonical NaN. Other rounding, flushing of subnormal numbers and
fused operations are refused, because the kernels must not have them. So are approximate instructions, whose bits the
ISA leaves open.
"""

import numpy as np

from .operation import DTYPES, Modifiers, Operation, require, same

NAN, HALF_NAN = np.uint32(0x7FFFFFFF), np.uint16(0x7FFF)
SIGN, HALF = np.uint32(0x80000000), np.uint32(16)


# ---- Floating Point Instructions: fp32


def canonical(y: np.ndarray) -> np.ndarray:
    """`y` (fp32) with the canonical NaN for every NaN."""
    nan = y != y
    return np.where(nan, NAN, y.view(np.uint32)).view(np.float32) if nan.any() else y


FLOAT = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


def float_operation(name: str, modifiers: Modifiers, kind: str) -> Operation:
    """Arithmetic that rounds to nearest. Without .rn the ISA lets the assembler fuse operations."""
    require(kind, "f32")
    modifiers.one("rn")
    return same("f32", 2, lambda a, b: canonical(FLOAT[name](a, b)))


def float_min_max(name: str) -> Operation:
    """-0 is less than +0. A NaN loses; if both are NaN, the canonical one wins."""
    choose = {"min": np.fmin, "max": np.fmax}[name]
    of_zeros = {"min": np.bitwise_or, "max": np.bitwise_and}[name]

    def compute(a, b):
        zeros = (a == 0) & (b == 0)
        bits = of_zeros(a.view(np.uint32), b.view(np.uint32))
        return canonical(np.where(zeros, bits, choose(a, b).view(np.uint32)).view(np.float32))

    return same("f32", 2, compute)


# ---- Data Movement and Conversion Instructions: cvt


def conversion(name: str, modifiers: Modifiers, source: str) -> Operation:
    """Between integers, to and from fp32, and of pairs of e4m3. Whatever else kernels round, they round in integers."""
    if source == "e4m3x2":
        modifiers.one("rn")
        modifiers.one("f16x2")
        return Operation(("b16",), "b32", from_e4m3)
    if modifiers.has("e4m3x2"):
        require(source, "f32")
        modifiers.one("rn")
        modifiers.one("satfinite")
        return Operation((source, source), "b16", lambda high, low: to_e4m3(high) << np.uint16(8) | to_e4m3(low))
    if modifiers.has("f16x2"):
        require(source, "f32")
        modifiers.one("rn")
        return Operation((source, source), "b32", lambda high, low: to_fp16(high, np.uint32) << HALF | to_fp16(low))
    result = modifiers.one(*(kind for kind in DTYPES if kind[0] in "usf"))
    if "f" not in result + source:
        return Operation((source,), result, lambda x: x.astype(DTYPES[result]), any_width=True)
    if source == "f16":
        require(result, "f32")
        return Operation((source,), result, lambda x: canonical(x.astype(np.float32)))
    modifiers.one("rn")
    if source == "f32":
        require(result, "f16")
        return Operation((source,), result, lambda x: to_fp16(x).view(np.float16))
    require(result, "f32")
    return Operation((source,), result, lambda x: x.astype(np.float32), any_width=True)


def to_fp16(x: np.ndarray, dtype: type = np.uint16) -> np.ndarray:
    """The bits of fp32 rounded to fp16. A NaN becomes 0x7fff."""
    return np.where(x != x, HALF_NAN, x.astype(np.float16).view(np.uint16)).astype(dtype)


E4M3 = np.array([(n & 7) / 512 if n < 8 else (8 + n % 8) * 2.0 ** (n // 8 - 10) for n in range(127)], np.float32)
"""The values of codes from 0 on. The next code is NaN, and those from 128 on have the other sign."""

E4M3_AS_FP16 = np.append(E4M3.astype(np.float16).view(np.uint16), HALF_NAN)
E4M3_AS_FP16 = np.append(E4M3_AS_FP16, E4M3_AS_FP16 | np.uint16(0x8000))
E4M3_AS_FP16[255] = HALF_NAN


def from_e4m3(pairs: np.ndarray) -> np.ndarray:
    """The bits of two fp16, of the codes in uint16."""
    return E4M3_AS_FP16[pairs >> 8].astype(np.uint32) << HALF | E4M3_AS_FP16[pairs & 0xFF]


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """The code, as uint16, of fp32 rounded to nearest even; beyond ±448 that of ±448. A NaN becomes 0x7f."""
    magnitude = np.minimum(np.abs(x), E4M3[-1])
    above = np.minimum(np.searchsorted(E4M3, magnitude), 126)
    below = np.maximum(above - 1, 0)
    middle = (E4M3[below] + E4M3[above]) / np.float32(2)
    code = np.where((magnitude > middle) | ((magnitude == middle) & (above % 2 == 0)), above, below)
    return np.where(x != x, 0x7F, code | np.signbit(x) << 7).astype(np.uint16)
