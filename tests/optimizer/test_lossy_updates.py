"""Updates in bf16 and codes: parameters are equal on every rank, and what rounding takes from one is in the next."""

import fake_cuda
import on_streams
import pytest
import torch
from models import Gradients, integers, mean_of_integers, reducer_of
from owners import BUCKET_MIB, FP32
from sampling import few

import fusedcomm
from fusedcomm.config import Chunks, Config

SHAPES = ((33, 70), (50,), (90, 11), (7, 3))
LR = 1 / 64
# The greatest error of one rounding, in units of the greatest magnitude of what is rounded.
ERRORS = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11, "int8": 0.5 / 127, "fp8": 2.0**-4, "int4": 0.17}
WIRES = few(ERRORS, "bf16", "int8")


def constant_gradients(rank, world_size, update, steps, config=FP32, dtype=torch.float32):
    """The parameters of a Gradients after each step of SGD with gradients that never change, by parameter."""
    model = Gradients(*SHAPES, dtype=dtype)
    reducer = reducer_of(model, config, bucket_mib=BUCKET_MIB)
    optimizer = fusedcomm.ShardedOptimizer(reducer, torch.optim.SGD, lr=LR, update=update, quiet=True)
    # A thousandth keeps them off the numbers that the wires have.
    gradients = [(integers(rank, shape) + 0.001).to(model.weights[0]) for shape in SHAPES]
    seen = []
    for _ in range(steps):
        model.zero_grad()
        model(gradients).backward()
        optimizer.step()
        seen.append([p.detach().clone() for p in model.parameters()])
    if model.weights[0].device.type != "cpu":
        torch.accelerator.synchronize()
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


def both_ways(rank, world_size, wire, dtype, device):
    """The parameters after each step on a device, with gradients in the wire, too."""
    config = Config(wire, sum="two-shot", chunks=Chunks(nbytes=4096, in_flight=2))
    with torch.device(device):
        seen = constant_gradients(rank, world_size, wire, 5, config, dtype)
    return [each.cpu() for step in seen for each in step]


@pytest.mark.parametrize(
    ("wire", "dtype"), [("int8", torch.float32), ("int4", torch.float32), ("bf16", torch.bfloat16)]
)
def test_an_accelerators_streams_give_the_cpus_bits(ranks_on_streams, ranks, wire, dtype):
    on_cpu = ranks.run(both_ways, wire, dtype, "cpu", world_size=2)
    on_device = ranks_on_streams.run(both_ways, wire, dtype, on_streams.DEVICE)
    for ours, theirs in zip(on_device, on_cpu, strict=True):
        assert all(map(torch.equal, ours, theirs))


def on_the_kernels(rank, world_size, library):
    """The parameters after each step on the CPU path, or with a `library` on the CUDA path, in one chunk."""
    config = Config("int8", sum="two-shot", chunks=Chunks(1 << 20))
    with fake_cuda.path(library, config) as driver:
        seen = constant_gradients(rank, world_size, "int8", 3, config, torch.bfloat16)
        assert driver is None or {kernel for kernel, _ in driver.launches} >= {"pack", "unpack"}
        return [each for step in seen for each in step]


def test_the_gpus_kernels_give_owners_the_cpus_bits(ranks, kernels_library):
    cpu, cuda = (ranks.run(on_the_kernels, driver, world_size=2) for driver in (None, kernels_library))
    for ours, theirs in zip(cpu, cuda, strict=True):
        assert all(map(torch.equal, ours, theirs))
