"""fusedcomm.simulate gives the bits of the reference and of real ranks. What it refuses."""

import pytest
import reference
import torch
from models import Gradients, synchronize
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm import simulation
from fusedcomm.config import Blocks, Config
from fusedcomm.native import _C

WAYS = [(wire, rotate) for wire in fusedcomm.WIRES for rotate in ((False, True) if _C.has_scales(wire) else (False,))]
"""(wire, rotate): every combination that a two-shot has."""


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


def expected(grads, wire, rotate, exempt_mask=None, block=None, sum="two-shot"):
    block = block or _C.default_block_numel(wire)
    return reference.all_reduce_mean(grads, wire, sum, block=block, rotated=rotate, exempt_mask=exempt_mask)


# ---- the bits of the reference


@pytest.mark.sampled
@pytest.mark.parametrize(("wire", "rotate"), WAYS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_two_shot_gives_the_bits_of_the_reference(wire, rotate, dtype):
    for world_size in (1, 2, 5):
        for numel in (1, 33, 5003):
            grads = gradients(world_size, (numel,), dtype)
            mask = torch.rand(numel, generator=torch.Generator().manual_seed(9)) < 0.3
            for exempt in (None, mask, torch.ones_like(mask), torch.zeros_like(mask)):
                mean = fusedcomm.simulate(
                    grads,
                    Config(wire, sum="two-shot", blocks=Blocks(rotate=rotate)),
                    exempt_mask=exempt,
                )
                assert mean.dtype == dtype
                assert torch.equal(mean, expected(grads, wire, rotate, exempt)), (world_size, numel, exempt is mask)


@pytest.mark.parametrize(("wire", "rotate"), WAYS, ids=str)
def test_one_shot_gives_the_bits_of_the_reference(wire, rotate):
    for world_size in (1, 2, 5):
        grads = gradients(world_size, (5003,))
        mask = torch.rand(5003, generator=torch.Generator().manual_seed(9)) < 0.3
        for exempt in (None, mask):
            mean = fusedcomm.simulate(
                grads,
                Config(wire, sum="one-shot", blocks=Blocks(rotate=rotate)),
                exempt_mask=exempt,
            )
            assert torch.equal(mean, expected(grads, wire, rotate, exempt, sum="one-shot")), world_size


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_blocks_of_other_sizes(wire):
    grads = gradients(3, (5003,))
    mean = fusedcomm.simulate(grads, Config(wire, sum="two-shot", blocks=Blocks(256)))
    assert torch.equal(mean, expected(grads, wire, False, block=256))


def test_predivide_is_the_codecs():
    grads = [gradient * 250 for gradient in gradients(3, (5003,))]
    mean = fusedcomm.simulate(grads, Config("fp16", sum="two-shot", predivide=8.0))
    assert torch.equal(mean, reference.all_reduce_mean(grads, "fp16", predivide=8.0))
    assert mean.isfinite().all() and not fusedcomm.simulate(grads, Config("fp16", sum="two-shot")).isfinite().all()


@pytest.mark.parametrize(("wire", "rotate"), WAYS, ids=str)
def test_what_is_not_finite_ends_as_in_the_reference(wire, rotate):
    grads = gradients(3, (2000,))
    grads[1][100], grads[1][700], grads[2][1500] = torch.inf, -torch.inf, torch.nan
    mean = fusedcomm.simulate(grads, Config(wire, sum="two-shot", blocks=Blocks(rotate=rotate)))
    assert not mean.isfinite().all()
    assert torch.equal(mean.view(torch.int32), expected(grads, wire, rotate).view(torch.int32))


def test_the_cut_into_pieces_does_not_show(monkeypatch):
    grads = gradients(3, (20011,))
    mask = torch.arange(20011) % 7 == 0
    ways = [(Config(w, "two-shot", blocks=Blocks(rotate=r)), mask) for w, r in WAYS]
    ways.append((Config("bf16", "direct"), None))
    whole = [fusedcomm.simulate(grads, config, exempt_mask=exempt) for config, exempt in ways]
    monkeypatch.setattr(simulation, "_PIECES_NBYTES", 4 * 3 * 1024)
    for (config, exempt), mean in zip(ways, whole, strict=True):
        assert torch.equal(fusedcomm.simulate(grads, config, exempt_mask=exempt), mean), config


@pytest.mark.full
def test_thousands_of_ranks():
    grads = list(torch.randn(3000, 40, generator=torch.Generator().manual_seed(0)))
    for wire, rotate in WAYS:
        mean = fusedcomm.simulate(grads, Config(wire, sum="two-shot", blocks=Blocks(rotate=rotate)))
        assert torch.equal(mean, expected(grads, wire, rotate)), wire


def test_shapes_and_strides_are_kept_and_gradients_unchanged():
    grads = [gradient.t() for gradient in gradients(2, (40, 30))]
    before = [gradient.clone() for gradient in grads]
    mask = torch.arange(1200).view(30, 40) % 3 == 0
    mean = fusedcomm.simulate(grads, Config("int8", sum="two-shot"), exempt_mask=mask)
    flat = expected([gradient.reshape(-1) for gradient in grads], "int8", False, mask.view(-1))
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


def real_means(rank, world_size, shape, wire, kwargs):
    ddp = DistributedDataParallel(Gradients(shape))
    fusedcomm.attach(ddp, Config(wire, wires={"1d": wire}, **kwargs), quiet=True)
    return synchronize(ddp, [gradients(world_size, shape)[rank]])[0]


REAL = [
    *(
        (p, (71, 83), wire, {"sum": "two-shot", "blocks": Blocks(rotate=rotate)})
        for wire, rotate in WAYS
        for p in (2, 3)
    ),
    *((2, shape, wire, {}) for wire in ("fp32", "bf16", "fp16", "int8") for shape in ((1000,), (71, 83))),
    (2, (71, 83), "fp32", {"sum": "exact"}),
    (2, (71, 83), "bf16", {"sum": "direct"}),
    (2, (71, 83), "fp16", {"sum": "direct", "predivide": 4.0}),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("world_size", "shape", "wire", "kwargs"), REAL, ids=str)
def test_it_gives_the_bits_of_real_ranks(ranks, world_size, shape, wire, kwargs):
    mean = fusedcomm.simulate(gradients(world_size, shape), Config(wire, **kwargs))
    for of_rank in ranks.run(real_means, shape, wire, kwargs, world_size=world_size):
        assert torch.equal(of_rank, mean)


def real_means_with_exempt(rank, world_size, wire, rotate):
    ddp = DistributedDataParallel(Gradients((90, 70), (999,)))
    fusedcomm.attach(ddp, Config(wire, wires={"1d": "fp32"}, blocks=Blocks(rotate=rotate)), quiet=True)
    both = gradients(world_size, (90 * 70 + 999,))[rank]
    seen = synchronize(ddp, [both[:6300].view(90, 70), both[6300:]])
    return torch.cat([seen[0].view(-1), seen[1]])


@pytest.mark.sampled
@pytest.mark.parametrize(("wire", "rotate"), [("bf16", False), ("int8", False), ("int4", True), ("fp8", False)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_exempt_elements_travel_as_on_real_ranks(ranks, world_size, wire, rotate):
    mask = torch.arange(90 * 70 + 999) >= 6300
    mean = fusedcomm.simulate(
        gradients(world_size, (7299,)), Config(wire, blocks=Blocks(rotate=rotate)), exempt_mask=mask
    )
    for of_rank in ranks.run(real_means_with_exempt, wire, rotate, world_size=world_size):
        assert torch.equal(of_rank, mean)


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
        ([X, X], {"exempt_mask": X[:7] > 0}, ValueError, r"the gradients' shape \(5000,\)"),
        ([X, X], {"exempt_mask": [True]}, TypeError, "exempt_mask must be a tensor or None, not list"),
        ([X, X], {"config": Config(sum="direct"), "exempt_mask": X > 0}, ValueError, "cannot carry exempt"),
    ],
)
def test_errors_say_what_is_possible(grads, kwargs, error, text):
    with pytest.raises(error, match=text):
        fusedcomm.simulate(grads, **kwargs)
