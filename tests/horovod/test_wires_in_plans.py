"""Sums in a wire through the coordinator: plans, ranks that leave them, and what becomes of residuals then."""

import random

import pytest
import torch
from models import integers, normal
from star import star

from fusedcomm.config import Chunks, Config, Feedback
from fusedcomm.horovod.wire_texts import text_of

SHAPES = {"a": (50, 101), "b": (64, 77), "c": (33, 300), "d": (91, 90), "bias": (300,)}


def submitted(coordinator, name: str, tensor: torch.Tensor, wire: str, op: int = 1) -> int:
    return coordinator.submit(kind="allreduce", name=name, inputs=[tensor], outputs=[tensor], op=op, wire=wire)


def one_step(coordinator, order: list[str], tensors: dict, wire: str, waits_for_each: bool) -> None:
    """Sums `tensors`. waits_for_each: whether the next one is submitted only when the one before has ended."""
    handles = []
    for name in order:
        handles.append(submitted(coordinator, name, tensors[name], wire))
        if waits_for_each:
            assert coordinator.wait(handles[-1]).error == ""
    for handle in [] if waits_for_each else handles:
        assert coordinator.wait(handle).error == ""


def leaving_plans(rank, size, wire, make, num_steps):
    """Returns each name's sum of all results, what was given, the residuals, and the coordinator's counts."""
    engines, order, names = {}, random.Random(rank), list(SHAPES)
    given = {name: make(rank + 10 * index, shape) for index, (name, shape) in enumerate(SHAPES.items())}
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    with star(rank, size, 2, fusion_nbytes=60000, engines_by_wire=engines) as coordinator:
        for step in range(num_steps):
            is_leaving = step % 8 == 7 and step // 8 % size == rank
            tensors = {name: tensor.clone() for name, tensor in given.items()}
            # The plan's last bucket first, and nothing else until it has ended.
            mine = sorted(names, reverse=True) if is_leaving else order.sample(names, len(names))
            one_step(coordinator, mine, tensors, wire, is_leaving)
            for name, result in tensors.items():
                total[name] += result
        stats = coordinator.stats()
        residuals = {name: values.view(SHAPES[name]) for name, values in engines[wire].residuals().items()}
    return total, given, residuals, (stats.num_plans, stats.num_planned_buckets, stats.num_voided)


def ints(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return integers(seed, shape)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("wire", ["bf16", text_of(Config("fp16", chunks=Chunks(4096)))])
def test_a_rank_that_leaves_a_plan_spoils_no_sum(ranks, size, wire):
    outcome = ranks.run(leaving_plans, wire, ints, 40, world_size=size)
    for total, _, _, (num_plans, num_planned, _) in outcome:
        assert num_plans > 1 and num_planned > 0
        for name in SHAPES:
            assert torch.equal(total[name], 40 * sum(given[name] for _, given, _, _ in outcome))
    assert any(num_voided for *_, (_, _, num_voided) in outcome)


def normals(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return normal(seed % 10, seed // 10, shape)


@pytest.mark.parametrize("size", [2, 3])
def test_error_feedback_loses_nothing_when_ranks_leave_plans(ranks, size):
    wire = text_of(Config("int4", feedback=Feedback(), chunks=Chunks(4096)))
    outcome = ranks.run(leaving_plans, wire, normals, 40, world_size=size)
    assert any(num_voided for *_, (_, _, num_voided) in outcome)
    for name, shape in SHAPES.items():
        given = 40 * sum(given[name].double() for _, given, _, _ in outcome)
        left_out = sum(residuals.get(name, torch.zeros(shape)).double() for _, _, residuals, _ in outcome)
        assert (left_out.abs().max() > 0.01) == (name != "bias")
        for total, _, _, _ in outcome:
            torch.testing.assert_close(total[name].double() + left_out, given, rtol=0, atol=2e-3)
