"""What instructions compute: PTX ISA, chapter "Instruction Set". Integers, bits and comparisons are here, fp32
arithmetic and conversions in floats.py."""

import functools
import operator

import numpy as np

from .floats import SIGN, conversion, float_min_max, float_operation
from .operation import DTYPES, INTEGERS, Modifiers, Operation, Unsupported, nbits_of, require, same


@functools.cache
def operation(opcode: tuple[str, ...]) -> Operation:
    """The operation of an opcode, split at its dots. Raises Unsupported if it or one of its modifiers is not known."""
    name, *middle = opcode
    if name not in BUILDERS or not middle:
        raise Unsupported("unknown instruction")
    modifiers, kind = Modifiers(middle[:-1]), middle[-1]
    if kind not in DTYPES and kind not in ("s16x2", "e4m3x2"):
        raise Unsupported(f"unknown type .{kind}")
    result = BUILDERS[name](name, modifiers, kind)
    modifiers.check()
    return result


# ---- Integer Arithmetic Instructions


def sum_or_difference(name: str, modifiers: Modifiers, kind: str) -> Operation:
    function = {"add": np.add, "sub": np.subtract}[name]
    if kind == "f32":
        return float_operation(name, modifiers, kind)
    if (name, kind) == ("add", "s16x2"):  # two numbers in a register
        high, low = np.uint32(0xFFFF0000), np.uint32(0xFFFF)
        return same("b32", 2, lambda a, b: ((a & high) + (b & high)) | ((a + b) & low))
    require(kind, *INTEGERS)
    return same(kind, 2, function)


def product(name: str, modifiers: Modifiers, kind: str) -> Operation:
    """mul and mad: of the product of twice the width the whole (.wide) or the low half."""
    if kind == "f32" and name == "mul":
        return float_operation(name, modifiers, kind)
    part, num_added = modifiers.one("lo", "wide"), int(name == "mad")
    require(kind, *(INTEGERS if part == "lo" else INTEGERS[:2] + INTEGERS[3:5]))
    result = kind if part == "lo" else f"{kind[0]}{2 * nbits_of(kind)}"

    def compute(a, b, *c):
        product = np.multiply(a, b, dtype=DTYPES[result])
        return product + c[0] if c else product

    return Operation((kind, kind) + (result,) * num_added, result, compute)


def quotient(name: str, modifiers: Modifiers, kind: str) -> Operation:
    """div and rem round toward zero. What a zero divisor gives is left open: here all bits are set."""
    if kind == "f32" and name == "div":
        return float_operation(name, modifiers, kind)
    require(kind, *INTEGERS)

    def compute(a, b):
        zero = b == 0
        divisor = np.where(zero, b.dtype.type(1), b)
        rest = np.fmod(a, divisor)
        result = rest if name == "rem" else (a - rest) // divisor
        return np.where(zero, np.zeros(1, b.dtype) - b.dtype.type(1), result)

    return same(kind, 2, compute)


def least_or_greatest(name: str, modifiers: Modifiers, kind: str) -> Operation:
    if kind == "f32":
        return float_min_max(name)
    function = {"min": np.minimum, "max": np.maximum}[name]
    require(kind, *INTEGERS)
    return same(kind, 2, function)


def sign_operation(name: str, modifiers: Modifiers, kind: str) -> Operation:
    """neg and abs of fp32 change the sign bit alone, which the ISA allows for NaN."""
    require(kind, "f32")
    function = {"neg": lambda x: x ^ SIGN, "abs": lambda x: x & ~SIGN}[name]
    return same(kind, 1, lambda a: function(a.view(np.uint32)).view(np.float32))


def count_of_bits(name: str, modifiers: Modifiers, kind: str) -> Operation:
    require(kind, "b32", "b64")
    return Operation((kind,), "u32", lambda a: np.bitwise_count(a).astype(np.uint32))


def extracted_field(name: str, modifiers: Modifiers, kind: str) -> Operation:
    require(kind, "u32", "u64")
    one = DTYPES[kind].type(1)

    def compute(a, begin, numel):
        begin, numel = begin & np.uint32(0xFF), numel & np.uint32(0xFF)
        return shifted_right(a, begin, kind) & (shifted_left(one, numel, kind) - one)

    return Operation((kind, "u32", "u32"), kind, compute)


# ---- Logic and Shift Instructions


def bitwise(name: str, modifiers: Modifiers, kind: str) -> Operation:
    require(kind, "pred", "b16", "b32", "b64")
    return same(kind, 2, {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[name])


def shifted_left(a: np.ndarray, amount: np.ndarray, kind: str) -> np.ndarray:
    nbits = nbits_of(kind)
    if amount.size == 1 and amount[0] < nbits:
        return a << amount.astype(a.dtype)
    return np.where(amount < nbits, a << np.minimum(amount, nbits - 1).astype(a.dtype), a.dtype.type(0))


def shifted_right(a: np.ndarray, amount: np.ndarray, kind: str) -> np.ndarray:
    """Fills with the sign of signed types, else with zeros, also for amounts beyond the width."""
    nbits = nbits_of(kind)
    if amount.size == 1 and amount[0] < nbits:
        return a >> amount.astype(a.dtype)
    result = a >> np.minimum(amount, nbits - 1).astype(a.dtype)
    return result if kind[0] == "s" else np.where(amount < nbits, result, a.dtype.type(0))


def shift(name: str, modifiers: Modifiers, kind: str) -> Operation:
    require(kind, "b16", "b32", "b64", *(INTEGERS if name == "shr" else ()))
    function = {"shl": shifted_left, "shr": shifted_right}[name]
    return Operation((kind, "u32"), kind, lambda a, amount: function(a, amount, kind))


def funnel_shift(name: str, modifiers: Modifiers, kind: str) -> Operation:
    require(kind, "b32")
    modifiers.one("l")
    modifiers.one("wrap")

    def compute(low, high, amount):
        both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
        return (both << (amount & np.uint32(31)).astype(np.uint64) >> np.uint64(32)).astype(np.uint32)

    return Operation(("b32", "b32", "u32"), "b32", compute)


# ---- Comparison and Selection Instructions

COMPARISONS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


def unordered(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a != a) | (b != b)


def set_predicate(name: str, modifiers: Modifiers, kind: str) -> Operation:
    """setp. A comparison with a NaN is false."""
    if kind == "f32" and modifiers.has("nan"):
        return Operation((kind, kind), "pred", unordered)
    if kind == "f32" and modifiers.has("num"):
        return Operation((kind, kind), "pred", lambda a, b: ~unordered(a, b))
    if kind == "f32" or kind[0] in "us":
        compare = COMPARISONS[modifiers.one(*COMPARISONS)]
    else:
        compare = COMPARISONS[modifiers.one("eq", "ne")]
    if kind == "f32":
        return Operation((kind, kind), "pred", lambda a, b: compare(a, b) & ~unordered(a, b))
    return Operation((kind, kind), "pred", compare)


def selection(name: str, modifiers: Modifiers, kind: str) -> Operation:
    return Operation((kind, kind, "pred"), kind, lambda a, b, c: np.where(c, a, b))


# ---- Data Movement and Conversion Instructions: prmt and cvt


def permuted(name: str, modifiers: Modifiers, kind: str) -> Operation:
    """prmt in its general form: four bytes of eight, each as it is, or filled with its sign."""
    require(kind, "b32")

    def compute(a, b, selectors):
        both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
        result = np.zeros(1, np.uint32)
        for place in range(4):
            selector = selectors >> np.uint32(4 * place)
            byte = (both >> ((selector & np.uint32(7)).astype(np.uint64) * np.uint64(8))).astype(np.uint8)
            if (selector & np.uint32(8)).any():
                byte = np.where(selector & np.uint32(8), (byte.view(np.int8) >> 7).view(np.uint8), byte)
            result = result | byte.astype(np.uint32) << np.uint32(8 * place)
        return result

    return same("b32", 3, compute)


BUILDERS = {
    **dict.fromkeys(("add", "sub"), sum_or_difference),
    **dict.fromkeys(("mul", "mad"), product),
    **dict.fromkeys(("div", "rem"), quotient),
    **dict.fromkeys(("min", "max"), least_or_greatest),
    **dict.fromkeys(("neg", "abs"), sign_operation),
    **dict.fromkeys(("and", "or", "xor"), bitwise),
    **dict.fromkeys(("shl", "shr"), shift),
    "popc": count_of_bits,
    "selp": selection,
    "bfe": extracted_field,
    "shf": funnel_shift,
    "setp": set_predicate,
    "prmt": permuted,
    "cvt": conversion,
}
