"""Ranks with fewer batches join, and the others go on."""

import pytest
import torch
from jobs import REDUCED, job, raised, reduced, values
from patience import patient

import fusedcomm.horovod as hvd
from fusedcomm.horovod import ops
from fusedcomm.horovod.world import world


def check_uneven(rank, size):
    """Rank r has r + 2 batches. Rank 0 joins first."""
    with job():
        for _ in range(3):
            for batch in range(rank + 2):
                members = [other for other in range(size) if batch < other + 2]
                for i in range(3):
                    own = values(rank, (4 + i,), salt=batch)
                    result = hvd.allreduce(own, name=f"w{i}" if i else None, op=hvd.Sum)
                    assert torch.equal(result, sum(values(other, (4 + i,), salt=batch) for other in members))
            assert hvd.join() == size - 1
            # Unnamed operations work again, although the ranks have submitted different numbers of them.
            assert torch.equal(hvd.allgather(torch.tensor([rank])), torch.arange(size))


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_may_have_different_numbers_of_batches(ranks, size):
    ranks.run(check_uneven, world_size=size)


MOVING = [
    lambda: hvd.allgather(torch.ones(2), name="x"),
    lambda: hvd.broadcast(torch.ones(2), hvd.size() - 1, name="x"),
    lambda: hvd.alltoall(torch.ones(hvd.size()), name="x"),
    lambda: hvd.reducescatter(torch.ones(hvd.size()), name="x"),
]


def check_joined(rank, size):
    """The others' operations when rank 1 has joined: reductions of their values, and nothing else."""
    others = [other for other in range(size) if other != 1]
    with job():
        if rank != 1:
            for dtype in REDUCED:
                numbers = [values(other, (5,), dtype, salt=1) for other in others]
                for op in (hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
                    found = hvd.allreduce(numbers[others.index(rank)], name="x", op=op)
                    assert torch.equal(found, reduced(numbers, op)), f"{dtype} {op}: {found}"
            average = hvd.allreduce(torch.full((2,), float(size)), name="average")
            assert average.tolist() == [size - 1.0] * 2, "all ranks count in an average"
            group = hvd.grouped_allreduce([values(rank, (3,)), values(rank, (2, 2))], name="group", op=hvd.Sum)
            assert torch.equal(group[1], sum(values(other, (2, 2)) for other in others))
            for call in MOVING:
                kind, said = raised(call)
                assert kind == "HorovodInternalError" and "join" in said.lower(), said
                assert hvd.allreduce(torch.ones(1), name="y", op=hvd.Sum).tolist() == [size - 1.0]
        hvd.join()


def test_a_rank_that_has_joined_changes_no_reduction_and_others_are_refused(ranks):
    ranks.run(check_joined, world_size=3)


def check_optimizers(rank, size):
    """Rank 0 joins before its first step, and the others step with one of two optimizers, with sparse gradients."""
    with job():
        table, weight = torch.nn.Embedding(5, 2, sparse=True), torch.nn.Parameter(torch.zeros(3))
        for parameters in ([table.weight], [weight]):
            torch.nn.init.zeros_(parameters[0])
        first = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters())
        second = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)], op=hvd.Sum)
        for step in range(2 * rank):
            for optimizer in (first, second):
                optimizer.zero_grad()
            ((table(torch.tensor([step])) * size).sum() + (weight * (rank + 1)).sum()).backward()
            for optimizer in (second, first) if step % 2 else (first, second):
                optimizer.step()
        last = hvd.join()
        assert last == size - 1
        return weight.tolist(), table.weight.sum(1).tolist()


def test_optimizers_of_ranks_that_have_joined_add_zeros(ranks):
    found = ranks.run(check_optimizers, world_size=3)
    assert found[0] == ([0.0] * 3, [0.0] * 5), "a rank that has joined steps no more"
    assert found[1] == ([-10.0] * 3, [-4.0, -4.0, 0.0, 0.0, 0.0])
    assert found[2] == ([-16.0] * 3, [-4.0, -4.0, -2.0, -2.0, 0.0])


def check_what_came_before(rank, size):
    """Rank 1 has submitted two operations before it joins: one of a process set, and one that waits for the word about
    a refused one of the same name."""
    two, patience = hvd.ProcessSet([0, 1]), str(patient(20))
    with job(process_sets=[two], HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=patience), pytest.MonkeyPatch.context() as patch:
        ones, handles = torch.ones(3), []
        if rank == 0:
            handles.append(hvd.allreduce_async(ones, op=hvd.Sum, name="of the set", process_set=two))
        hvd.barrier()
        if rank == 1:
            nowhere = torch.ones(3, device="meta")
            assert raised(hvd.allreduce, nowhere, op=hvd.Sum, name="x")[0] == "ValueError"
            patch.setattr(ops, "join_all", lambda: world().store.set("rank 1 has joined", "1"))
            of_all = hvd.allreduce_async(ones, op=hvd.Sum, name="x")
            # Without a pause, so that the join finds it in the queue.
            handles += [hvd.allreduce_async(ones, op=hvd.Sum, name="of the set", process_set=two), of_all]
            hvd.join()
        else:
            world().store.wait(["rank 1 has joined"])
            assert raised(hvd.allreduce, ones, op=hvd.Sum, name="x")[0] == "HorovodInternalError"
            handles.append(hvd.allreduce_async(ones, op=hvd.Sum, name="x"))
        results = [hvd.synchronize(handle).tolist() for handle in handles]
        if rank != 1:
            hvd.join()
        # What the others have heard of rank 1 twice would now stand for what it has not submitted yet.
        if rank == 1:
            hvd.barrier()
        handles = [hvd.allreduce_async(ones, op=hvd.Sum, name="x")]
        if rank != 2:
            handles.append(hvd.allreduce_async(ones, op=hvd.Sum, name="of the set", process_set=two))
        if rank != 1:
            hvd.barrier()
        return results + [hvd.synchronize(handle).tolist() for handle in handles]


def test_what_a_rank_has_submitted_before_it_joins_has_its_part(ranks):
    of_set, of_all = [2.0] * 3, [3.0] * 3
    by_rank = [of_set, of_all, of_all, of_set]
    assert ranks.run(check_what_came_before, world_size=3) == [by_rank, by_rank, [of_all] * 2]
