"""The coordinator: submissions in any order, errors, the end."""

import os
import random
import signal

import pytest
import torch
import torch.distributed as dist
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


def _mismatch(rank, size):
    with star(rank, size) as c:
        texts = []
        for name, value, options in [
            ("shape", torch.zeros(3 + rank), {}),
            ("dtype", torch.zeros(3, dtype=torch.float32 if rank else torch.float64), {}),
            ("op", torch.zeros(3), {"op": 1 + 2 * rank}),
            ("factor", torch.zeros(3), {"prescale": 1.0 + rank}),
        ]:
            texts.append(c.wait(_sum(c, name, value, **options)).error)
            assert c.wait(_sum(c, "good", torch.ones(2))).outputs[0].tolist() == [size, size]
        return texts


def test_ranks_that_differ_get_an_error_that_names_both(ranks):
    texts = ranks.run(_mismatch, world_size=2)
    assert texts[0] == texts[1]
    for text, words in zip(texts[0], [("[3]", "[4]"), ("Double", "Float"), ("Sum", "Min"), ("1", "2")], strict=True):
        assert "rank 0" in text and "rank 1" in text
        assert all(word in text for word in words)


def _kinds(rank, size):
    with star(rank, size) as c:
        gathered = c.wait(
            c.submit(kind="allgather", name="g", inputs=[torch.full((rank + 1, 2), rank)], outputs=[])
        ).outputs[0]
        assert gathered.tolist() == [[r, r] for r in range(size) for _ in range(r + 1)]
        x = torch.full((3,), float(rank))
        sent = c.wait(c.submit(kind="broadcast", name="b", inputs=[x], outputs=[torch.empty(3)], root=size - 1))
        assert sent.outputs[0].tolist() == [size - 1.0] * 3
        rows = torch.arange(size * (size + 1) // 2) + 100 * rank
        splits = [i + 1 for i in range(size)]
        got = c.wait(c.submit(kind="alltoall", name="a", inputs=[rows], outputs=[], splits=splits))
        assert got.received_splits == [[rank + 1] * size]
        at = rank * (rank + 1) // 2
        assert got.outputs[0].tolist() == [100 * r + at + i for r in range(size) for i in range(rank + 1)]
        part = c.wait(
            c.submit(kind="reducescatter", name="r", inputs=[torch.arange(size + 1.0)], outputs=[], op=0)
        ).outputs[0]
        assert part.tolist() == ([0.0, 1.0] if rank == 0 else [rank + 1.0])
        for op, want in [(3, -size + 0.0), (4, -1.0), (5, None)]:
            value = c.wait(_sum(c, f"op{op}", torch.tensor([-1.0 - rank]), op=op)).outputs[0].item()
            if want is not None:
                assert value == want
        half = c.wait(_sum(c, "half", torch.full((5,), 256.0 + rank, dtype=torch.bfloat16), op=0)).outputs[0]
        assert half.dtype == torch.bfloat16
        mean = sum(torch.tensor(256.0 + r).bfloat16().item() for r in range(size)) / size
        assert half[0].item() == torch.tensor(mean).bfloat16().item()
        if rank < size - 1:
            some = c.wait(_sum(c, "some", torch.ones(2), set_id=1)).outputs[0]
            assert some.tolist() == [size - 1.0] * 2
        else:
            with pytest.raises(ValueError, match="no member"):
                _sum(c, "some", torch.ones(2), set_id=1)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_collective(ranks, size):
    ranks.run(_kinds, world_size=size)


def _join(rank, size):
    with star(rank, size) as c:
        for step in range(5 + 3 * rank):
            left = [r for r in range(size) if step < 5 + 3 * r]
            result = c.wait(_sum(c, "x", torch.full((4,), rank + 1.0)))
            assert result.outputs[0].tolist() == [sum(r + 1.0 for r in left)] * 4
            least = c.wait(_sum(c, "least", torch.full((4,), rank + 1), op=3))
            assert least.outputs[0].tolist() == [min(left) + 1] * 4
        last = c.wait(c.submit(kind="join", name="noname", inputs=[], outputs=[])).number
        assert c.wait(_sum(c, "x", torch.ones(1))).outputs[0].item() == size
        return last


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_have_joined_add_nothing(ranks, size):
    assert ranks.run(_join, world_size=size) == [size - 1] * size


def _after_join(rank, size):
    with star(rank, size) as c:
        error = ""
        if rank != 0:
            c.wait(c.submit(kind="join", name="noname", inputs=[], outputs=[]))
        else:
            error = c.wait(c.submit(kind="allgather", name="g", inputs=[torch.ones(1)], outputs=[])).error
            c.wait(c.submit(kind="join", name="noname", inputs=[], outputs=[]))
        return error


def test_only_allreduce_goes_on_after_a_join(ranks):
    assert "allgather.g" in ranks.run(_after_join, world_size=2)[0]


def _duplicate(rank, size):
    with star(rank, size) as c:
        if rank == 0:
            handle = _sum(c, "x", torch.ones(1))
            with pytest.raises(ValueError, match=r"allreduce\.x"):
                _sum(c, "x", torch.ones(1))
            c.wait(c.submit(kind="barrier", name="b", inputs=[], outputs=[]))
        else:
            c.wait(c.submit(kind="barrier", name="b", inputs=[], outputs=[]))
            handle = _sum(c, "x", torch.ones(1))
        assert c.wait(handle).outputs[0].item() == size


def test_a_pending_name_is_refused_and_blocks_nothing(ranks):
    ranks.run(_duplicate, world_size=2)


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


def _shutdown(rank, size):
    with star(rank, size) as c:
        handle = None if rank == 1 else _sum(c, "never", torch.ones(1))
        dist.barrier()
        if rank == 1:
            c.shutdown()
        else:
            assert "rank 1" in c.wait(handle).error
        with pytest.raises(RuntimeError, match="rank 1"):
            _sum(c, "x", torch.ones(1))


@pytest.mark.parametrize("size", [2, 3])
def test_one_ranks_shutdown_ends_all(ranks, size):
    ranks.run(_shutdown, world_size=size)


def _lost(rank, size):
    with star(rank, size) as c:
        for _ in range(10):
            assert c.wait(_sum(c, "x", torch.ones(1000))).error == ""
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        errors = [c.wait(_sum(c, "x", torch.ones(1000))).error]
        with pytest.raises(RuntimeError, match="rank 1 ended its connection"):
            _sum(c, "x", torch.ones(1))
        return errors


def test_a_rank_that_dies_is_named(ranks):
    for kind, value in ranks.outcomes(_lost, world_size=3, lost=1):
        assert kind == "lost" or (kind == "value" and "rank 1 ended its connection" in value[0]), value


def test_one_process_needs_no_connection():
    with_one = _C.Coordinator(
        rank=0, size=1, sockets=[], fusion_nbytes=1, stall_warning_s=0.0, stall_shutdown_s=0.0,
        say=print, open_engine=lambda set_id, wire: None,
    )  # fmt: skip
    with_one.shutdown()
    assert "rank 0" in with_one.failure
