"""bench/_codes.py: the codes that int4 is compared with have the errors that are published for them."""

import sys
from pathlib import Path

import pytest
import torch

import fusedcomm
from fusedcomm.config import Config

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import _codes  # noqa: E402


@pytest.fixture(scope="module")
def normal():
    return torch.randn(1 << 18, generator=torch.Generator().manual_seed(1))


def error(x, other):
    return ((x.double() - other).square().sum() / x.double().square().sum()).item()


@pytest.mark.parametrize(
    ("num_levels", "published", "outermost"), [(4, 0.1175, 1.510), (8, 0.03454, 2.152), (16, 0.009497, 2.733)]
)
def test_lloyds_levels_are_maxs(num_levels, published, outermost):
    """Max, "Quantizing for minimum distortion", 1960, table I."""
    levels, least = _codes.lloyd(num_levels)
    assert least == pytest.approx(published, rel=1e-3)
    assert levels[-1] == pytest.approx(outermost, abs=2e-3)
    assert levels[0] == pytest.approx(-levels[-1])


@pytest.mark.parametrize(
    ("num_levels", "step", "published"), [(4, 0.9957, 0.1188), (8, 0.5860, 0.03744), (16, 0.3352, 0.01154)]
)
def test_uniform_levels_have_maxs_errors(normal, num_levels, step, published):
    """The same, table II: equal steps."""
    levels = (torch.arange(num_levels) - (num_levels - 1) / 2) * step
    assert error(normal, _codes.nearest(normal, levels)) == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize("nbits", [1, 2, 3, 4])
def test_eden_has_the_error_of_its_levels(normal, nbits):
    """Vargaftik et al.: a rotated vector is normal, and unbiased with 1 / (1 − D) − 1, D being the levels' error. With
    one bit that is DRIVE's π / 2 − 1."""
    least = _codes.lloyd(2**nbits)[1]
    measured = error(normal, _codes.eden(normal, nbits))
    assert measured == pytest.approx(1 / (1 - least) - 1, rel=0.02)
    if nbits == 1:
        assert measured == pytest.approx(torch.pi / 2 - 1, rel=0.02)


def test_the_compared_int4_is_the_wires(normal):
    x = normal[:4096] * torch.logspace(-3, 3, 128).repeat_interleave(32)
    x[:32], x[32:64] = 0.0, 5.0
    x[64], x[65:96] = -7.0, 7.0
    assert torch.equal(_codes.int4(x), fusedcomm.simulate([x], Config("int4", sum="one-shot")))


def test_the_order_of_the_codes_on_normal_values(normal):
    errors = {name: error(normal, code(normal)) for name, (_, code) in _codes.CODES.items()}
    ascending = ["duo and codebook", "duo", "signed scale and codebook", "int4"]
    ascending += ["signed scale", "NF4", "NVFP4", "absmax / 7"]
    assert sorted(ascending, key=errors.get) == ascending
    assert errors["int4"] <= 0.0067 and errors["MXFP4"] > errors["absmax / 7"]


@pytest.mark.parametrize("name", _codes.CODES)
def test_zeros_stay_zeros(name):
    x = torch.zeros(3072)
    x[1024], x[2048:] = 1.0, 1e-40
    decoded = _codes.CODES[name][1](x)
    assert not decoded[:1024].any() and decoded.isfinite().all()


def test_widths_go_by_energy():
    """16 groups: four have 5 bits, eight 4 bits and four 3."""
    energy = torch.arange(16).float()[torch.randperm(16, generator=torch.Generator().manual_seed(2))]
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(3)) * 4.0 ** energy[:, None]
    decoded = _codes.adaptive_code(x.view(1, -1)).view(16, 256)
    for group, rank in enumerate(energy.int().tolist()):
        nbits = 5 if rank >= 12 else 3 if rank < 4 else 4
        assert torch.equal(decoded[group], _codes.signed_code(x[group], nbits)), rank
