"""LocalSteps: gradients that GradScaler finds too large, statistics, plan and trace."""

import dataclasses
import json
import uuid

import pytest
import torch
from local_jobs import Job, flat
from plain_simulation import Run, simulated
from test_local_steps import check

# ---- GradScaler

SKIPPED = 4
"""The step at which the second host's gradients overflow."""


@dataclasses.dataclass(frozen=True)
class Fused(Run):
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.8, fused=True)


@dataclasses.dataclass(frozen=True)
class Skipping(Run):
    """What a rank does with GradScaler: a step that overflows is no step, so its next one comes in its place."""

    def loss(self, model, rank, step):
        return super().loss(model, rank, step + (rank == 1 and step >= SKIPPED))


@dataclasses.dataclass(frozen=True)
class SkippingFused(Fused):
    """A fused optimizer skips by itself: it makes a step that changes nothing."""

    def step(self, model, optimizer, rank, step):
        if rank != 1 or step != SKIPPED:
            super().step(model, optimizer, rank, step)


def scaled(rank, world_size, run, shards):
    """(parameters after each step that the optimizer made; steps counted; scale; parameters after finish()). shards: a
    name for the mesh's dimension, of FSDP2 inside hosts; empty: each rank is a host."""
    job = Job(run, rank, inside="fsdp" if shards else "", shards=shards)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    overflows = 2 if shards else 1  # of one shard of the second host
    seen = []
    for step in range(1, run.steps + 1):
        job.optimizer.zero_grad()
        scaler.scale(run.loss(job.model, rank, step)).backward()
        if (rank, step) == (overflows, SKIPPED):
            gradient = next(job.model.parameters()).grad
            (gradient.to_local() if shards else gradient)[0, 0] = torch.inf
        before = job.comm.merges.steps
        scaler.step(job.optimizer)
        scaler.update()
        seen += [flat(job.model)] if job.comm.merges.steps > before else []
    return seen, job.comm.merges.steps, scaler.get_scale(), job.finish()


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_grad_scaler_skips_on_one_rank_sets_no_rank_apart(ranks, fused):
    kind, plain = (Fused, SkippingFused) if fused else (Run, Skipping)
    options = {"every": 3, "delay": 1, "steps": 12}
    outcomes = ranks.run(scaled, kind(**options), "", world_size=2)
    expected = simulated(plain(**options), 2)
    for rank, (seen, steps, scale, _) in enumerate(outcomes):
        assert steps == len(seen) == 12 - (rank == 1 and not fused) and scale == (8.0 if rank else 16.0)
        check(seen, expected[rank])
    assert torch.equal(outcomes[0][3], outcomes[1][3])


def test_a_host_whose_grad_scaler_skips_a_step_is_not_set_apart(ranks):
    # torch keeps what it has found for a mesh, its groups included, for equal meshes of later tests: this one is new.
    run = Run(every=3, delay=1, steps=9)
    outcomes = ranks.run(scaled, run, f"shards {uuid.uuid4().hex}")
    assert [steps for _, steps, _, _ in outcomes] == [9, 9, 8, 8]
    assert all(torch.equal(outcomes[rank][3], outcomes[rank + 2][3]) for rank in (0, 1))


# ---- what is told


def told(rank, world_size, path):
    job = Job(Run(every=4, delay=2, width=100), rank, "int4")
    with job.comm.trace(path):
        job.train(range(1, 13))
    stats, plan = job.comm.stats(), job.comm.plan()
    job.comm.detach()
    return stats, plan, str(plan)


def test_statistics_plan_and_trace(ranks, tmp_path):
    for stats, plan, text in ranks.run(told, str(tmp_path / "{rank}.json"), world_size=2):
        assert (stats.steps, stats.merges, stats.under_way) == (12, 2, 1)
        assert 0 < stats.agreement <= 1 and 0 < stats.drift < 1
        assert stats.scalars()["merges"] == 2 and "drift" in str(stats)
        (row,) = plan.rows
        assert row.wire == "int4" and "a merge every 4 steps, 2 steps late, int4, 2 ranks" in text
        assert plan.state_nbytes == plan.grad_nbytes and plan.sent_nbytes == row.sent_nbytes
        assert "memory" in text
    names = {event.get("name", "") for event in json.loads((tmp_path / "1.json").read_text())["traceEvents"]}
    assert any("pack" in name or "sum" in name for name in names), names
