"""Updates in bf16 and codes: parameters are equal on every rank, and what rounding takes from one is in the next."""

import fake_cuda
import on_streams
import pytest
import torch
from models import Gradients, integers, mean_of_integers, reducer_of
from owners import BUCKET_MIB, FP32, Net, Way, train
from sampling import few

import fusedcomm
from fusedcomm.config import Chunks, Config

SHAPES = ((33, 70), (50,), (90, 11), (7, 3))
LR = 1 / 64
# The greatest error of one rounding, in units of the greatest magnitude of what is rounded.
ERRORS = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11, "int8": 0.5 / 127, "fp8": 2.0**-4, "int4": 0.17}
WIRES = few(ERRORS, "bf16", "int8")


def constant_gradients(rank, world_size, update, steps):
    """The parameters of a Gradients after each step of SGD with gradients that never change, by parameter."""
    model = Gradients(*SHAPES)
    reducer = reducer_of(model, FP32, bucket_mib=BUCKET_MIB)
    optimizer = fusedcomm.ShardedOptimizer(reducer, torch.optim.SGD, lr=LR, update=update, quiet=True)
    # A thousandth keeps them off the numbers that the wires have.
    gradients = [integers(rank, shape) + 0.001 for shape in SHAPES]
    seen = []
    for _ in range(steps):
        model.zero_grad()
        model(gradients).backward()
        optimizer.step()
        seen.append([p.detach().clone() for p in model.parameters()])
    reducer.detach()
    return seen


@pytest.mark.sampled
@pytest.mark.parametrize("world_size", few([2, 3, 4], 3))
@pytest.mark.parametrize("update", WIRES)
def test_the_error_of_many_steps_is_that_of_one_rounding(ranks, update, world_size):
    steps = 40
    (seen, *others) = ranks.run(constant_gradients, update, steps, world_size=world_size)
    for other in others:
        assert all(torch.equal(*pair) for both in zip(seen, other, strict=True) for pair in zip(*both, strict=True))
    means = [mean_of_integers(world_size, shape, torch.float64) + 0.001 for shape in SHAPES]
    bound = ERRORS[update] * LR * max(mean.abs().max() for mean in means).item()
    bound = bound / (1 - ERRORS[update])  # an update has the error of the one before in it
    worst_of_lossy = 0.0
    for step, parameters in enumerate(seen, 1):
        for mean, parameter in zip(means, parameters, strict=True):
            error = (parameter + LR * step * mean).abs().max().item()
            is_exact = parameter.dim() == 1 and update in ("int8", "fp8", "int4")
            sums = 1e-6 * step  # of fp32 additions at the owner
            assert error <= (0.0 if is_exact else bound) + sums, (step, tuple(parameter.shape))
            worst_of_lossy = max(worst_of_lossy, error)
    assert update == "fp32" or worst_of_lossy > bound / 50  # it does round


# ---- accelerators


def trained(rank, world_size, config, device):
    return train(Way(config=config, update="bf16"), rank, world_size, 5, owners=True, device=device)


def test_bf16_both_ways_where_everything_is_work_of_an_accelerators_streams(ranks_on_streams, ranks):
    config = Config("bf16", sum="two-shot", chunks=Chunks(nbytes=4096, in_flight=2))
    first, other = ranks_on_streams.run(trained, config, on_streams.DEVICE)
    on_cpu, _ = ranks.run(trained, config, "cpu", world_size=2)
    for (ours, *_), (theirs, *_), (plain, *_) in zip(first, other, on_cpu, strict=True):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-3)  # a tenth of AdamW's steps


def on_the_kernels(rank, world_size, library, update, dtype):
    """Parameters after each step on the CPU path, or with a `library` on the CUDA path."""
    config = Config(update, sum="two-shot", chunks=Chunks(1 << 20))
    way = Way(model=lambda: Net(dtype), config=config, update=update)
    with fake_cuda.path(library, config) as driver:
        found = train(way, rank, world_size, 3, owners=True)
        assert driver is None or {kernel for kernel, _ in driver.launches} >= {"pack", "unpack"}
        return [parameters for parameters, *_ in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("update", few(["bf16", "int8"], "int8"))
def test_the_gpus_kernels_give_owners_the_cpus_bits(ranks, kernels_library, update, dtype):
    cpu, cuda = (ranks.run(on_the_kernels, driver, update, dtype, world_size=2) for driver in (None, kernels_library))
    for own, other in zip(cpu, cuda, strict=True):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(own, other, strict=True))
