"""LocalSteps: merges against a plain simulation, on the CPU and where all is work of an accelerator's streams
(tests/helpers/on_streams.py); ranks that stay equal to the bit."""

import dataclasses
import os
import signal

import fake_cuda
import on_streams
import pytest
import torch
from local_jobs import Job, flat
from models import error_of
from plain_simulation import Run, simulated

from fusedcomm.config import Chunks, Config, TwoLevels

DELAYS = (0, 1, 5)


def trained(rank, world_size, runs, config, device="cpu"):
    """For each run: (the parameters after each step, the merged state at the end)."""
    found = []
    for run in runs:
        job = Job(run, rank, config, device=device)
        seen = job.train(range(1, run.steps + 1))
        found.append(([each.cpu() for each in seen], job.merged()))
        job.comm.detach()
    return found


def check(seen, expected, tolerance=2e-6):
    """Against one rank of a simulation."""
    for step, ours in enumerate(seen, start=1):
        plain = expected.seen[step][0]
        assert (ours - plain).abs().max() <= tolerance * plain.abs().max(), step


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.check)])
def test_merges_do_what_a_plain_simulation_does(ranks, world_size, subtests):
    """A rank alone sends nothing, whatever the wire."""
    runs = [Run(7, delay, steps=20) for delay in DELAYS]
    outcomes = ranks.run(trained, runs, "int4" if world_size == 1 else "fp32", world_size=world_size)
    for run, *of_ranks in zip(runs, *outcomes, strict=True):
        with subtests.test(run=str(run)):
            expected = simulated(run, world_size)
            for (seen, merged), plain in zip(of_ranks, expected, strict=True):
                check(seen, plain)
                assert torch.equal(merged, of_ranks[0][1])
            of_plain = expected[0].seen[run.steps][1].sum().item()
            assert of_ranks[0][1].double().sum().item() == pytest.approx(of_plain, rel=1e-5)


@dataclasses.dataclass(frozen=True)
class Waiting(Run):
    """Checks that the host waits for the device only where a merge ends in the step in which it begins."""

    def step(self, model, optimizer, rank, step):
        optimizer.zero_grad()
        self.loss(model, rank, step).backward()
        torch.accelerator.synchronize()
        before = on_streams.waits()
        optimizer.step()
        ended = sum(self.steps_before(rank, message) == step for message in range(step))
        assert on_streams.waits() - before <= (0 if self.delay else ended), step


def on_device(rank, world_size, runs):
    config = Config("fp32", sum="two-shot", chunks=Chunks(nbytes=4096, in_flight=2))
    return trained(rank, world_size, runs, config, on_streams.DEVICE)


def test_on_streams_they_do_the_same_and_the_host_waits_only_for_merges_without_delay(ranks_on_streams, subtests):
    runs = [Waiting(7, delay, steps=15, width=100) for delay in DELAYS]
    outcomes = ranks_on_streams.run(on_device, runs, world_size=2)
    for run, *of_ranks in zip(runs, *outcomes, strict=True):
        with subtests.test(run=str(run)):
            for (seen, merged), plain in zip(of_ranks, simulated(Run(**vars(run)), 2), strict=True):
                check(seen, plain)
                assert torch.equal(merged, of_ranks[0][1])


def on_the_kernels(rank, world_size, library):
    """trained() of a run on the CPU path, or with a `library` on the CUDA path, in one chunk."""
    config = Config("int4", sum="two-shot", chunks=Chunks(1 << 20))
    with fake_cuda.path(library, config) as driver:
        found = trained(rank, world_size, [Run(every=3, delay=1, steps=7, width=100)], config)
        assert driver is None or {kernel for kernel, _ in driver.launches} >= {"pack", "reduce", "unpack"}
        return found


def test_the_gpus_kernels_merge_to_the_cpus_bits(ranks, kernels_library):
    cpu, cuda = (ranks.run(on_the_kernels, driver, world_size=2) for driver in (None, kernels_library))
    for ((seen, merged),), ((their_seen, their_merged),) in zip(cpu, cuda, strict=True):
        assert all(map(torch.equal, [*seen, merged], [*their_seen, their_merged]))


# ---- ranks that stay equal

INT4 = {"config": "int4"}
TWO_LEVELS = Config("int8", hosts=TwoLevels(2, local_wire="fp32"))
WIDE = Run(every=5, delay=2, steps=12, width=100)
EQUAL = [
    (2, WIDE, INT4),
    (3, WIDE, {"config": "bf16"}),
    (3, dataclasses.replace(WIDE, delay=1), INT4),
    (3, dataclasses.replace(WIDE, delay=0), INT4),
    (4, dataclasses.replace(WIDE, delay=1), {"config": TWO_LEVELS, "inside": "ddp", "process_group": None}),
    (4, WIDE, {"config": "bf16", "inside": "ddp"}),
    (4, WIDE, {**INT4, "inside": "fsdp", "gradients": "int8"}),
]
"""(ranks, run, options of Job)"""


def ended(rank, world_size, cases):
    """For each case: (parameters, merged state, parameters after finish(), the same after another one)."""
    found = []
    for run, options in cases:
        job = Job(run, rank, **options)
        job.train(range(run.steps))
        before, merged = flat(job.model), job.merged()
        # Plans and statistics are of this rank's shards alone.
        assert job.comm.plan().grad_nbytes == 4 * len(before) and job.comm.stats().drift > 0
        host = rank // 2 if "inside" in options else rank
        job.train(range(3 * host))  # finish() ends the merges of ranks that have made more steps
        job.comm.finish()
        first = flat(job.model)
        assert job.comm.stats().under_way == 0 and job.comm.stats().merges == job.comm.merges.num_begun
        job.train(range(9))
        found.append((before, merged, first, job.finish()))
    return found


def test_all_ranks_merge_and_end_with_equal_bits_also_after_unequal_steps(ranks, subtests):
    for world_size in (2, 3, 4):
        cases = [case for case in EQUAL if case[0] == world_size]
        outcomes = ranks.run(ended, [case[1:] for case in cases], world_size=world_size)
        for (_, _, options), *of_ranks in zip(cases, *outcomes, strict=True):
            with subtests.test(world_size=world_size, options=str(options)):
                num_shards = 2 if options.get("inside") == "fsdp" else 1
                for rank, (before, *equal) in enumerate(of_ranks):
                    of_first, *expected = of_ranks[rank % num_shards]
                    assert all(map(torch.equal, equal, expected))
                    is_apart = rank >= num_shards and (rank >= 2 or options.get("inside") != "ddp")
                    assert torch.equal(before, of_first) != is_apart, rank
                assert of_ranks[0][2].isfinite().all() and not torch.equal(*of_ranks[0][2:])


def killed(rank, world_size):
    """Rank 1 is killed after its snapshot was sent once; rank 0 ends with an error at the merge that it misses."""
    job = Job(Run(every=3, delay=1), rank)
    job.train(range(1, 6))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    text = error_of(RuntimeError, job.train, range(6, 9))
    job.comm.detach()
    return text


@pytest.mark.check
def test_a_lost_rank_is_named_at_the_next_merge(ranks):
    (kind, text), _ = ranks.outcomes(killed, world_size=2, lost=1)
    assert kind == "value" and "rank 1" in text and "bucket 0" in text, text
