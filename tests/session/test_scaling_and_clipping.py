"""torch.amp.GradScaler and torch.nn.utils.clip_grad_norm_ with every front end and wire, where one rank alone has an
Inf, or the wire overflows."""

import contextlib
import math

import pytest
import torch
from front_ends import adding_up
from models import Gradients, integers, synchronized, whole

from fusedcomm.config import Config

FRONT_ENDS = ("hook", "hook with views", "reducer", "DataParallel", "FSDP2")


WIRES = ("fp32", "bf16", "fp16", "int8", "fp8", "int4")
TOLERANCES = {"int8": 0.15, "fp8": 1.2, "int4": 2.5}
"""Of a mean of integers up to 8, which is rounded twice."""
SHAPES = ((40, 50), (300,), (7,))
WAYS = ("plain", "two optimizers", "fused SGD", "unused", "frozen", "accumulated", "float64")
# FSDP2 itself has no fused SGD on DTensors.
CASES = [(end, way) for end in FRONT_ENDS for way in WAYS if (end, way) != ("FSDP2", "fused SGD")]
# Parameter of rank 1 that is not finite, its value, and whether unscale_() and clipping come before step().
STEPS = (
    (None, 0.0, False),
    (0, math.inf, False),
    (2, math.nan, True),
    (None, 0.0, True),
    (2, math.inf, True),
    (0, math.nan, True),
    (0, -math.inf, False),
    (2, math.nan, False),
    (None, 0.0, False),
)


class Used(Gradients):
    """Gradients, of which some may be None: their parameters are not used."""

    def forward(self, gradients):
        pairs = zip(self.weights, gradients, strict=True)
        return sum((weight * gradient).sum() for weight, gradient in pairs if gradient is not None)


def config_of(front_end, wire):
    """With a lossy wire also for small buckets, which sum="auto" sums exactly."""
    return Config(wire, sum="auto" if wire == "fp32" or front_end == "FSDP2" else "two-shot", wires={"1d": wire})


def gradients_of(rank, way, front_end):
    """Parameter 1 is frozen, or not used by rank 1, with FSDP2 by no rank."""
    gradients = [integers(rank, shape) for shape in SHAPES]
    if way == "frozen" or (way == "unused" and (rank == 1 or front_end == "FSDP2")):
        gradients[1] = None
    return gradients


def means_of(world_size, way, front_end, accumulate):
    of_ranks = [gradients_of(rank, way, front_end) for rank in range(world_size)]
    return [
        accumulate / world_size * sum((of[i] for of in of_ranks if of[i] is not None), torch.zeros(shape))
        for i, shape in enumerate(SHAPES)
    ]


def one_rank_alone(rank, world_size, front_end, way, wire):
    model = Used(*SHAPES, dtype=torch.float64 if way == "float64" else torch.float32)
    model.weights[1].requires_grad_(way != "frozen")
    config = config_of(front_end, wire)
    forward, comm = synchronized(front_end, model, config, find_unused=way == "unused" and front_end != "FSDP2")
    weights = list(model.weights)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    parts = [weights[:2], weights[2:]] if way == "two optimizers" else [weights]
    optimizers = [torch.optim.SGD(part, 1.0, fused=way == "fused SGD") for part in parts]
    accumulate = 2 if way == "accumulated" else 1
    means = means_of(world_size, way, front_end, accumulate)
    for bad, value, unscales in STEPS:
        model.zero_grad()
        scale, before = scaler.get_scale(), [whole(p) for p in weights]
        gradients = gradients_of(rank, way, front_end)
        if bad is not None and rank == 1:
            gradients[bad].view(-1)[-2] = value
        for part in range(accumulate):
            with contextlib.nullcontext() if part + 1 == accumulate else adding_up(forward, comm):
                scaler.scale(forward(gradients)).backward()
        if unscales:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            if bad is None:
                norm = whole(torch.nn.utils.clip_grad_norm_(weights, 1e6))
                expected = torch.cat([mean.flatten() for mean in means]).norm()
                assert abs(norm / expected - 1) < (0.2 if wire in TOLERANCES else 1e-2)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (scale if bad is None else scale / 2), (bad, value)
        for i, (p, old) in enumerate(zip(map(whole, weights), before, strict=True)):
            if bad is None:
                tolerance = accumulate * TOLERANCES.get(wire, 0.0)
                torch.testing.assert_close(old - p, means[i].to(p.dtype), rtol=0, atol=tolerance)
            else:
                # Torch lets an optimizer step whose own gradients are finite.
                is_skipped = len(optimizers) == 1 or (i < 2) == (bad < 2)
                assert torch.equal(p, old) if is_skipped else p.isfinite().all(), (bad, value, i)
    comm.detach()
    return scaler.get_scale()


@pytest.mark.sampled(by=lambda found, wire: {"front end": found[0], "way": found[1], "wire": wire})
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("found", CASES, ids=", ".join)
def test_an_inf_on_one_rank_skips_the_step_on_every_rank(ranks, found, wire):
    ranks.run(one_rank_alone, *found, wire, world_size=2)


# ---- a wire that overflows


def overflowing(rank, world_size, front_end):
    """The scales of the steps. A step is skipped or right."""
    model = Gradients(*SHAPES)
    forward, comm = synchronized(front_end, model, config_of(front_end, "fp16"))
    weights = list(model.weights)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=1000)
    optimizer = torch.optim.SGD(weights, 1.0)
    means = [sum(integers(r, shape) for r in range(world_size)) / world_size for shape in SHAPES]
    scales = []
    for _ in range(12):
        optimizer.zero_grad()
        scale, before = scaler.get_scale(), [whole(p) for p in weights]
        scaler.scale(forward([integers(rank, shape) for shape in SHAPES])).backward()
        scaler.step(optimizer)
        scaler.update()
        is_skipped = scaler.get_scale() < scale
        for p, old, mean in zip(map(whole, weights), before, means, strict=True):
            assert torch.equal(old - p, torch.zeros_like(mean) if is_skipped else mean)
        scales.append(scaler.get_scale())
    comm.detach()
    return scales


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_wire_that_overflows_has_the_scale_lowered_on_every_rank(ranks, front_end):
    first, second = ranks.run(overflowing, front_end, world_size=2)
    assert first == second and 2.0**11 < first[-1] == first[-2] <= 2.0**14
