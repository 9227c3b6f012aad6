"""The coordinator: submissions in any order, plans, deviations, errors, the end."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from patience import patient
from star import star

from fusedcomm.native import _C


def _sum(coordinator, name, value, **options):
    out = torch.empty_like(value)
    return coordinator.submit(kind="allreduce", name=name, inputs=[value], outputs=[out], **options)


def _value(rank: int, index: int, step: int, numel: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32) % 7 - (rank + 1) * (index % 5 + 1) + step


def _total(size: int, index: int, step: int, numel: int) -> torch.Tensor:
    return sum(_value(rank, index, step, numel) for rank in range(size))


def _random_order(rank, size, plan_after, steps):
    with star(rank, size, plan_after, fusion_nbytes=4096) as c:
        order = random.Random(rank)
        names = list(range(20))
        for step in range(steps):
            order.shuffle(names)
            handles = {i: _sum(c, f"x{i}", _value(rank, i, step, 10 * i)) for i in names}
            order.shuffle(names)
            for i in names:
                result = c.wait(handles[i])
                assert result.error == ""
                torch.testing.assert_close(result.outputs[0], _total(size, i, step, 10 * i), rtol=0, atol=0)
        stats = c.stats()
        return stats.num_plans, stats.num_planned_buckets, stats.num_voided, stats.num_control_messages


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_rank_may_submit_in_its_own_order(ranks, size):
    for num_plans, planned, _, _ in ranks.run(_random_order, 0, 6, world_size=size):
        assert (num_plans, planned) == (0, 0)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_equal_cycles_become_a_plan_and_the_results_stay_right(ranks, size):
    for num_plans, planned, _, _ in ranks.run(_random_order, 2, 20, world_size=size):
        assert num_plans >= 1 and planned > 0


def _steady(rank, size):
    with star(rank, size, 2) as c:
        x = torch.full((100,), rank + 1.0)

        def steps(count):
            for _ in range(count):
                assert c.wait(_sum(c, "x", x)).outputs[0][0] == size * (size + 1) / 2

        steps(20)
        before = c.stats()
        steps(50)
        after = c.stats()
        dist.barrier()  # the other rank's end takes messages
        return (
            after.num_control_messages - before.num_control_messages,
            after.num_planned_buckets - before.num_planned_buckets,
        )


def test_the_steady_state_sends_no_control_message(ranks):
    for messages, planned in ranks.run(_steady, world_size=2):
        assert (messages, planned) == (0, 50)


def _deviate(rank, size):
    with star(rank, size, 2) as c:
        for step in range(60):
            names = [0, 1, 2, 3]
            if step % 15 == 14:
                names = [4, 0, 1, 2] if step % 2 else [3, 5]
            if rank % 2:
                names = names[::-1]
            handles = []
            values = {}
            for i in names:
                value = _value(rank, i, step, 50)
                out = value if i % 2 else torch.empty_like(value)  # in place for odd ones
                values[i] = _total(size, i, step, 50)
                handle = c.submit(kind="allreduce", name=f"x{i}", inputs=[value], outputs=[out])
                handles.append((i, handle))
            for i, handle in handles:
                result = c.wait(handle)
                assert result.error == ""
                torch.testing.assert_close(result.outputs[0], values[i], rtol=0, atol=0)
        return c.stats().num_plans


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_that_leaves_the_plan_spoils_no_result(ranks, size):
    for num_plans in ranks.run(_deviate, world_size=size):
        assert num_plans >= 1


def _one_after_another(rank, size):
    """x and y are submitted together at first, and then y only after x has ended."""
    with star(rank, size, 2) as c:
        for step in range(40):
            x, y = _value(rank, 0, step, 30), _value(rank, 1, step, 30)
            if step < 10:
                handles = [_sum(c, "x", x), _sum(c, "y", y)]
                results = [c.wait(handle) for handle in handles]
            else:
                results = [c.wait(_sum(c, "x", x)), c.wait(_sum(c, "y", y))]
            for i, result in enumerate(results):
                torch.testing.assert_close(result.outputs[0], _total(size, i, step, 30), rtol=0, atol=0)
        return c.stats().num_voided, c.stats().num_plans


@pytest.mark.parametrize("size", [2, 3])
def test_results_stay_right_when_names_no_longer_come_together(ranks, size):
    for _, num_plans in ranks.run(_one_after_another, world_size=size):
        assert num_plans >= 1


def _tuned(rank, size, log):
    tuning = {
        "autotune": True,
        "autotune_warmup_samples": 1,
        "autotune_steps_per_sample": 3,
        "autotune_log": log if rank == 0 else "",
    }
    order = random.Random(rank)
    with star(rank, size, 2, tuning=tuning, fusion_nbytes=2 << 20) as c:
        for step in range(60):
            names = list(range(6))
            order.shuffle(names)
            handles = {i: _sum(c, f"x{i}", _value(rank, i, step, 200_000)) for i in names}
            for i in names:
                torch.testing.assert_close(
                    c.wait(handles[i]).outputs[0], _total(size, i, step, 200_000), rtol=0, atol=0
                )
        return c.stats().num_plans


@pytest.mark.parametrize("size", [1, 2, 3])
def test_autotune_tries_sizes_of_buckets_and_keeps_one(ranks, size, tmp_path):
    log = tmp_path / "log.csv"
    for num_plans in ranks.run(_tuned, str(log), world_size=size):
        assert num_plans >= 5
    lines = [line.split(",") for line in log.read_text().splitlines()[1:]]
    assert [int(nbytes) >> 20 for nbytes, _, _ in lines] == [2, 1, 4, 16, 64]
    assert [kept for _, _, kept in lines].count("1") == 1
    least = min(float(seconds) for _, seconds, _ in lines)
    assert [float(seconds) for _, seconds, kept in lines if kept == "1"] == [least]


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
    with star(rank, size, 2) as c:
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


def _stopped(rank, size, wire, stall_warning_s):
    said = []
    _, store = dist.distributed_c10d._world.pg_map[dist.group.WORLD]
    with star(rank, size, 2, said=said, stall_warning_s=stall_warning_s) as c:
        for _ in range(20):
            c.wait(_sum(c, "x", torch.ones(4), wire=wire))
        assert c.stats().num_planned_buckets > 0
        if rank == 2:
            store.set("stopped", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        stopped = int(store.get("stopped"))
        while Path(f"/proc/{stopped}/stat").read_text().rsplit(") ", 1)[1][0] != "T":
            time.sleep(0.01)
        time.sleep(1.5 * stall_warning_s)  # without a control message, as under any plan
        handles = [_sum(c, "x", torch.ones(4), wire=wire), _sum(c, "not of the plan", torch.ones(4), wire=wire)]
        if rank == 0:
            while not said:
                time.sleep(0.01)
            os.kill(stopped, signal.SIGKILL)
        assert all(c.wait(handle).error for handle in handles)
    return said


@pytest.mark.parametrize("wire", ["", "int8"])
def test_under_a_plan_the_rank_that_is_stopped_is_named_alone(ranks, wire):
    """The others answer, although a bucket of theirs waits for it."""
    outcomes = ranks.outcomes(_stopped, wire, patient(0.5), world_size=3, lost=2)
    kind, said = outcomes[0]
    assert kind == "value", said
    assert "connections stand: 2. " in said[0] and not any("rank 1" in text for text in said), said


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
        rank=0, size=1, sockets=[], fusion_nbytes=1, plan_after=3, stall_warning_s=0.0, stall_shutdown_s=0.0,
        say=print, open_engine=lambda set_id, wire: None,
    )  # fmt: skip
    with_one.shutdown()
    assert "rank 0" in with_one.failure
