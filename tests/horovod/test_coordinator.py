"""The coordinator by itself: submissions in any order, and the name of a rank that submits nothing. Errors, joins and
the end are tested through the calls."""

import random

import pytest
import torch
from star import star

from fusedcomm.native import _C


def _sum(coordinator, name, value, **options):
    out = torch.empty_like(value)
    return coordinator.submit(kind="allreduce", name=name, inputs=[value], outputs=[out], **options)


def _value(rank: int, index: int, step: int, numel: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32) % 7 - (rank + 1) * (index % 5 + 1) + step


def _total(size: int, index: int, step: int, numel: int) -> torch.Tensor:
    return sum(_value(rank, index, step, numel) for rank in range(size))


def _random_order(rank, size):
    with star(rank, size, fusion_nbytes=4096) as c:
        order = random.Random(rank)
        names = list(range(20))
        for step in range(6):
            order.shuffle(names)
            handles = {}
            for i in names:
                value = _value(rank, i, step, 10 * i)
                out = value if i % 2 else torch.empty_like(value)  # in place for odd ones
                handles[i] = c.submit(kind="allreduce", name=f"x{i}", inputs=[value], outputs=[out])
            order.shuffle(names)
            for i in names:
                result = c.wait(handles[i])
                assert result.error == ""
                torch.testing.assert_close(result.outputs[0], _total(size, i, step, 10 * i), rtol=0, atol=0)
        return c.stats().num_requests


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_may_submit_in_its_own_order(ranks, size):
    assert ranks.run(_random_order, world_size=size) == [120] * size


def _stall(rank, size):
    said = []
    with star(rank, size, said=said, stall_warning_s=0.2) as c:
        if rank == 0:
            handle = _sum(c, "late", torch.ones(1))
            while not any("allreduce.late" in text for text in said):
                torch.zeros(1).add_(1)
            c.wait(c.submit(kind="barrier", name="b", inputs=[], outputs=[]))
        else:
            c.wait(c.submit(kind="barrier", name="b", inputs=[], outputs=[]))
            handle = _sum(c, "late", torch.ones(1))
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
