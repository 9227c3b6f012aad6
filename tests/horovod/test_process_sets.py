"""Process sets wait for nobody outside. test_collectives.py has their collectives."""

import torch
from jobs import job, raised, values

import fusedcomm.horovod as hvd


def summed(members, shape, salt=0):
    return sum(values(other, shape, salt=salt) for other in members)


def check_first_sets(rank, size):
    first, second = hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3])
    assert first.process_set_id is None and first.size() is None and first.rank() is None
    with job(process_sets=[first, second]):
        mine, other = (first, second) if rank < 2 else (second, first)
        assert (first.process_set_id, second.process_set_id) == (1, 2)
        assert mine.size() == 2 and mine.rank() == rank % 2 and mine.included()
        assert not other.included() and other.size() == 2
        root = mine.ranks[1]
        if mine is second:  # it needs nothing of the others, which wait
            for i in range(10):
                result = hvd.allreduce(values(rank, (4,), salt=i), name="x", op=hvd.Sum, process_set=mine)
                assert torch.equal(result, summed([2, 3], (4,), salt=i))
        hvd.barrier()
        assert hvd.broadcast_object(("from", rank), root, process_set=mine) == ("from", root)
        assert hvd.allgather_object(rank, process_set=mine) == mine.ranks
        hvd.barrier(process_set=mine)
        weight = torch.nn.Parameter(values(rank, (4,)))
        plain = torch.optim.SGD([weight], lr=1.0)
        told = [raised(hvd.DistributedOptimizer, plain, process_set=hvd.ProcessSet([rank]))]
        optimizer = hvd.DistributedOptimizer(plain, process_set=first)
    assert first.process_set_id is None
    for is_used in (False, True):
        with job(process_sets=[first, second] if is_used else []):
            weight.sum().backward()
            told.append(raised(optimizer.step) if rank < 2 or is_used else None)
            if is_used:  # the ranks that have left the set have no hooks of the older one
                newer = hvd.DistributedOptimizer(plain, process_set=first, op=hvd.Sum)
                for _ in range(2):
                    weight.grad = None
                    weight.sum().backward()
                    newer.step() if first.included() else weight.sum().backward()
                assert weight.grad.unique().tolist() == [2.0]
        first.ranks, second.ranks = [2, 3], [0, 1]  # as after a change of ranks
    return told


def test_sets_given_to_init_do_not_wait_for_ranks_outside(ranks):
    for rank, (unknown, unused, changed) in enumerate(ranks.run(check_first_sets, world_size=4)):
        for kind, said in [unknown, *([unused] if rank < 2 else [])]:
            assert kind == "ValueError" and "is not in use" in said, said
        assert changed[0] == "ValueError" and "make a new hvd.DistributedOptimizer" in changed[1], changed
