"""Coordinators by themselves: sums in a wire, whose buckets hold other names in each step while residuals follow names,
and ranks that submit nothing. All else is tested through the calls."""

import random

import pytest
import torch
from models import integers, normal
from star import star

from fusedcomm.config import Chunks, Config, Feedback
from fusedcomm.horovod.wire_texts import text_of
from fusedcomm.native import _C

SHAPES = {"a": (50, 101), "b": (64, 77), "c": (33, 300), "d": (91, 90), "bias": (300,)}
NUM_STEPS = 12


def changing_buckets(rank, size, wire, make):
    """Returns each name's sum of all results, what was given in a step, and the residuals. In every third step a rank
    submits a name only when the one before has ended."""
    engines, order, names = {}, random.Random(rank), list(SHAPES)
    given = {name: make(rank + 10 * index, shape) for index, (name, shape) in enumerate(SHAPES.items())}
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    with star(rank, size, fusion_nbytes=60000, engines_by_wire=engines) as c:
        for step in range(NUM_STEPS):
            tensors = {name: tensor.clone() for name, tensor in given.items()}
            handles = []
            for name in names if step % 3 == 2 else order.sample(names, len(names)):
                x = tensors[name]
                signature = _C.CollectiveSignature(kind="allreduce", name=name, op=1, wire=wire)
                handles.append(c.submit(signature, [x], [x]))
                if step % 3 == 2:
                    assert c.wait(handles.pop()).error == ""
            assert all(c.wait(handle).error == "" for handle in handles)
            for name, result in tensors.items():
                total[name] += result
        residuals = {name: values.view(SHAPES[name]) for name, values in engines[wire].residuals().items()}
    return total, given, residuals


def ints(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return integers(seed, shape)


@pytest.mark.parametrize("wire", ["bf16", text_of(Config("fp16", chunks=Chunks(4096)))])
def test_sums_in_a_wire_are_right_whatever_is_in_a_bucket(ranks, wire):
    outcome = ranks.run(changing_buckets, wire, ints, world_size=3)
    for total, _, _ in outcome:
        for name in SHAPES:
            assert torch.equal(total[name], NUM_STEPS * sum(given[name] for _, given, _ in outcome))


def normals(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return normal(seed % 10, seed // 10, shape)


def test_error_feedback_loses_nothing_when_buckets_change(ranks):
    wire = text_of(Config("int4", feedback=Feedback(), chunks=Chunks(4096)))
    outcome = ranks.run(changing_buckets, wire, normals, world_size=2)
    for name, shape in SHAPES.items():
        given = NUM_STEPS * sum(given[name].double() for _, given, _ in outcome)
        left_out = sum(residuals.get(name, torch.zeros(shape)).double() for _, _, residuals in outcome)
        assert (left_out.abs().max() > 0.01) == (name != "bias")
        for total, _, _ in outcome:
            torch.testing.assert_close(total[name].double() + left_out, given, rtol=0, atol=2e-3)


def late(coordinator) -> int:
    signature = _C.CollectiveSignature(kind="allreduce", name="late")
    return coordinator.submit(signature, [torch.ones(1)], [torch.empty(1)])


def _stall(rank, size):
    said, barrier = [], _C.CollectiveSignature(kind="barrier", name="b")
    with star(rank, size, said=said, stall_warning_s=0.2) as c:
        if rank == 0:
            handle = late(c)
            while not any("allreduce.late" in text for text in said):
                torch.zeros(1).add_(1)
            c.wait(c.submit(barrier, [], []))
        else:
            c.wait(c.submit(barrier, [], []))
            handle = late(c)
        c.wait(handle)
    return said


def test_a_rank_that_does_not_submit_is_named_with_the_tensor(ranks):
    said = ranks.run(_stall, world_size=2)
    assert any("rank 1" in text and "allreduce.late" in text for text in said[0])


def test_one_process_needs_no_connection():
    with_one = _C.Coordinator(
        rank=0, size=1, sockets=[], fusion_nbytes=1, stall_warning_s=0.0, stall_shutdown_s=0.0,
        say=print, open_engine=lambda set_id, wire: None,
    )  # fmt: skip
    with_one.shutdown()
    assert "rank 0" in with_one.failure
