"""LocalSteps: what is saved goes on with the bits of the run that saved it, and with other ranks."""

import dataclasses

import pytest
import torch
from local_jobs import Job, flat
from plain_simulation import Run

from fusedcomm.config import Chunks, Config


@dataclasses.dataclass(frozen=True)
class AdamW(Run):
    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=0.01)


@dataclasses.dataclass(frozen=True)
class Plain(Run):
    """Its optimizer has no state."""

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr)


@dataclasses.dataclass(frozen=True)
class InBf16(Run):
    """The merged state has more bits than its parameters, until finish()."""

    def model(self):
        return super().model().bfloat16()


FP32 = Run(every=6, delay=4, steps=23)
WIDE = dataclasses.replace(FP32, width=100)
SHARDED = AdamW(every=4, delay=3, steps=9)
RESUMED = {
    2: [
        (FP32, "fp32", ""),
        (InBf16(**vars(FP32)), "fp32", ""),
        (WIDE, "int4", ""),
    ],
    3: [
        (WIDE, "int4", ""),
        (WIDE, Config("int8", chunks=Chunks(4096)), ""),
    ],
    4: [
        (WIDE, Config("int4", hosts=[[0, 2], [1, 3]]), ""),
        (SHARDED, "fp32", "fsdp"),
    ],
}
"""By the number of ranks: (run, config, what is inside hosts)"""


def resumed(rank, world_size, cases):
    """For each case: whether a run that was saved ends with the bits of one that went on. It is saved again as soon as
    it is loaded."""
    found = []
    for run, config, inside in cases:
        at = run.steps - run.delay - 1
        whole = Job(run, rank, config, inside)
        whole.train(range(at))
        whole.comm.finish()
        saved, merges = whole.save(), whole.comm.stats().merges
        whole.train(range(at, 2 * run.steps))
        assert whole.comm.stats().merges > merges
        whole.comm.detach()
        for _ in range(2):
            job = Job(run, rank, config, inside)
            job.load(saved)
            saved = job.save()
            job.comm.detach()
        job = Job(run, rank, config, inside)
        job.load(saved)
        job.train(range(at, 2 * run.steps))
        job.comm.detach()
        found.append(torch.equal(flat(job.model), flat(whole.model)))
    return found


@pytest.mark.check
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_loaded_state_goes_on_as_the_run_that_saved_it(ranks, world_size):
    cases = RESUMED[world_size]
    assert ranks.run(resumed, cases, world_size=world_size) == [[True] * len(cases)] * world_size


def part_of_a_job(rank, world_size, run, inside, files, first, last):
    """Trains samples [first, last) from a checkpoint of any rank with the same shard: (this rank's checkpoint, its
    parameters, the samples of its replica)."""
    num_shards = 2 if inside else 1
    job = Job(run, rank, "int8", inside)
    if files:
        job.load(files[rank % len(files)])
    samples = range(first + rank // num_shards, last, world_size // num_shards)
    job.train(samples)
    job.comm.finish()
    file = job.save()
    return file, job.finish(), samples if rank % num_shards == 0 else []


@pytest.mark.parametrize("inside", ["", "fsdp"])
def test_training_goes_on_with_fewer_replicas_and_with_more_again(ranks, inside):
    run = Plain(every=4, delay=1)
    files, seen, num_shards = None, [], 2 if inside else 1
    for replicas, first, last in ((2, 0, 20), (1, 20, 30), (2, 30, 50)):
        outcomes = ranks.run(part_of_a_job, run, inside, files, first, last, world_size=replicas * num_shards)
        for rank, (_, parameters, samples) in enumerate(outcomes):
            assert torch.equal(parameters, outcomes[rank % num_shards][1])
            seen += samples
        files = [file for file, _, _ in outcomes]
    assert sorted(seen) == list(range(50))
