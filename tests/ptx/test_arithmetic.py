"""Each operation, with values worked out from the ISA's text, and against numpy and torch."""

import numpy as np
import pytest
import torch

from .arithmetic import operation
from .operation import DTYPES, Unsupported
from .small import ADDRESS, FIRST_LINE, aligned, run, text

pytestmark = [pytest.mark.check, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

NAN, OTHER_NAN, INF, MINUS_INF, MINUS_ZERO = 0x7FFFFFFF, 0xFFC12345, 0x7F800000, 0xFF800000, 0x80000000
ONE, TWO, LEAST, LEAST_NORMAL, GREATEST = 0x3F800000, 0x40000000, 1, 0x00800000, 0x7F7FFFFF


def bits_of(values, kind):
    """An array of a type from bits, one number or several."""
    dtype = DTYPES[kind]
    if dtype.kind == "b":
        return np.atleast_1d(np.array(values, bool))
    numbers = [int(value) % (1 << 8 * dtype.itemsize) for value in np.atleast_1d(np.array(values, object))]
    return np.array(numbers, f"u{dtype.itemsize}").view(dtype)


def compute(opcode, *operands):
    """The bits of what an operation gives for operands given as bits, one number each, or arrays."""
    op = operation(tuple(opcode.split(".")))
    operands = [
        x if isinstance(x, np.ndarray) else bits_of(x, kind) for x, kind in zip(operands, op.sources, strict=True)
    ]
    result = np.ascontiguousarray(op.compute(*operands))
    assert result.dtype == DTYPES[op.result], result.dtype
    return result if result.dtype == bool else result.view(f"u{result.itemsize}")


INTEGERS = [
    ("add.s32", (0x7FFFFFFF, 1), 0x80000000),
    ("add.u16", (0xFFFF, 2), 1),
    ("sub.s64", (0, 1), 2**64 - 1),
    ("mul.lo.s32", (0x10000, 0x10000), 0),
    ("mul.hi.u32", (0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFE),
    ("mul.hi.s32", (0xFFFFFFFF, 0xFFFFFFFF), 0),
    ("mul.wide.s32", (0xFFFFFFFF, 2), 2**64 - 2),
    ("mul.wide.u32", (0xFFFFFFFF, 2), 0x1FFFFFFFE),
    ("mul.wide.u16", (0xFFFF, 0xFFFF), 0xFFFE0001),
    ("mad.lo.s32", (3, 5, 0xFFFFFFF0), 0xFFFFFFFF),
    ("mad.wide.s32", (0xFFFFFFFF, 3, 2), 2**64 - 1),
    ("mad.wide.u32", (0xFFFFFFFF, 3, 2), 0x2FFFFFFFF),
    ("mad.hi.s32", (0x40000000, 4, 7), 8),
    ("div.s32", (-7, 2), -3),
    ("rem.s32", (-7, 2), -1),
    ("div.s32", (7, -2), -3),
    ("rem.s32", (7, -2), 1),
    ("div.s32", (-(2**31), -1), -(2**31)),
    ("div.u32", (0xFFFFFFFF, 2), 0x7FFFFFFF),
    ("div.s64", (-(2**62) - 1, 3), -1537228672809129301),
    ("div.u32", (5, 0), 0xFFFFFFFF),
    ("rem.u64", (2**63 + 5, 2**63), 5),
    ("min.s32", (-1, 1), -1),
    ("min.u32", (0xFFFFFFFF, 1), 1),
    ("max.s64", (-1, 1), 1),
    ("abs.s32", (-5,), 5),
    ("abs.s32", (-(2**31),), -(2**31)),
    ("neg.s16", (0x8000,), 0x8000),
    ("popc.b32", (0xF0F0F0F1,), 17),
    ("popc.b64", (2**64 - 1,), 64),
    ("clz.b32", (0,), 32),
    ("clz.b32", (1,), 31),
    ("clz.b64", (1 << 40,), 23),
    ("bfind.u32", (0,), 0xFFFFFFFF),
    ("bfind.u32", (0x00010000,), 16),
    ("bfind.s32", (0xFFFFFFFF,), 0xFFFFFFFF),
    ("bfind.s32", (0xFFFF0000,), 15),
    ("bfind.shiftamt.u32", (0x00010000,), 15),
    ("bfind.shiftamt.u32", (0,), 0xFFFFFFFF),
    ("bfind.u64", (1 << 63,), 63),
    ("brev.b32", (0x00000003,), 0xC0000000),
    ("brev.b64", (0x1,), 1 << 63),
    ("bfe.u32", (0x12345678, 8, 8), 0x56),
    ("bfe.s32", (0x12348678, 8, 8), 0xFFFFFF86),
    ("bfe.s32", (0x80000000, 28, 8), 0xFFFFFFF8),  # the field ends with the number: its sign fills the rest
    ("bfe.u32", (0x80000000, 28, 8), 8),
    ("bfe.s32", (0x80000000, 40, 4), 0xFFFFFFFF),
    ("bfe.s32", (0xFFFFFFFF, 4, 0), 0),
    ("bfe.u32", (0xFFFFFFFF, 0, 40), 0xFFFFFFFF),
    ("bfe.u32", (0xFFFFFFFF, 0x100, 0x104), 0xF),  # only the low 8 bits of begin and length count
    ("bfe.s64", (1 << 63, 60, 4), 2**64 - 8),
    ("and.b16", (0xFF00, 0x0FF0), 0x0F00),
    ("not.b64", (0,), 2**64 - 1),
    ("xor.pred", (True, True), False),
    ("lop3.b32", (0xF0, 0xCC, 0xAA, 0x80), 0x80),
    ("lop3.b32", (0xF0, 0xCC, 0xAA, 0x1A), ((0xF0 & 0xCC) | 0xAA) ^ 0xF0),
    ("lop3.b32", (0xF0, 0xCC, 0xAA, 0xFE), 0xFE),
    ("shl.b32", (1, 31), 0x80000000),
    ("shl.b32", (1, 32), 0),
    ("shl.b16", (0x0101, 8), 0x0100),
    ("shr.u32", (0x80000000, 31), 1),
    ("shr.u32", (0x80000000, 32), 0),
    ("shr.s32", (0x80000000, 40), 0xFFFFFFFF),
    ("shr.s64", (1 << 63, 63), 2**64 - 1),
    ("shf.l.wrap.b32", (0x80000001, 0x00000002, 33), 0x00000005),
    ("shf.l.clamp.b32", (0x80000001, 0x00000002, 33), 0x80000001),
    ("shf.r.wrap.b32", (0x80000001, 0x00000003, 1), 0xC0000000),
    ("shf.r.clamp.b32", (0x80000001, 0x00000003, 40), 0x00000003),
    ("prmt.b32", (0x03020100, 0x07060504, 0x7531), 0x07050301),
    ("prmt.b32", (0x03028001, 0x07060504, 0x0019), 0x010180FF),
    ("selp.b32", (5, 6, True), 5),
    ("selp.b64", (5, 6, False), 6),
]


@pytest.mark.parametrize(("opcode", "operands", "expected"), INTEGERS, ids=str)
def test_integers_and_bits(opcode, operands, expected):
    result = compute(opcode, *operands)
    assert int(result[0]) == int(expected) % (1 << 8 * result.itemsize)


FLOATS = [
    ("add.rn.f32", (OTHER_NAN, ONE), NAN),
    ("add.rn.f32", (INF, MINUS_INF), NAN),
    ("add.rn.f32", (MINUS_ZERO, MINUS_ZERO), MINUS_ZERO),
    ("add.rn.f32", (ONE, 0xBF800000), 0),
    ("add.rn.f32", (GREATEST, GREATEST), INF),
    ("add.rn.f32", (LEAST, LEAST), 2),
    ("mul.rn.f32", (LEAST, 0x3F000000), 0),
    ("mul.rn.f32", (INF, 0), NAN),
    ("div.rn.f32", (ONE, 0), INF),
    ("div.rn.f32", (ONE, MINUS_ZERO), MINUS_INF),
    ("div.rn.f32", (0, 0), NAN),
    ("div.rn.f32", (ONE, 0x40400000), 0x3EAAAAAB),
    ("rcp.rn.f32", (0x40400000,), 0x3EAAAAAB),
    ("sqrt.rn.f32", (TWO,), 0x3FB504F3),
    ("sqrt.rn.f32", (MINUS_ZERO,), MINUS_ZERO),
    ("sqrt.rn.f32", (0xBF800000,), NAN),
    ("min.f32", (0, MINUS_ZERO), MINUS_ZERO),
    ("max.f32", (MINUS_ZERO, 0), 0),
    ("min.f32", (OTHER_NAN, ONE), ONE),
    ("max.f32", (OTHER_NAN, OTHER_NAN), NAN),
    ("max.NaN.f32", (ONE, OTHER_NAN), NAN),
    ("neg.f32", (OTHER_NAN,), 0x7FC12345),
    ("abs.f32", (MINUS_ZERO,), 0),
]


@pytest.mark.parametrize(("opcode", "operands", "expected"), FLOATS, ids=str)
def test_fp32(opcode, operands, expected):
    assert hex(compute(opcode, *operands)[0]) == hex(expected)


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons_of_fp32(name):
    numbers = np.array([ONE, TWO, 0, MINUS_ZERO, INF, MINUS_INF, OTHER_NAN, NAN], np.uint32).view(np.float32)
    a, b = (np.repeat(numbers, 8), np.tile(numbers, 8))
    unordered = np.isnan(a) | np.isnan(b)
    expected = getattr(np, {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal"}.get(name, "less"))(a, b)
    expected = {"gt": b < a, "ge": b <= a}.get(name, expected)
    assert np.array_equal(compute(f"setp.{name}.f32", a, b), expected & ~unordered)
    assert np.array_equal(compute(f"setp.{name}u.f32", a, b), expected | unordered)
    assert np.array_equal(compute("setp.nan.f32", a, b), unordered)
    assert np.array_equal(compute("setp.num.f32", a, b), ~unordered)


def test_comparisons_of_integers():
    assert compute("setp.lt.s32", -1, 1)[0] and not compute("setp.lt.u32", -1, 1)[0]
    assert compute("setp.hi.u32", -1, 1)[0] and compute("setp.ls.u64", 1, 1)[0] and compute("setp.hs.u16", 1, 1)[0]
    assert compute("setp.ne.b64", 1 << 40, 0)[0]
    assert not compute("setp.lt.and.s32", -1, 1, False)[0] and compute("setp.lt.or.s32", 1, -1, True)[0]
    assert compute("setp.lt.xor.s32", -1, 1, False)[0]
    assert operation(("setp", "lt", "and", "s32")).complement(*bits_of([1, 0], "s32")[:, None], np.array([True]))[0]


# ---- conversions


def random_bits(seed=0):
    """fp32 [2^20 + 65536]: random patterns, and 1.0 with every pattern in the low half."""
    generator = np.random.default_rng(seed)
    patterns = generator.integers(0, 2**32, 2**20, dtype=np.uint32)
    return np.concatenate([patterns, ONE + np.arange(65536, dtype=np.uint32)]).view(np.float32)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_every_16_bit_float_becomes_fp32(kind):
    patterns = np.arange(65536).astype(np.uint16)
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[kind]
    expected = torch.from_numpy(patterns.view(np.int16)).view(dtype).float().numpy()
    result = compute(f"cvt.f32.{kind}", patterns.view(DTYPES[kind]))
    nan = np.isnan(expected)
    assert np.array_equal(result[~nan], expected[~nan].view(np.uint32))
    assert (result[nan] == NAN).all()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_fp32_becomes_16_bits(kind):
    x = random_bits()
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[kind]
    nearest = compute(f"cvt.rn.{kind}.f32", x)
    expected = torch.from_numpy(x).to(dtype).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(nearest, np.where(np.isnan(x), 0x7FFF, expected))
    packed = compute(f"cvt.rn.{kind}x2.f32", x, x[::-1].copy())
    assert np.array_equal(packed, nearest.astype(np.uint32) << 16 | nearest[::-1])


@pytest.mark.parametrize(
    ("mode", "function"), [("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)]
)
@pytest.mark.parametrize("kind", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
def test_fp32_becomes_integers_within_the_range(kind, mode, function):
    x = np.concatenate([random_bits(2)[::16], np.arange(-600, 600, dtype=np.float32) / 4])
    result = compute(f"cvt.{mode}.{kind}.f32", x).view(DTYPES[kind])
    limits = np.iinfo(DTYPES[kind])
    of_nan = 0 if limits.bits < 64 else limits.min or 1 << 63
    for number, found in zip(x.tolist(), result.tolist(), strict=True):
        if number != number:
            assert found == of_nan
        elif abs(number) == float("inf"):
            assert found == (limits.max if number > 0 else limits.min)
        else:
            assert found == min(max(int(function(number)), limits.min), limits.max)


def test_between_integers():
    assert compute("cvt.s32.s8", 0x80)[0] == 0xFFFFFF80
    assert compute("cvt.u32.u8", 0x80)[0] == 0x80
    assert compute("cvt.s8.s32", 0x1FF)[0] == 0xFF
    assert compute("cvt.sat.s8.s32", 0x1FF)[0] == 0x7F
    assert compute("cvt.sat.u8.s32", -5)[0] == 0
    assert compute("cvt.sat.s8.u32", 0xFFFFFFFF)[0] == 0x7F
    assert compute("cvt.s64.s32", -1)[0] == 2**64 - 1


def test_integers_become_fp32():
    whole = np.random.default_rng(3).integers(-(2**63), 2**63, 1000)
    assert np.array_equal(compute("cvt.rn.f32.s64", whole), [np.float32(int(x)).view(np.uint32) for x in whole])
    assert compute("cvt.rn.f32.u32", 0xFFFFFFFF)[0] == 0x4F800000
    assert compute("cvt.rn.f16.s32", 65520)[0] == 0x7C00


# ---- what is not known


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("frobnicate.b32 %r1, %r2;", "unknown instruction"),
        ("add.rn.round.f32 %f1, %f2, %f3;", "unknown modifier .round"),
        ("add.f32 %f1, %f2, %f3;", "needs one of rn"),
        ("add.rz.f32 %f1, %f2, %f3;", "needs one of rn"),
        ("add.rn.ftz.f32 %f1, %f2, %f3;", "unknown modifier .ftz"),
        ("fma.rn.f32 %f1, %f2, %f3, %f1;", "unknown instruction"),
        ("mad.rn.f32 %f1, %f2, %f3, %f1;", "needs one of lo, hi, wide"),
        ("div.full.f32 %f1, %f2, %f3;", "needs one of rn"),
        ("ex2.approx.f32 %f1, %f2;", "unknown instruction"),
        ("add.f64 %rd1, %rd2, %rd3;", "unknown type .f64"),
        ("add.s32 %rd1, %r2, %r3;", "%rd1 is .b64"),
        ("add.s32 %r1, %h2, %r3;", "%h2 is .b16"),
        ("add.s32 %r1, %r2, nothing;", "unknown operand nothing"),
        ("add.s32 %r1, %r2;", "1 operands instead of 2"),
        ("@%r1 add.s32 %r1, %r2, %r3;", "%r1 is not a predicate"),
        ("bra nowhere;", "nowhere"),
        ("call nothing;", "unknown instruction"),
        ("ld.global.secretly.b32 %r1, [%rd1];", "unknown modifier .secretly"),
        ("ld.local.b32 %r1, [%rd1];", "needs one of global, shared"),
        ("bar.arrive 0, 32;", "unknown barrier"),
    ],
)
def test_what_is_not_known_is_refused_with_kernel_and_line(line, reason):
    with pytest.raises(Unsupported, match=f"small, line {FIRST_LINE}: ") as refused:
        run(line, aligned(32))
    assert reason in str(refused.value)


def test_newer_isas_are_refused():
    from . import parse

    with pytest.raises(Unsupported, match="small, line 1: ISA 99.0; known: 9.5"):
        parse(text(ADDRESS, version="99.0"))
