"""Errors of the codes against results that others have published or that follow from a formula."""

import math

import pytest
import reference
import torch


def decoded(y, wire, block, u=None):
    return reference.decode(*reference.encode(y, wire, block, u), wire, block)


def vnmse(y, other):
    return ((y.double() - other.double()).square().sum() / y.double().square().sum()).item()


def noise(numel, seed):
    return torch.randint(1 << 16, (numel,), generator=torch.Generator().manual_seed(seed)) / 2**16


def normal(numel, seed):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def level(code):
    return code * (832 + 3 * code * code) / 1024


LEVELS = {"int4": [level(code) for code in range(-8, 8)], "int2": [-2, -1, 0, 1]}


def expected_signed_error(wire):
    """vNMSE of a block of 32 normal values whose element of greatest magnitude has the least code: by integration.

    Given the greatest magnitude a, which is exact, the others are normal between ±a and are rounded to the nearest of
    the levels times a / 8, in int2 a / 2. The density of a is 64·φ(a)·(2Φ(a) − 1)^31.
    """
    a = torch.linspace(0.2, 6.5, 4000, dtype=torch.float64)
    cdf = torch.special.ndtr
    weight = (-a.square() / 2).exp() * (2 * cdf(a) - 1) ** 31
    x = torch.linspace(-1, 1, 4097, dtype=torch.float64)[None, :] * a[:, None]
    levels = torch.tensor(LEVELS[wire], dtype=torch.float64)
    step = a[:, None] / -levels[0]
    error = (x - levels[torch.bucketize(x / step, (levels[1:] + levels[:-1]) / 2)] * step).square()
    density = (-x.square() / 2).exp()
    of_another = (error * density).sum(1) / density.sum(1)
    return (31 / 32 * (of_another * weight).sum() / weight.sum()).item()


def test_int4s_error_is_what_integration_gives():
    y = normal(1 << 19, seed=1)
    measured = vnmse(y, decoded(y, "int4", 32))
    assert measured <= 0.0067
    # Rounding scales to bf16 moves each value by at most 2^-9 of it. That hardly ever another level than the nearest is
    # chosen costs a hundredth.
    assert measured == pytest.approx(expected_signed_error("int4"), rel=0.02)


def test_int2s_error_is_what_integration_gives():
    measured = vnmse(normal(1 << 19, seed=1), decoded(normal(1 << 19, seed=1), "int2", 32))
    assert measured < 0.132 and measured == pytest.approx(expected_signed_error("int2"), rel=0.01)


def test_int4_is_between_the_best_scalar_code_of_its_bits_and_the_limit():
    """Max, "Quantizing for minimum distortion", 1960: no 16 fixed levels for a normal distribution have an error below
    0.009497. Scales that follow each block's greatest element do better; nothing is below Shannon's 2^(-2·4.5)."""
    measured = vnmse(normal(1 << 18, seed=2), decoded(normal(1 << 18, seed=2), "int4", 32))
    assert 2.0**-9 < measured < 0.009497


def test_int8s_error_of_uniform_values_is_a_twelfth_of_a_squared_step():
    y = torch.rand(1 << 18, generator=torch.Generator().manual_seed(3)) * 2 - 1
    y.view(-1, 128)[:, 0] = 1.0  # every scale is 1 / 127
    error = (decoded(y, "int8", 128).double() - y.double()).view(-1, 128)[:, 1:].square().mean()
    assert error.item() == pytest.approx((1 / 127) ** 2 / 12, rel=0.01)


@pytest.mark.parametrize(("wire", "levels"), [("int8", 127), ("int4", level(7) / (level(7) - level(6)))])
def test_stochastic_rounding_is_within_qsgds_bound(wire, levels):
    """Alistarh et al., "QSGD", 2017, lemma 3.1: unbiased, and E‖Q(v) − v‖² ≤ min(n / s², √n / s)·‖v‖² for s levels.

    int4's steps differ: s counts the greatest one.
    """
    block, draws = 32, 400
    y = normal(block * 8, seed=4)
    repeated = y.repeat(draws)
    values = decoded(repeated, wire, block, noise(repeated.numel(), seed=5)).double().view(draws, -1)
    errors = (values - y.double()).square().mean(0).view(-1, block).sum(1)
    bound = min(block / levels**2, math.sqrt(block) / levels) * y.double().square().view(-1, block).sum(1)
    assert torch.all(errors <= bound)
    # A draw's standard deviation is at most half a step. The mean is within five times that of a mean of `draws`.
    steps = y.view(-1, block).abs().amax(1).repeat_interleave(block).double() / levels
    assert torch.all((values.mean(0) - y.double()).abs() <= 5 * 0.5 * 1.01 * steps / math.sqrt(draws))


def test_the_stochastic_variance_of_a_value_between_two_codes():
    """A value at the share p of the way between two codes has the variance p·(1 − p) steps²: Bernoulli's."""
    y = torch.zeros(20_000, 32)
    y[:, 0], y[:, 1] = level(7), 2.25
    values = decoded(y.view(-1), "int4", 32, noise(y.numel(), seed=6)).view(-1, 32)
    assert values[:, 0].unique().tolist() == [level(7)]
    assert values[:, 1].unique().tolist() == [level(2), level(3)]
    step = level(3) - level(2)
    share = (2.25 - level(2)) / step
    assert values[:, 1].double().var().item() == pytest.approx(share * (1 - share) * step**2, rel=0.03)
    assert values[:, 1].double().mean().item() == pytest.approx(2.25, abs=0.015)


EDGES = {
    "zeros": [0.0] * 32,
    "negative zeros": [-0.0] * 32,
    "one value": [-2.5] * 32,
    "the other sign": [2.5] * 32,
    "subnormals": [1e-40, -1e-42] * 16,
    "one element": [3.0],
    "shorter than a block": [level(3) / 2, -0.0, 4.0, 0.0, level(-6) / 2],
}


@pytest.mark.parametrize("values", EDGES.values(), ids=list(EDGES))
def test_values_that_int4_keeps_and_those_that_vanish(values):
    y = torch.tensor(values)
    vanishes = y.abs().max() < 2.0**-100
    result = decoded(y, "int4", 32)[: len(values)]
    assert torch.equal(result, torch.zeros_like(y) if vanishes else y)
