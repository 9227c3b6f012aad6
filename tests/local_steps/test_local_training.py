"""LocalSteps beside schedulers, accumulation, fused and foreach optimizers, GradScaler and averages of weights."""

import dataclasses

import pytest
import torch
from plain_simulation import Net, Run, simulated
from test_local_steps import flat, local_steps
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

SKIPPED = 4
"""The step at which the second rank's gradients overflow."""


@dataclasses.dataclass(frozen=True)
class Scheduled(Run):
    def optimizer(self, model):
        optimizer = super().optimizer(model)
        optimizer.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return optimizer

    def step(self, model, optimizer, rank, step):
        super().step(model, optimizer, rank, step)
        optimizer.schedule.step()


@dataclasses.dataclass(frozen=True)
class Accumulating(Run):
    def step(self, model, optimizer, rank, step):
        optimizer.zero_grad()
        for part in range(3):
            (self.loss(model, rank, 100 * part + step) / 3).backward()
        optimizer.step()


@dataclasses.dataclass(frozen=True)
class Fused(Run):
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.8, fused=True)


@dataclasses.dataclass(frozen=True)
class Foreach(Run):
    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.8, foreach=True)


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


def trained(rank, world_size, runs):
    """For each run: (the parameters after each step, on rank 0 those of the simulation)."""
    found = []
    for run in runs:
        model = Net()
        optimizer = run.optimizer(model)
        comm = local_steps(run, model, optimizer)
        seen = []
        for step in range(1, run.steps + 1):
            run.step(model, optimizer, rank, step)
            seen.append(flat(model).clone())
        comm.detach()
        found.append((seen, simulated(run, world_size)[0] if rank == 0 else None))
    return found


def check(seen, plain):
    for step, (ours, theirs) in enumerate(zip(seen, plain, strict=False), start=1):
        assert (ours - theirs).abs().max() <= 2e-6 * theirs.abs().max(), step


def test_schedulers_accumulation_fused_and_foreach_optimizers_change_no_merge(ranks):
    kinds = (Scheduled, Accumulating, Fused, Foreach)
    runs = [kind("corrected", every=4, delay=2, fragments=2, steps=11) for kind in kinds]
    outcomes = ranks.run(trained, runs, world_size=2)
    for index in range(len(runs)):
        plain = outcomes[0][index][1]
        for rank, outcome in enumerate(outcomes):
            check(outcome[index][0], plain[rank])


def scaled(rank, world_size, fused):
    """(parameters after each step that the optimizer made; steps counted; after finish(); the simulation's)."""
    run = (SkippingFused if fused else Skipping)("corrected", every=3, delay=1, fragments=2, steps=12)
    model = Net()
    optimizer = run.optimizer(model)
    comm = local_steps(run, model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    seen = []
    for step in range(1, run.steps + 1):
        optimizer.zero_grad()
        loss = Run.loss(run, model, rank, step) * (float("inf") if (rank, step) == (1, SKIPPED) else 1.0)
        scaler.scale(loss).backward()
        before = comm.steps
        scaler.step(optimizer)
        scaler.update()
        seen += [flat(model).clone()] if comm.steps > before else []
    steps, scale = comm.steps, scaler.get_scale()
    comm.finish()
    comm.detach()
    return seen, steps, scale, flat(model), simulated(run, world_size)[0][rank]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_grad_scaler_skips_on_one_rank_sets_no_rank_apart(ranks, fused):
    outcomes = ranks.run(scaled, fused, world_size=2)
    for rank, (seen, steps, scale, _, plain) in enumerate(outcomes):
        assert steps == len(seen) == 12 - (rank == 1 and not fused) and scale == (8.0 if rank else 16.0)
        check(seen, plain)
    assert torch.equal(outcomes[0][3], outcomes[1][3])


def averaged(rank, world_size):
    """(an average of weights, the same of the parameters after each step; whether finish() has changed it)."""
    run = Run("corrected", every=3, delay=1, steps=8)
    model = Net()
    optimizer = run.optimizer(model)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    comm = local_steps(run, model, optimizer)
    expected = None
    for step in range(1, run.steps + 1):
        run.step(model, optimizer, rank, step)
        ema.update_parameters(model)
        expected = flat(model).clone() if expected is None else expected.lerp(flat(model), 0.25)
    before = flat(ema.module).clone()
    comm.finish()
    comm.detach()
    return torch.allclose(before, expected, rtol=1e-6, atol=1e-7), torch.equal(before, flat(ema.module))


def test_an_average_of_weights_is_the_ranks_own_and_no_merge_changes_it(ranks):
    assert ranks.run(averaged, world_size=2) == [(True, True)] * 2


def finished(rank, world_size):
    """(parameters before finish(), and after it) where outer momentum has grown."""
    run = Run("nesterov", every=3, delay=0, fragments=2, steps=11)
    model = Net()
    optimizer = run.optimizer(model)
    comm = local_steps(run, model, optimizer)
    for step in range(1, run.steps + 1):
        run.step(model, optimizer, rank, step)
    before = flat(model).clone()
    comm.finish()
    comm.detach()
    return before, flat(model).clone()


def test_finish_averages_and_no_outer_momentum_moves_the_last_parameters(ranks):
    (first, after), (second, same) = ranks.run(finished, world_size=2)
    assert not torch.equal(first, second) and torch.equal(after, same)
    torch.testing.assert_close(after, (first + second) / 2, rtol=1e-5, atol=1e-6)
