"""fusedcomm.simulate gives the bits of the reference and of real ranks. What it refuses."""

import pytest
import reference
import torch
from models import Gradients, synchronize
from torch.nn.parallel import DistributedDataParallel
from values import DTYPES, WIRES, same_bits

import fusedcomm
from fusedcomm import simulation
from fusedcomm.config import Config
from fusedcomm.native import _C


def gradients(world_size, shape, dtype=torch.float32):
    """A list with one gradient for each rank. Magnitudes differ between ranks. Some elements are much greater than
    their neighbors, and some blocks are all zero."""
    result = []
    for rank in range(world_size):
        generator = torch.Generator().manual_seed(rank)
        gradient = torch.randn(shape, generator=generator) * (rank + 1)
        gradient *= torch.where(torch.rand(shape, generator=generator) < 0.02, 50.0, 1.0)
        gradient.view(-1)[300:600] = 0
        result.append(gradient.to(dtype))
    return result


def expected(grads, wire, exempt_mask=None, sum="two-shot"):
    block = _C.default_block_numel(wire)
    return reference.all_reduce_mean(grads, wire, sum, block=block, exempt_mask=exempt_mask)


# ---- the bits of the reference


@pytest.mark.sampled
@pytest.mark.parametrize("sum", ["two-shot", "one-shot"])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_gives_the_bits_of_the_reference(wire, dtype, sum):
    config = Config(wire, sum=sum)
    for world_size in (1, 2, 5):
        for numel in (1, 33, 5003):
            grads = gradients(world_size, (numel,), dtype)
            if numel == 5003:
                grads[0][100], grads[0][700], grads[-1][1500] = torch.inf, -torch.inf, torch.nan
            mask = torch.rand(numel, generator=torch.Generator().manual_seed(9)) < 0.3
            for exempt in (None, mask, torch.ones_like(mask), torch.zeros_like(mask)):
                mean = fusedcomm.simulate(grads, config, exempt_mask=exempt)
                assert same_bits(mean, expected(grads, wire, exempt, sum=sum)), (world_size, numel, exempt)


def test_the_cut_into_pieces_does_not_show(monkeypatch):
    grads = gradients(3, (20011,))
    mask = torch.arange(20011) % 7 == 0
    ways = [(Config(wire, "two-shot"), mask) for wire in WIRES]
    ways.append((Config("bf16", "direct"), None))
    whole = [fusedcomm.simulate(grads, config, exempt_mask=exempt) for config, exempt in ways]
    monkeypatch.setattr(simulation, "_PIECES_NBYTES", 4 * 3 * 1024)
    for (config, exempt), mean in zip(ways, whole, strict=True):
        assert torch.equal(fusedcomm.simulate(grads, config, exempt_mask=exempt), mean), config


def test_shapes_and_strides_are_kept_and_gradients_unchanged():
    grads = [gradient.t() for gradient in gradients(2, (40, 30))]
    before = [gradient.clone() for gradient in grads]
    mask = torch.arange(1200).view(30, 40) % 3 == 0
    mean = fusedcomm.simulate(grads, Config("int8", sum="two-shot"), exempt_mask=mask)
    flat = expected([gradient.reshape(-1) for gradient in grads], "int8", mask.view(-1))
    assert torch.equal(mean, flat.view(30, 40))
    assert all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))
    assert fusedcomm.simulate([torch.tensor(3.0)] * 2, "bf16").shape == ()
    assert fusedcomm.simulate([torch.empty(0, 4)] * 2, Config("int8", sum="two-shot")).shape == (0, 4)


# ---- other sums


def test_exact_and_direct_add_in_rank_order():
    grads = gradients(5, (5003,))
    total = sum(gradient * torch.tensor(1 / 5) for gradient in grads)
    assert torch.equal(fusedcomm.simulate(grads, "fp32"), total)
    assert torch.equal(fusedcomm.simulate(grads, Config("fp32", sum="exact")), total)
    ring = grads[0].bfloat16()
    for gradient in grads[1:]:
        ring = ring + gradient.bfloat16()
    mean = fusedcomm.simulate(grads, Config("bf16", sum="direct"))
    assert torch.equal(mean, ring.float() * torch.tensor(1 / 5))


def test_auto_decides_as_the_engine():
    small, large = gradients(3, (1000,)), gradients(3, (5000,))
    assert torch.equal(fusedcomm.simulate(small, "int8"), fusedcomm.simulate(small, "fp32"))
    assert torch.equal(fusedcomm.simulate(large, "int8"), fusedcomm.simulate(large, Config("int8", sum="two-shot")))
    of_two = fusedcomm.simulate(large[:2], Config("bf16", sum="one-shot"))
    assert torch.equal(fusedcomm.simulate(large[:2], "bf16"), of_two)
    assert not torch.equal(fusedcomm.simulate(large[:2], Config("bf16", sum="two-shot")), of_two)
    everything = torch.ones(5000, dtype=torch.bool)
    assert torch.equal(fusedcomm.simulate(large, "int8", exempt_mask=everything), fusedcomm.simulate(large, "fp32"))


# ---- the bits of real ranks

SMALL, MATRIX, MATRIX_AND_VECTOR = ((10, 100),), ((71, 83),), ((90, 70), (999,))
REAL = [
    *((shapes, Config(wire)) for wire in ("fp32", "bf16", "fp16", "int8") for shapes in (SMALL, MATRIX)),
    (MATRIX_AND_VECTOR, Config("int4", wires={"1d": "fp32"})),
    (MATRIX, Config("fp32", "exact")),
    (MATRIX, Config("bf16", "direct")),
    (MATRIX, Config("fp16", "direct")),
]
"""Sums that "auto" chooses and that a transport adds: of more than two ranks it also chooses the order of addition.
That one-shot and two-shot sums of real ranks have the reference's bits is in tests/engine/test_means.py."""


def real_means(rank, world_size, rows):
    found = []
    for shapes, config in rows:
        numels = [torch.Size(shape).numel() for shape in shapes]
        mine = gradients(world_size, (sum(numels),))[rank].split(numels)
        ddp = DistributedDataParallel(Gradients(*shapes))
        fusedcomm.attach(ddp, config, quiet=True)
        means = synchronize(ddp, [part.view(shape) for part, shape in zip(mine, shapes, strict=True)])
        found.append(torch.cat([mean.flatten() for mean in means]))
    return found


def test_it_gives_the_bits_of_two_real_ranks(ranks, subtests):
    for row, *of_ranks in zip(REAL, *ranks.run(real_means, REAL, world_size=2), strict=True):
        shapes, config = row
        numel = sum(torch.Size(shape).numel() for shape in shapes)
        exempt = torch.arange(numel) >= torch.Size(shapes[0]).numel() if len(shapes) > 1 else None
        mean = fusedcomm.simulate(gradients(2, (numel,)), config, exempt_mask=exempt)
        with subtests.test(row=str(row)):
            assert all(torch.equal(of_rank, mean) for of_rank in of_ranks)


# ---- what it refuses

X = torch.ones(5000)


@pytest.mark.parametrize(
    ("grads", "kwargs", "error", "text"),
    [
        ([], {}, ValueError, "grads is empty: pass one tensor for each rank"),
        (X, {}, TypeError, "a list with one tensor for each rank, not Tensor"),
        ([X, 3.0], {}, TypeError, r"grads\[1\] must be a tensor, not float"),
        ([X, X[:7]], {}, ValueError, r"grads\[1\] has shape \(7,\), but grads\[0\] \(5000,\)"),
        ([X, X.half()], {}, ValueError, r"grads\[1\] has dtype torch.float16, but grads\[0\] torch.float32"),
        ([X.double()], {}, ValueError, r"grads\[0\] is torch.float64: use one of torch.float32"),
        ([X.to("meta")], {}, ValueError, r"grads\[0\] is torch.strided on meta: use dense tensors on cpu"),
        ([X, X], {"config": "int5"}, ValueError, "config='int5' is not known: use one of 'fp32'"),
        (
            [X, X],
            {"config": 8},
            TypeError,
            r"config=8 is not possible: use a wire's name \('fp32', .*fusedcomm.Config\(…\)",
        ),
        ([X, X], {"exempt_mask": X}, ValueError, "exempt_mask is torch.float32 of shape"),
        ([X, X], {"exempt_mask": X[:7] > 0}, ValueError, r"shape \(7,\) on cpu: use torch.bool of shape \(5000,\)"),
        ([X, X], {"exempt_mask": [True]}, TypeError, "exempt_mask must be a tensor or None, not list"),
        ([X, X], {"config": Config(sum="direct"), "exempt_mask": X > 0}, ValueError, "cannot carry exempt"),
    ],
)
def test_errors_say_what_is_possible(grads, kwargs, error, text):
    with pytest.raises(error, match=text):
        fusedcomm.simulate(grads, **kwargs)
