"""What instructions compute: PTX ISA, chapter "Instruction Set". Integers, bits and comparisons are here, fp32
arithmetic and conversions in floats.py."""

import functools
import operator

import numpy as np

from .floats import SIGN, conversion, float_min_max, float_operation
from .operation import DTYPES, INTEGERS, Function, Modifiers, Operation, Unsupported, nbits_of, require, same


@functools.cache
def operation(opcode: tuple[str, ...]) -> Operation:
    """The operation of an opcode, split at its dots. Raises Unsupported if it or one of its modifiers is not known."""
    name, *middle = opcode
    if name not in BUILDERS or not middle:
        raise Unsupported("unknown instruction")
    modifiers, kind = Modifiers(middle[:-1]), middle[-1]
    if kind not in DTYPES:
        raise Unsupported(f"unknown type .{kind}")
    result = BUILDERS[name](name, modifiers, kind)
    modifiers.check()
    return result


# ---- Integer Arithmetic Instructions


def sum_or_difference(name: str, modifiers: Modifiers, kind: str) -> Operation:
    function = {"add": np.add, "sub": np.subtract}[name]
    if kind == "f32":
        return float_operation(name, modifiers, kind)
    require(kind, *INTEGERS)
    return same(kind, 2, function)


def product(name: str, modifiers: Modifiers, kind: str) -> Operation:
    """mul and mad: of the product of twice the width the whole (.wide), the low or the high half."""
    if kind == "f32" and name == "mul":
        return float_operation(name, modifiers, kind)
    part = modifiers.one("lo", "hi", "wide")
    require(kind, *(INTEGERS if part == "lo" else INTEGERS[:2] + INTEGERS[3:5]))
    plus = (lambda x, c: x + c) if name == "mad" else (lambda x: x)
    num_added = int(name == "mad")
    if part == "lo":
        return same(kind, 2 + num_added, lambda a, b, *c: plus(a * b, *c))
    wide = f"{kind[0]}{2 * nbits_of(kind)}"
    dtype, nbits = DTYPES[wide], DTYPES[wide].type(nbits_of(kind))
    if part == "hi":

        def high(a, b, *c):
            return plus((np.multiply(a, b, dtype=dtype) >> nbits).astype(DTYPES[kind]), *c)

        return same(kind, 2 + num_added, high)
    return Operation(
        (kind, kind) + (wide,) * num_added, wide, lambda a, b, *c: plus(np.multiply(a, b, dtype=dtype), *c)
    )


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
        return float_min_max(name, modifiers)
    function = {"min": np.minimum, "max": np.maximum}[name]
    require(kind, *INTEGERS)
    return same(kind, 2, function)


def sign_operation(name: str, modifiers: Modifiers, kind: str) -> Operation:
    """neg and abs. For fp32 they change the sign bit alone, which the ISA allows for NaN."""
    if kind == "f32":
        function = {"neg": lambda x: x ^ SIGN, "abs": lambda x: x & ~SIGN}[name]
        return same(kind, 1, lambda a: function(a.view(np.uint32)).view(np.float32))
    require(kind, *INTEGERS[3:])
    return same(kind, 1, {"neg": np.negative, "abs": np.abs}[name])


def count_of_bits(name: str, modifiers: Modifiers, kind: str) -> Operation:
    """popc, clz and bfind: a u32."""
    nbits = nbits_of(kind)
    require(kind, *(("b32", "b64") if name != "bfind" else INTEGERS[1:3] + INTEGERS[4:]))
    unsigned, none = DTYPES[f"u{nbits}"], np.uint32(0xFFFFFFFF)
    amount = name == "bfind" and modifiers.has("shiftamt")

    def length(a):
        """Bits up to the highest one that is set."""
        spread = a
        for step in (1, 2, 4, 8, 16, 32)[: nbits.bit_length() - 1]:
            spread = spread | (spread >> unsigned.type(step))
        return np.bitwise_count(spread).astype(np.uint32)

    def compute(a):
        if name == "popc":
            return np.bitwise_count(a).astype(np.uint32)
        found = length(np.where(a < 0, ~a, a).view(unsigned))
        if name == "clz" or amount:
            left = np.uint32(nbits) - found
            return left if name == "clz" else np.where(found == 0, none, left)
        return found - np.uint32(1)

    return Operation((kind,), "u32", compute)


def reversed_bits(name: str, modifiers: Modifiers, kind: str) -> Operation:
    require(kind, "b32", "b64")
    dtype = DTYPES[kind]

    def compute(a):
        in_bytes = np.ascontiguousarray(a).view(np.uint8).reshape(-1, dtype.itemsize)
        bits = np.unpackbits(in_bytes, axis=1)[:, ::-1]  # the highest bit of the last byte becomes the first
        return np.packbits(bits, axis=1).reshape(-1).view(dtype)

    return same(kind, 1, compute)


def extracted_field(name: str, modifiers: Modifiers, kind: str) -> Operation:
    require(kind, *INTEGERS[1:3], *INTEGERS[4:])
    nbits, dtype = nbits_of(kind), DTYPES[kind]

    def compute(a, begin, numel):
        begin, numel = begin & np.uint32(0xFF), np.minimum(numel & np.uint32(0xFF), np.uint32(nbits))
        # Shifting first left, then right, fills from the field's highest bit, or from the number's if it ends first.
        left = np.clip(np.int64(nbits) - begin - numel, 0, nbits - 1).astype(dtype)
        field = shifted_right(a << left, np.maximum(np.uint32(nbits) - numel, begin), kind)
        return np.where(numel == 0, dtype.type(0), field)

    return Operation((kind, "u32", "u32"), kind, compute)


# ---- Logic and Shift Instructions


def bitwise(name: str, modifiers: Modifiers, kind: str) -> Operation:
    require(kind, "pred", "b16", "b32", "b64")
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}[name]
    return same(kind, 1 if name == "not" else 2, function)


def by_table(name: str, modifiers: Modifiers, kind: str) -> Operation:
    """lop3: bit i of the table, an immediate, is the result for operand bits whose number is i."""
    require(kind, "b32")

    def compute(a, b, c, table):
        result = np.zeros(1, np.uint32)
        for row in range(8):
            if int(table[0]) >> row & 1:
                result = result | ((a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c))
        return result

    return same("b32", 4, compute)


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
    left, clamp = modifiers.one("l", "r") == "l", modifiers.one("clamp", "wrap") == "clamp"

    def compute(low, high, amount):
        amount = np.minimum(amount, np.uint32(32)) if clamp else amount & np.uint32(31)
        both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
        result = both << amount.astype(np.uint64) >> np.uint64(32) if left else both >> amount.astype(np.uint64)
        return result.astype(np.uint32)

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
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def unordered(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a != a) | (b != b)


def comparison(modifiers: Modifiers, kind: str) -> Function:
    """The comparison's function of two arrays. A comparison with a NaN is false, and with u, as in ltu, true."""
    name = modifiers.one(*COMPARISONS, *UNSIGNED, *(f"{name}u" for name in COMPARISONS), "num", "nan")
    if kind == "f32":
        if name in ("num", "nan"):
            return unordered if name == "nan" else lambda a, b: ~unordered(a, b)
        compare = COMPARISONS[name.rstrip("u")]
        if name[-1] == "u":
            return lambda a, b: compare(a, b) | unordered(a, b)
        return lambda a, b: compare(a, b) & ~unordered(a, b)
    if name in UNSIGNED and kind[0] == "u":
        name = UNSIGNED[name]
    if name not in (COMPARISONS if kind[0] in "us" else ("eq", "ne")):
        raise Unsupported(f".{name} of .{kind}")
    return COMPARISONS[name]


def combination(modifiers: Modifiers) -> Function | None:
    """The Boolean operation with another predicate, or None."""
    functions = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    return next((function for name, function in functions.items() if modifiers.has(name)), None)


def set_predicate(name: str, modifiers: Modifiers, kind: str) -> Operation:
    compare, combine = comparison(modifiers, kind), combination(modifiers)
    if combine is None:
        return Operation((kind, kind), "pred", compare, lambda a, b: ~compare(a, b))
    return Operation(
        (kind, kind, "pred"),
        "pred",
        lambda a, b, c: combine(compare(a, b), c),
        lambda a, b, c: combine(~compare(a, b), c),
    )


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
    **dict.fromkeys(("popc", "clz", "bfind"), count_of_bits),
    **dict.fromkeys(("and", "or", "xor", "not"), bitwise),
    **dict.fromkeys(("shl", "shr"), shift),
    **dict.fromkeys(("sqrt", "rcp"), float_operation),
    "selp": selection,
    "brev": reversed_bits,
    "bfe": extracted_field,
    "lop3": by_table,
    "shf": funnel_shift,
    "setp": set_predicate,
    "prmt": permuted,
    "cvt": conversion,
}
