"""Wrong calls raise the right type of error, name what was seen, and leave the next operation working."""

import contextlib
import os
import signal
import time

import torch
from jobs import job, raised, values

import fusedcomm
import fusedcomm.horovod as hvd

LOCAL = {
    "a list": (lambda: hvd.allreduce([1.0]), "expected a tensor, got list"),
    "a dtype": (lambda: hvd.allreduce(torch.zeros(2, dtype=torch.complex64)), "complex64"),
    "bytes summed": (lambda: hvd.allreduce(torch.zeros(2, dtype=torch.uint8)), "uint8"),
    "strides": (lambda: hvd.allreduce(torch.zeros(4, 4).t()[1:]), "not contiguous"),
    "a sparse tensor": (lambda: hvd.allreduce(torch.eye(3).to_sparse()), "sparse_allreduce_async"),
    "both op and average": (lambda: hvd.allreduce(torch.zeros(1), average=True, op=hvd.Sum), "op=hvd.Average"),
    "an unknown op": (lambda: hvd.allreduce(torch.zeros(1), op=9), "op=9"),
    "a scalar gathered": (lambda: hvd.allgather(torch.tensor(1.0)), "scalar"),
    "a scalar scattered": (lambda: hvd.reducescatter(torch.tensor(1.0)), "scalar"),
    "no such root": (lambda: hvd.broadcast(torch.zeros(1), 7), "root_rank=7"),
    "uneven rows": (lambda: hvd.alltoall(torch.zeros(2 * hvd.size() + 1)), "evenly"),
    "splits too large": (lambda: hvd.alltoall(torch.zeros(2), [2] * hvd.size()), "splits=[2"),
    "negative splits": (lambda: hvd.alltoall(torch.zeros(2), [-1] + [1] * (hvd.size() - 1)), "none negative"),
    "too few splits": (lambda: hvd.alltoall(torch.zeros(2), [2]), "one for each rank"),
    "splits of floats": (lambda: hvd.alltoall(torch.zeros(2), torch.ones(hvd.size())), "int32"),
    "no group": (lambda: hvd.grouped_allreduce([]), "no tensors"),
    "a tensor as group": (lambda: hvd.grouped_allreduce(torch.zeros(2)), "list of tensors"),
    "splits of flags": (lambda: hvd.alltoall(torch.zeros(2), [True] * hvd.size()), "whole numbers"),
    "an unknown handle polled": (lambda: hvd.poll(123456), "handle 123456"),
    "an unknown handle": (lambda: hvd.synchronize(123456), "handle 123456"),
    "a negative handle": (lambda: hvd.synchronize(-1), "handle -1"),
    "a tensor as handle": (lambda: hvd.synchronize(torch.zeros(1)), "what allreduce_async()"),
    "no handle": (lambda: hvd.poll(None), "handle None"),
    "a dense sparse": (lambda: hvd.sparse_allreduce_async(torch.zeros(2), "x"), "sparse_coo"),
    "no timeline": (lambda: hvd.start_timeline("/tmp/none"), "HOROVOD_TIMELINE"),
    "mpi": (hvd.mpi_threads_supported, "MPI"),
    "a generator": (lambda: hvd.broadcast_parameters(iter([]), 0), "list(model.named_parameters())"),
}


def check_local(rank, size):
    with job():
        for what, (call, text) in LOCAL.items():
            kind, said = raised(call)
            assert kind == "ValueError" and text in said, f"{what}: {kind}: {said}"
            assert torch.equal(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(size)))
        kind, said = raised(hvd.reducescatter, torch.zeros(4), op=hvd.Adasum)
        assert kind == "HorovodInternalError" and "Adasum" in said


def test_a_wrong_argument_is_a_value_error_that_names_it(ranks):
    ranks.run(check_local, world_size=2)


COMPRESSED = {
    "allreduce": lambda compression: hvd.allreduce(torch.zeros(2), compression=compression),
    "grouped_allreduce": lambda compression: hvd.grouped_allreduce([torch.zeros(2)], compression=compression),
    "reducescatter": lambda compression: hvd.reducescatter(torch.zeros(2), compression=compression),
    "grouped_reducescatter": lambda compression: hvd.grouped_reducescatter([torch.zeros(2)], compression=compression),
    "DistributedOptimizer": lambda compression: hvd.DistributedOptimizer(
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], 0.1), compression=compression
    ),
    "Adasum": lambda compression: hvd.DistributedOptimizer(
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], 0.1), compression=compression, op=hvd.Adasum
    ),
}


def check_compressions(rank, size):
    with job():
        for what, call in COMPRESSED.items():
            for wrong, text in (
                ("int8", "pass hvd.Compression.int8"),
                ("int3", "hvd.Compression.of(fusedcomm.Config(wire=…))"),
                (None, "pass hvd.Compression.none"),
                (hvd.Compression, "hvd.Compression.int4"),
                (fusedcomm.Config("int8"), "pass hvd.Compression.of(config)"),
                (8, "compression=8, of type int, is no compressor"),
            ):
                kind, said = raised(call, wrong)
                assert kind == "TypeError" and text in said, f"{what}({wrong!r}): {kind}: {said}"
        assert torch.equal(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(size)))


def test_what_is_no_compression_is_a_type_error_that_says_what_to_pass(ranks):
    ranks.run(check_compressions, world_size=2)


def check_splits_of_one_rank(rank, size):
    with job():
        said = []
        for name in (None, "named"):
            splits = [1] * size if rank != 1 else [-1] * size
            said.append(raised(hvd.alltoall, torch.zeros(size), splits, name))
            rows, _ = hvd.alltoall(torch.full((size,), float(rank)), [1] * size)
            assert rows.tolist() == [float(other) for other in range(size)]
        return said


def test_splits_that_are_wrong_on_one_rank_are_an_error_on_all(ranks):
    for rank, said in enumerate(ranks.run(check_splits_of_one_rank, world_size=3)):
        for kind, text in said:
            assert kind == ("ValueError" if rank == 1 else "HorovodInternalError"), text
            assert "splits=[-1, -1, -1] are not possible for 3 rows and 3 ranks" in text
            assert rank == 1 or "rank 1 cannot take part" in text


INTS = (torch.int32, torch.int64)
NEGOTIATED = {
    "shape": lambda rank: hvd.allreduce(torch.zeros(3 + rank), name="x"),
    "dims": lambda rank: hvd.allreduce(torch.zeros((2,) * (rank + 1)), name="x"),
    "dtype": lambda rank: hvd.allreduce(torch.zeros(3, dtype=(torch.float32, torch.float64)[rank % 2]), name="x"),
    "op": lambda rank: hvd.allreduce(torch.zeros(3), name="x", op=(hvd.Sum, hvd.Min)[rank % 2]),
    "prescale": lambda rank: hvd.allreduce(torch.zeros(3), name="x", prescale_factor=1.0 + rank),
    "postscale": lambda rank: hvd.allreduce(torch.zeros(3), name="x", postscale_factor=1.0 + rank),
    "group": lambda rank: hvd.grouped_allreduce([torch.zeros(3)] * (1 + rank), name="x"),
    "gathered columns": lambda rank: hvd.allgather(torch.zeros(3, 1 + rank), name="x"),
    "gathered dtype": lambda rank: hvd.allgather(torch.zeros(3, dtype=INTS[rank % 2]), name="x"),
    "root": lambda rank: hvd.broadcast(torch.zeros(3), rank, name="x"),
    "broadcast shape": lambda rank: hvd.broadcast(torch.zeros(3 + rank), 0, name="x"),
    "alltoall columns": lambda rank: hvd.alltoall(torch.zeros(hvd.size(), 1 + rank), name="x"),
    "alltoall dtype": lambda rank: hvd.alltoall(torch.zeros(hvd.size(), dtype=INTS[rank % 2]), name="x"),
    "scattered shape": lambda rank: hvd.reducescatter(torch.zeros(4, 1 + rank), name="x"),
    "scattered op": lambda rank: hvd.reducescatter(torch.zeros(4), name="x", op=(hvd.Sum, hvd.Average)[rank % 2]),
}  # fmt: skip


def check_negotiated(rank, size):
    with job():
        for round in range(3):  # the ranks must not remember an agreement from before the error, or the error
            for what, call in NEGOTIATED.items():
                kind, said = raised(call, rank)
                assert kind == "HorovodInternalError", f"{what}: {kind}: {said}"
                assert "x" in said and "rank" in said, f"{what}: {said}"
                if what == "shape":
                    told = [r for r in range(size) if f"rank {r}" in said and f"[{3 + r}]" in said]
                    assert "allreduce.x" in said and len(told) == 2, said
                ok = hvd.allreduce(values(rank, (3,)), name="x", op=hvd.Sum)
                assert torch.equal(ok, sum(values(other, (3,)) for other in range(size))), f"after {what}, {round}"


def test_ranks_that_disagree_all_get_an_error_and_the_next_operation_works(ranks):
    ranks.run(check_negotiated, world_size=3)


def check_duplicates(rank, size):
    with job():
        for start, args in [
            (hvd.allreduce_async, ()),
            (hvd.allgather_async, ()),
            (hvd.broadcast_async, (0,)),
            (hvd.reducescatter_async, ()),
        ]:
            # Rank 0 holds the others up, so the first is pending while the second is submitted.
            if rank != 0:
                first = start(torch.ones(size), *args, name="twice")
                kind, said = raised(start, torch.ones(size), *args, name="twice")
                assert kind == "ValueError" and "twice" in said
                hvd.barrier()
            else:
                hvd.barrier()
                first = start(torch.ones(size), *args, name="twice")
            hvd.synchronize(first)


def test_a_name_that_is_pending_is_a_value_error(ranks):
    ranks.run(check_duplicates, world_size=2)


def before_init(rank, size):
    calls = [
        hvd.rank,
        hvd.size,
        hvd.local_rank,
        hvd.cross_size,
        lambda: hvd.allreduce(torch.zeros(1)),
        lambda: hvd.grouped_allreduce([torch.zeros(1)]),
        lambda: hvd.broadcast_object(1),
        hvd.join,
        hvd.barrier,
        lambda: hvd.add_process_set([0]),
        lambda: hvd.start_timeline("x"),
    ]
    for call in calls:
        kind, said = raised(call)
        assert kind == "ValueError" and "hvd.init()" in said
    assert not hvd.is_initialized()
    hvd.shutdown()


def test_a_call_before_init_says_so(ranks):
    ranks.run(before_init, world_size=1)


def pending_at_shutdown(rank, size):
    hvd.init()
    if rank == 0:
        hvd.shutdown()
        hvd.init()
    else:
        kind, said = raised(hvd.allreduce, torch.zeros(3), name="never")
        assert kind == "HorovodInternalError", said
        kind, said = raised(hvd.allreduce, torch.zeros(3))
        assert kind == "HorovodInternalError", said
        hvd.shutdown()
        hvd.init()
    assert torch.equal(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), float(size)))
    hvd.barrier()
    hvd.shutdown()


def test_a_shutdown_ends_pending_and_later_operations_on_every_rank_until_the_next_init(ranks):
    ranks.run(pending_at_shutdown, world_size=3)


def with_a_lost_rank(rank, size):
    hvd.init()
    hvd.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    kind, said = raised(hvd.allreduce, torch.zeros(3), name="never")
    with contextlib.suppress(Exception):
        hvd.shutdown()
    return kind, said, time.monotonic() - began


def test_a_rank_that_is_killed_is_named_to_the_others(ranks):
    outcomes = ranks.outcomes(with_a_lost_rank, world_size=3, lost=1)
    for other in (0, 2):
        how, (kind, said, _) = outcomes[other]
        assert how == "value" and kind == "HorovodInternalError"
        assert "rank 1" in said, said


def changed_in_flight(rank, size):
    with job(FUSEDCOMM_HOROVOD_CHECK="1"):
        good = values(rank, (4,))
        hvd.synchronize(hvd.allreduce_async(good, name="good"))
        hvd.allreduce_(good, name="good in place")
        tensor = values(rank, (4,))
        handle = hvd.allreduce_async(tensor, name="weights")
        tensor.add_(1)
        return raised(hvd.synchronize, handle)


def test_the_debug_mode_finds_a_tensor_that_was_changed_in_flight(ranks):
    for kind, said in ranks.run(changed_in_flight, world_size=2):
        assert kind == "RuntimeError" and "weights" in said and "changed in place" in said


def gradient_changed_in_flight(rank, size):
    with job(FUSEDCOMM_HOROVOD_CHECK="1"):
        model = torch.nn.Linear(4, 2, bias=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        model(values(rank, (3, 4))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(values(rank, (3, 4))).sum().backward()
        model.weight.grad.mul_(2)
        return raised(optimizer.step)


def test_the_debug_mode_finds_a_gradient_that_was_changed_in_flight(ranks):
    for kind, said in ranks.run(gradient_changed_in_flight, world_size=2):
        assert kind == "RuntimeError" and "weight" in said and "changed in place" in said
