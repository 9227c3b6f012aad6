"""Ranks with fewer batches join, and the others go on."""

import pytest
import torch
from jobs import job, raised, values

import fusedcomm.horovod as hvd

NEUTRAL = [("Sum", hvd.Sum), ("Min", hvd.Min), ("Max", hvd.Max), ("Product", hvd.Product)]


def check_uneven(rank, size):
    """Rank r has r + 2 batches. Rank 0 joins first."""
    with job():
        for _ in range(3):
            for batch in range(rank + 2):
                members = [other for other in range(size) if batch < other + 2]
                for i in range(3):
                    own = values(rank, (4 + i,), salt=batch)
                    result = hvd.allreduce(own, name=f"w{i}", op=hvd.Sum)
                    assert torch.equal(result, sum(values(other, (4 + i,), salt=batch) for other in members))
            assert hvd.join() == size - 1
            # Unnamed operations work again, although the ranks have submitted different numbers of them.
            assert torch.equal(hvd.allgather(torch.tensor([rank])), torch.arange(size))


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_may_have_different_numbers_of_batches(ranks, size):
    ranks.run(check_uneven, world_size=size)


def check_identities(rank, size):
    with job():
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.float64):
            for name, op in NEUTRAL:
                if rank != 0:
                    numbers = [values(other, (5,), dtype, salt=1) for other in range(1, size)]
                    result = hvd.allreduce(numbers[rank - 1], name="x", op=op)
                    stacked = torch.stack(numbers)
                    expected = {
                        "Sum": lambda all: all.sum(0),
                        "Min": lambda all: all.amin(0),
                        "Max": lambda all: all.amax(0),
                        "Product": lambda all: all.prod(0),
                    }[name](stacked).to(dtype)
                    assert torch.equal(result, expected), f"{dtype} {name}: {result} instead of {expected}"
                    average = hvd.allreduce(torch.full((2,), float(size)), name="average")
                    assert torch.equal(average, torch.full((2,), float(size - 1))), "all ranks count in an average"
                hvd.join()


def test_a_rank_that_has_joined_changes_no_sum_minimum_maximum_or_product(ranks):
    ranks.run(check_identities, world_size=3)


def check_refused(rank, size):
    with job():
        for call in (
            lambda: hvd.allgather(torch.ones(2), name="x"),
            lambda: hvd.broadcast(torch.ones(2), size - 1, name="x"),
            lambda: hvd.alltoall(torch.ones(size), name="x"),
            lambda: hvd.reducescatter(torch.ones(size), name="x"),
        ):
            if rank != 0:
                kind, said = raised(call)
                assert kind == "HorovodInternalError" and "join" in said.lower(), said
                assert torch.equal(hvd.allreduce(torch.ones(1), name="y", op=hvd.Sum), torch.tensor([size - 1.0]))
            hvd.join()
            hvd.barrier()


def test_only_an_allreduce_is_possible_once_a_rank_has_joined(ranks):
    ranks.run(check_refused, world_size=3)


def check_grouped(rank, size):
    with job():
        if rank != 1:
            results = hvd.grouped_allreduce([values(rank, (3,)), values(rank, (2, 2))], name="g", op=hvd.Sum)
            others = [other for other in range(size) if other != 1]
            assert torch.equal(results[1], sum(values(other, (2, 2)) for other in others))
        hvd.join()


def test_a_group_is_reduced_without_a_rank_that_has_joined(ranks):
    ranks.run(check_grouped, world_size=3)
