"""Ranks that stop, are lost or submit nothing are told to the others. tests/refusals has what is refused."""

import contextlib
import gc
import logging
import os
import signal

import pytest
import torch
from jobs import job, raised
from patience import patient

import fusedcomm.horovod as hvd
from fusedcomm.horovod import order
from fusedcomm.horovod.world import world
from fusedcomm.log import LOGGER


def pending_at_shutdown(rank, size):
    hvd.init()
    if rank == 0:
        hvd.shutdown()
    else:
        for name in ("never", None):
            kind, said = raised(hvd.allreduce, torch.zeros(3), name=name)
            assert kind == "HorovodInternalError", said
        hvd.shutdown()
    with job():
        assert torch.equal(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), float(size)))


def test_a_shutdown_ends_pending_and_later_operations_on_every_rank_until_the_next_init(ranks):
    ranks.run(pending_at_shutdown, world_size=3)


def with_a_lost_rank(rank, size):
    hvd.init()
    hvd.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    told = raised(hvd.allreduce, torch.zeros(3), name="never")
    with contextlib.suppress(Exception):
        hvd.shutdown()
    return told


def test_a_rank_that_is_killed_is_named_to_the_others(ranks):
    outcomes = ranks.outcomes(with_a_lost_rank, world_size=3, lost=1)
    for how, told in (outcomes[0], outcomes[2]):
        assert how == "value" and told[0] == "HorovodInternalError" and "rank 1" in told[1], told


def with_a_silent_rank(rank, size, stops):
    """Whether the order has ended with nothing left behind, after each rank has given up by itself. stops: rank 2 is
    stopped meanwhile, and its connections stay open."""
    hvd.init()
    pids = hvd.allgather_object(os.getpid())
    found, store = world().order, world().store
    if stops and rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif stops:
        with open(f"/proc/{pids[2]}/stat") as stat:
            while stat.read().rpartition(")")[2].split()[0] != "T":
                stat.seek(0)
    found.fail("a rank is silent")
    has_ended = found.shutdown()
    hvd.shutdown()
    if rank == 1:
        store.set("rank 1 has ended", "1")
    elif stops and rank == 0:
        store.wait(["rank 1 has ended"])
        os.kill(pids[2], signal.SIGCONT)
    return has_ended


@pytest.mark.parametrize("stops", [False, True])
def test_ranks_that_have_given_up_end_although_one_is_stopped(ranks, stops):
    assert ranks.run(with_a_silent_rank, stops, world_size=3) == [True] * 3


def with_a_broken_comparison(rank, size):
    """The ranks disagree, and rank 0 cannot tell why when rank 1's operation arrives."""

    def broken(*_):
        raise RuntimeError("the comparison is broken")

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(hvd.HorovodInternalError), job():
        patch.setattr(order, "mismatch", broken)
        if rank == 1:
            hvd.barrier()
        handle = hvd.allreduce_async(torch.zeros(2 + rank), name="x")
        if rank == 0:
            hvd.barrier()
        told = raised(hvd.synchronize, handle)
    return told


def test_what_a_function_of_rank_0_raises_is_told_to_every_rank(ranks):
    for kind, said in ranks.run(with_a_broken_comparison, world_size=2):
        assert kind == "HorovodInternalError" and "the comparison is broken" in said, said
        assert "ended its connection" not in said


def refusals(rank, size):
    """Rank 1 refuses an operation twice, and then submits it, before the others come to the first time. Returns how
    many requests are left."""
    with job(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=str(patient(10))):
        if rank == 0:
            hvd.barrier()
        for _ in range(2):
            kind, _ = raised(hvd.alltoall, torch.zeros(2), [-1, 1] if rank == 1 else [1, 1], name="x")
            assert kind == ("ValueError" if rank == 1 else "HorovodInternalError")
        handle = hvd.alltoall_async(torch.ones(2), [1, 1], name="x")
        if rank == 1:
            hvd.barrier()
        assert hvd.synchronize(handle)[0].tolist() == [1.0, 1.0]
        del handle
        gc.collect()
        return sum(type(each) is order.Request for each in gc.get_objects())


def test_each_refusal_is_told_and_forgotten(ranks):
    assert ranks.run(refusals, world_size=2) == [0, 0]


class Fails:
    """A compressor whose compress() fails for vectors."""

    compress = staticmethod(lambda tensor: (tensor, 1 // (tensor.dim() - 1)))
    decompress = staticmethod(lambda tensor, context: tensor)


def step_with(compression):
    weights = [torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,), (2, 2))]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, 0.1), compression=compression, op=hvd.Max)
    sum(weight.sum() for weight in weights).backward()
    optimizer.step()


ONE_SIDED = [
    lambda wrong: hvd.allreduce(torch.ones(2), compression=hvd.Compression.int8 if wrong else hvd.Compression.none),
    lambda wrong: hvd.grouped_allreduce([torch.ones(2)], compression=Fails if wrong else hvd.Compression.none),
    lambda wrong: hvd.reducescatter(torch.ones(2), name="x", compression=Fails if wrong else hvd.Compression.none),
    lambda wrong: hvd.allreduce(torch.ones(2, dtype=torch.int16 if wrong else torch.int32)),
    lambda wrong: hvd.broadcast(torch.ones(2, 2).t() if wrong else torch.ones(2, 2), 0, name="x"),
    lambda wrong: hvd.grouped_allgather([] if wrong else [torch.ones(2)], name="x"),
    lambda wrong: hvd.reducescatter(torch.ones(2), op=hvd.Max if wrong else hvd.Sum),
    lambda wrong: hvd.sparse_allreduce_async(torch.ones(2) if wrong else torch.ones(2).to_sparse(), name="x")(),
    lambda wrong: hvd.alltoall(torch.zeros(2), [-1, -1] if wrong else [1, 1]),
    lambda wrong: hvd.broadcast_object(contextlib.suppress if not wrong else os.scandir(), root_rank=1),
    lambda wrong: hvd.allgather_object([] if not wrong else os.scandir()),
    lambda wrong: step_with(Fails if wrong else hvd.Compression.none),
]


def one_sided(rank, size):
    """What each rank is told when rank 1 alone calls an operation wrongly; then it calls it as the others do."""
    with job(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=str(patient(10))):
        told = []
        for call in ONE_SIDED:
            told.append(raised(call, True) if rank == 1 else raised(call, False))
            call(False)
    return told


def test_what_one_rank_alone_does_wrong_is_told_to_the_others(ranks):
    for (kind, said), (_, own) in zip(*ranks.run(one_sided, world_size=2), strict=True):
        assert kind == "HorovodInternalError" and f"rank 1 cannot take part: {own}" in said, (said, own)


def refused_alone(rank, size):
    """Why rank 0 has ended, after rank 1 alone has made a mistaken call and the limit for stalls has passed."""
    logged, handler = [], logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    LOGGER.addHandler(handler)
    failure, limits = "", dict(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="0.1", HOROVOD_STALL_CHECK_TIME_SECONDS="1")
    try:
        with contextlib.suppress(hvd.HorovodInternalError), job(**limits):
            store, found = world().store, world().order
            if rank == 1:
                raised(hvd.allreduce, None, name="alone")
                store.wait(["rank 0 has seen it"])
            else:
                while not found.failure and not any("allreduce.alone" in text for text in logged):
                    torch.zeros(1).add_(1)
                failure = found.failure
                store.set("rank 0 has seen it", "1")
    finally:
        LOGGER.removeHandler(handler)
    return failure


def test_a_mistaken_call_that_no_other_rank_makes_is_named_and_ends_nothing(ranks):
    assert ranks.run(refused_alone, world_size=2) == ["", ""]


def stalls(rank, size):
    """What is logged when rank 1 submits a tensor late, and the error when it never does."""
    logged, handler = [], logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    LOGGER.addHandler(handler)
    late = dict(name="late", op=hvd.Sum)
    try:
        with job(HOROVOD_STALL_CHECK_TIME_SECONDS="0.2"):
            if rank == 1:
                hvd.barrier()
            handle = hvd.allreduce_async(torch.ones(1), **late)
            if rank == 0:
                while not any("allreduce.late" in text for text in logged):
                    torch.zeros(1).add_(1)
                hvd.barrier()
            assert hvd.synchronize(handle).tolist() == [size]
    finally:
        LOGGER.removeHandler(handler)
    with contextlib.suppress(hvd.HorovodInternalError), job(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="0.2"):
        told = raised(hvd.barrier) if rank == 1 else raised(hvd.allreduce, torch.ones(1), **late)
    return logged, told


def test_a_rank_that_does_not_submit_is_named_with_the_tensor(ranks):
    outcome = ranks.run(stalls, world_size=2)
    assert any("rank 1" in text and "allreduce.late" in text for text in outcome[0][0])
    for _, (kind, said) in outcome:
        assert kind == "HorovodInternalError" and "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=0.2" in said, said
