"""A comparison with a reference fails if only one side is NaN: in verify_every, in the fallback, and in the figures of
the benchmarks and the demo."""

import math
import shutil
import sys
import warnings
from pathlib import Path

import fake_cuda
import pytest
import torch
from models import Gradients, synchronize, worst
from sampling import few
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Checks, Config, Fallback
from fusedcomm.tools.demo.report import Spread

NUMEL = 3000
needs_driver = pytest.mark.skipif(
    torch.cuda.is_available() or shutil.which("g++") is None,
    reason="the fake CUDA driver needs g++ and a machine without a GPU",
)


def signed(rank: int, step: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * step + rank))


def verified(gradients, config) -> tuple[list[float], list[str], list[str], list[torch.Tensor]]:
    """Takes a step with each of `gradients`. Returns the relative errors, the wire after each step, this rank's
    warnings, and the results."""
    ddp = DistributedDataParallel(Gradients((NUMEL,)))
    wires, told, results = [], [], []
    comm = fusedcomm.attach(ddp, config, quiet=True)
    for gradient in gradients:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results += synchronize(ddp, [gradient])
        told += [str(w.message) for w in caught if "fusedcomm" in str(w.message)]
        wires += [bucket.wire for bucket in comm.plan().buckets]
    errors = [row.relative_error for row in comm.stats().verified]
    comm.detach()
    return errors, wires, told, results


def too_large_for_the_wire(rank, world_size, fallback=None):
    """From step 2 on the mean of one element exceeds the range of fp16."""
    gradients = [signed(rank, step) for step in range(7)]
    for gradient in gradients[2:]:
        gradient[7] = -1e5
    return verified(gradients, Config("fp16", "two-shot", checks=Checks(verify_every=1, fallback=fallback)))


def test_a_result_that_is_not_finite_where_it_should_be_is_infinitely_off(ranks):
    for rank, (errors, _, told, results) in enumerate(ranks.run(too_large_for_the_wire, world_size=3)):
        assert all(error < 0.01 for error in errors[:2]) and errors[2:] == [math.inf] * 5
        assert results[-1][7] == -torch.inf
        assert len(told) == (rank == 0)  # one warning, on rank 0 only
    said = ranks.run(too_large_for_the_wire, world_size=2)[0][2][0]
    assert "1 elements" in said and "bucket 0" in said and "in step 2" in said and "wire='bf16'" in said, said


def test_and_falls_back(ranks):
    fallback = Fallback(0.5, wire="fp32")
    for rank, (errors, _, told, results) in enumerate(ranks.run(too_large_for_the_wire, fallback, world_size=3)):
        assert errors[2] == math.inf and errors[-1] < 1e-6 and results[-1][7] == -1e5
        assert [("Fallback(error=0.5)" in text) for text in told] == ([False, True] if rank == 0 else [])


def overflowing(rank, world_size, wire):
    """In every other step the gradients of rank 1 have an Inf and a NaN, as with a GradScaler whose scale is too
    large."""
    gradients = [signed(rank, step) for step in range(8)]
    for gradient in gradients[1::2]:
        if rank == 1:
            gradient[5], gradient[2000] = torch.inf, torch.nan
    checks = Checks(verify_every=1, fallback=Fallback(0.9, wire="fp32"))
    return verified(gradients, Config(wire, "two-shot", wires={"1d": wire}, checks=checks))


@pytest.mark.sampled(by=lambda wire: {"scales": wire != "fp16"})
@pytest.mark.parametrize("wire", ["fp16", "int8", "int4"])
def test_gradients_that_are_not_finite_are_no_fault_of_the_wire(ranks, wire):
    for errors, wires, told, results in ranks.run(overflowing, wire, world_size=2):
        assert all(math.isnan(error) for error in errors[1::2]) and all(error < 0.5 for error in errors[::2]), errors
        assert set(wires) == {wire} and not told
        assert not results[1][5].isfinite() and not results[1][2000].isfinite()


def by_faulty_kernels(rank, world_size, library, fault, fallback=None):
    """Trains with a faulty unpack kernel. `fault`: "made" if it writes NaN although it should not, "lost" if it writes
    zero although the gradient is NaN."""
    fake = fake_cuda.gpu(library)
    own = fake._run

    def faulty(*args) -> None:
        own(*args)
        kernel, arguments = fake.launches[-1]
        if kernel == "unpack":
            arguments["grads"].view(torch.float32).fill_(torch.nan if fault == "made" else 0.0)

    gradients = [signed(rank, step) for step in range(6)]
    for gradient in gradients:
        gradient[0] = torch.nan if fault == "lost" and rank == 0 else gradient[0]
    checks = Checks(verify_every=1, fallback=fallback)
    config = Config("int8", "two-shot", wires={"1d": "int8"}, checks=checks)
    fake._run = faulty
    try:
        with fake.takes_over(config):
            return verified(gradients, config)
    finally:
        fake._run = own


@needs_driver
@pytest.mark.parametrize("fault", few(["made", "lost"], "made"))
def test_a_kernel_that_makes_or_loses_a_nan_is_found_out(ranks, library, fault):
    pytest.importorskip("triton", reason="the CUDA path's kernels are Triton's")
    for rank, (errors, _, told, _) in enumerate(ranks.run(by_faulty_kernels, library, fault, world_size=2)):
        assert errors == [math.inf] * 6
        assert len(told) == (rank == 0) and all("1 elements" in text for text in told), told
    fallback = Fallback(0.5)
    for _, wires, _, _ in ranks.run(by_faulty_kernels, library, fault, fallback, world_size=2):
        assert wires[0] == "int8" and wires[-1] == "bf16"


def test_the_worst_of_some_errors_is_a_nan_if_one_is(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "bench"), *sys.path])
    from lib import common

    for function in (worst, common.worst):
        assert math.isnan(function([0.1, math.nan, 0.2])) and math.isnan(function([math.nan, 0.1]))
        assert function([0.25, 0.5, 0.125]) == 0.5


def test_a_spread_with_a_nan_has_no_range():
    spread = Spread.of([1.0, math.nan, 2.0])
    assert all(map(math.isnan, (spread.mean, spread.low, spread.high)))
