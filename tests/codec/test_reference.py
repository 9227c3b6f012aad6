"""The oracle's codes against formulas that share no code with it: bit patterns, float64 and well-known numbers. What is
made of codes, the stages and sums, is compared with the codec and with the engine: test_codec.py, test_means.py."""

import math

import pytest
import reference
import torch
from values import BLOCK_WIRES, every_16_bits, same_bits
from values import signed as signed_by_seed

# fp8's explicit mantissa bits, exponent of the least normal number, and greatest finite number.
FP8_MANTISSA_NBITS, FP8_LEAST_EXPONENT, FP8_GREATEST = 3, -6, 448.0
HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def bits(x):
    return x.view({4: torch.int32, 2: torch.int16, 1: torch.int8}[x.element_size()])


def signed(numel, seed, spread=20):
    """Random fp32 values of both signs over 2·spread binades."""
    return signed_by_seed(numel, seed=seed, binades=spread)


# ---- 16-bit wires


@pytest.mark.parametrize("wire", HALF_DTYPES)
def test_every_16_bit_value_survives(wire):
    values = every_16_bits(HALF_DTYPES[wire])
    codes, scales = reference.encode(values.float(), wire)
    number = ~values.isnan()
    assert scales.numel() == 0
    assert same_bits(codes[number], values[number])
    assert bits(codes[~number]).unique().tolist() == [{"bf16": 0x7FC0, "fp16": 0x7E00}[wire]]


ROUNDED = {
    "bf16": {
        1 + 2**-8: 1.0,
        1 + 3 * 2**-8: 1 + 2**-6,
        -(1 + 2**-8 + 2**-20): -(1 + 2**-7),
        257.0: 256.0,
        3.4e38: math.inf,
        2.0**-140: 0.0,
        2.0**-133: 2.0**-133,
    },
    "fp16": {
        65519.0: 65504.0,
        65520.0: math.inf,
        -65520.0: -math.inf,
        2.0**-24: 2.0**-24,
        2.0**-25: 0.0,
        1.5 * 2.0**-25: 2.0**-24,
    },
    "int8": {127.0: 127.0, 0.5: 0.0, 1.5: 2.0, 2.5: 2.0, -0.5: 0.0, -1.5: -2.0},
    "fp8": {
        **{17.0: 16.0, 19.0: 20.0, -432.0: -448.0},
        **{2.0**-10: 0.0, 3 * 2.0**-10: 2.0**-8, 2.0**-9: 2.0**-9, 2.0**-6 * (1 - 2**-8): 2.0**-6},
    },
}
"""Ties, overflow and subnormals, by hand."""


@pytest.mark.parametrize("wire", ROUNDED)
def test_ties_overflow_and_subnormals(wire):
    points = torch.tensor([reference.GREATEST_CODE.get(wire, 1.0), *ROUNDED[wire]])  # the first makes the scale 1
    codes, scales = reference.encode(points, wire, 32)
    assert scales.tolist() == [1.0] * len(scales)
    assert reference.values_of_codes(codes, wire)[1:].tolist() == list(ROUNDED[wire].values())


def test_fp32_keeps_all_but_the_kind_of_nan():
    x = torch.tensor([0x7F800001, 0xFFC00000 - 2**32, 0x00000001, 0x80000000 - 2**32], dtype=torch.int32)
    codes, _ = reference.encode(x.view(torch.float32), "fp32")
    assert bits(codes).tolist() == [0x7FC00000, 0x7FC00000, 0x00000001, 0x80000000 - 2**32]


# ---- fp8


def fp8_value(code):
    """The value of a code that is not a NaN, by the format's definition."""
    magnitude, sign = code & 0x7F, -1.0 if code & 0x80 else 1.0
    exponent, mantissa = magnitude >> FP8_MANTISSA_NBITS, magnitude & ((1 << FP8_MANTISSA_NBITS) - 1)
    significand = mantissa + (1 << FP8_MANTISSA_NBITS if exponent else 0)
    return sign * math.ldexp(significand, max(exponent, 1) - 1 + FP8_LEAST_EXPONENT - FP8_MANTISSA_NBITS)


def test_every_fp8_value_survives_a_scale_of_one():
    values = [fp8_value(code) for code in range(256)]
    codes = [code for code in range(256) if abs(values[code]) <= FP8_GREATEST]
    assert len(codes) == 254
    y = torch.tensor([values[code] for code in codes])
    stored, scales = reference.encode(y, "fp8", 256)
    assert scales.tolist() == [1.0]
    assert stored.view(torch.uint8).tolist() == codes  # including the sign of zero
    assert same_bits(reference.decode(stored, scales, "fp8", 256), y)


# ---- int4


def level(code):
    """The value of an int4 code."""
    return code * (832 + 3 * code * code) / 1024


LEVELS = torch.tensor([level(code) for code in range(-8, 8)])
# Where the nearest level changes, from the code -8 on.
MIDDLES = (LEVELS[1:] + LEVELS[:-1]) / 2


def encoded_beside_minus_8(points):
    """(values, codes) of fp32 points from -8 to 8 in blocks whose scale is 1."""
    blocks = torch.nn.functional.pad(points, (0, -points.numel() % 31)).view(-1, 31)
    blocks = torch.nn.functional.pad(blocks, (1, 0), value=-8.0)
    stored, scales = reference.encode(blocks.view(-1), "int4", 32)
    assert scales.unique().tolist() == [1.0]
    values = reference.decode(stored, scales, "int4", 32).view(-1, 32)[:, 1:].reshape(-1)[: points.numel()]
    return values, torch.searchsorted(LEVELS, values) - 8


def test_int4_takes_the_nearest_level_unless_two_are_almost_as_near():
    """Every fp32 value within 200 ulps of a middle, and steps of 1/4096 in between. The cubic that gives the code has
    its own borders: within 0.08 steps of the middles."""
    points = torch.linspace(-8, 8, (1 << 16) + 1)
    near_middles = (MIDDLES.view(torch.int32)[:, None] + torch.arange(-200, 201)).to(torch.int32).view(torch.float32)
    values, codes = encoded_beside_minus_8(torch.cat([points, near_middles.view(-1)]))
    points = torch.cat([points, near_middles.view(-1)])
    nearest = LEVELS[torch.bucketize(points, MIDDLES)]
    other = values != nearest
    steps = (values - nearest).abs()[other]
    excess = ((points - values).abs() - (points - nearest).abs())[other] / steps
    assert other.any() and excess.max() <= 2 * 0.08
    assert codes.diff()[: 1 << 16].min() == 0 and codes.diff()[: 1 << 16].max() == 1  # greater values, greater codes


def test_int4_nibbles_by_hand():
    y = torch.zeros(32)
    y[:8] = torch.tensor([7.0, -8.0, 0.3, 1.2, 2.5, -0.3, -1.2, 3.0])
    codes, scales = reference.encode(y, "int4", 32)
    assert scales.dtype == torch.bfloat16
    assert scales.tolist() == [1.0]
    # The codes are 7 -8 | 0 1 | 3 0 | -1 4. The first of each pair is in the low half of the byte.
    assert codes.tolist() == [0x87, 0x10, 0x03, 0x4F] + [0] * 12
    expected = [6853 / 1024, -8, 0, 835 / 1024, 2577 / 1024, 0, -835 / 1024, 3520 / 1024]
    assert reference.decode(codes, scales, "int4", 32)[:8].tolist() == expected
    # With the other signs all codes are the same, and the scale is negative. Zeros stay zeros.
    negated, scales = reference.encode(-y, "int4", 32)
    assert negated.tolist() == codes.tolist() and scales.tolist() == [-1.0]
    assert reference.decode(negated, scales, "int4", 32)[:8].tolist() == [-value for value in expected]


def test_int4_scales_are_rounded_to_bf16_and_codes_count_in_these():
    absmax = signed(20_000, seed=6, spread=90)
    absmax = absmax[absmax.abs() >= 2.0**-100]
    y = torch.zeros(absmax.numel(), 32)
    y[:, 0], y[:, 1], y[:, 2] = absmax, -absmax * 0.8, absmax / 2
    codes, scales = reference.encode(y.view(-1), "int4", 32)
    assert same_bits(scales, (-absmax / 8).to(torch.bfloat16))
    decoded = reference.decode(codes, scales, "int4", 32).view(-1, 32)
    steps = scales.double()
    assert torch.equal(decoded[:, 0].double(), -8 * steps)
    assert torch.equal(decoded[:, 1].double(), level(7) * steps)
    assert torch.equal(decoded[:, 2].double(), level(-5) * steps)
    # Half the greatest step bounds the greatest value's error, too: rounding the scale moves it by less than that.
    assert torch.all((decoded.double() - y.double()).abs() <= 0.5 * (8 - level(7)) * steps.abs()[:, None])


def test_the_greatest_int4_values_do_not_overflow():
    greatest = torch.finfo(torch.float32).max
    y = torch.tensor([[greatest, -greatest], [-greatest, 2.0**126]])
    codes, scales = reference.encode(torch.nn.functional.pad(y, (0, 30)).view(-1), "int4", 32)
    decoded = reference.decode(codes, scales, "int4", 32).view(2, 32)
    of_bf16 = torch.finfo(torch.bfloat16).max
    assert decoded[:, :2].tolist() == [[level(7) / 8 * of_bf16, -of_bf16], [-of_bf16, level(2) / 8 * of_bf16]]


# ---- blocks of every kind


@pytest.mark.parametrize("wire", BLOCK_WIRES)
def test_special_blocks(wire):
    least, greatest = reference.LEAST_CODE[wire], reference.GREATEST_CODE[wire]
    extreme = -8 if wire == "int4" else greatest  # the code of the greatest element, whose sign is then the scale's
    y = torch.zeros(9, 32)
    y[1] = -3.0  # all equal
    y[2, 5], y[2, 6] = 1e30, 1e20  # an outlier
    y[3] = 2.0**-130  # denormals
    y[4] = 2.0**-100
    y[5] = -(2.0**-100) * (1 - 2**-24)
    y[6, :4] = torch.tensor([math.inf, -math.inf, math.nan, -5.0])
    y[7, 9] = math.nan
    y[8] = 2.0**127
    codes, scales = reference.encode(y.view(-1), wire, 32)
    values = reference.values_of_codes(codes, wire).view(9, 32)
    stored = codes.view(torch.uint8).view(9, -1)
    assert scales[[0, 3, 5]].tolist() == [0, 0, 0]
    assert not stored[[0, 3, 5, 7]].any()  # not even a sign of zero
    assert values[1].unique().tolist() == [least]
    assert values[2].nonzero().tolist() == [[5]]
    assert values[4].unique().tolist() == [extreme]
    assert values[8].unique().tolist() == [extreme]
    assert scales[6:8].tolist() == [math.inf, math.inf]
    assert values[6].tolist() == [greatest, least, *[0] * 30]
    decoded = reference.decode(codes, scales, wire, 32).view(9, 32)
    assert decoded[6, :2].tolist() == [math.inf, -math.inf]
    assert bits(decoded[6, 2:]).unique().tolist() == [0x7FC00000]
    assert bits(decoded[7]).unique().tolist() == [0x7FC00000]
    tolerance = 2**-8 if wire == "int4" else 2**-22
    assert torch.allclose(decoded[[1, 4, 8]], y[[1, 4, 8]], rtol=tolerance, atol=0)
