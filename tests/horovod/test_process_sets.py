"""Process sets run their collectives by themselves, and can be added and removed."""

import torch
from jobs import job, raised, values

import fusedcomm.horovod as hvd

DYNAMIC = dict(HOROVOD_DYNAMIC_PROCESS_SETS="1")


def summed(members, shape, salt=0):
    return sum(values(other, shape, salt=salt) for other in members)


def check_collectives(rank, size):
    even, odd = hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet(range(1, size, 2))
    assert even.process_set_id is None and even.size() is None and even.rank() is None
    with job(process_sets=[even, odd]):
        mine = even if rank % 2 == 0 else odd
        members, own = mine.ranks, values(rank, (5,))
        assert (even.process_set_id, odd.process_set_id) == (1, 2)
        assert mine.size() == len(members) and mine.rank() == members.index(rank) and mine.included()
        other = odd if mine is even else even
        assert not other.included() and other.size() == len(other.ranks)
        assert raised(other.rank)[0] == "ValueError"
        # Every set has an operation of the same name under way.
        for _ in range(5):
            assert torch.equal(hvd.allreduce(own, name="x", op=hvd.Sum, process_set=mine), summed(members, (5,)))
        assert torch.equal(hvd.allgather(own, process_set=mine), torch.cat([values(m, (5,)) for m in members]))
        root = members[-1]
        assert torch.equal(hvd.broadcast(own, root, process_set=mine), values(root, (5,)))
        rows, received = hvd.alltoall(own[: len(members)], [1] * len(members), process_set=mine)
        assert torch.equal(rows, torch.stack([values(m, (5,))[mine.rank()] for m in members]))
        share = hvd.reducescatter(own[: len(members)].clone(), op=hvd.Sum, process_set=mine)
        assert torch.equal(share, summed(members, (5,))[mine.rank() : mine.rank() + 1])
        grouped = hvd.grouped_allreduce([own, own * 2], op=hvd.Sum, process_set=mine)
        assert torch.equal(grouped[1], 2 * summed(members, (5,)))
        assert hvd.broadcast_object(("from", rank), root, process_set=mine) == ("from", root)
        hvd.barrier(process_set=mine)
        for call in (
            lambda: hvd.allreduce(own, process_set=other),
            lambda: hvd.broadcast(own, other.ranks[0], process_set=other),
            lambda: hvd.barrier(process_set=other),
        ):
            kind, said = raised(call)
            assert kind == "ValueError" and f"rank {rank} is not in" in said
        kind, said = raised(hvd.broadcast, own, other.ranks[0], process_set=mine)
        assert kind == "ValueError" and "root_rank" in said
        assert torch.equal(hvd.allreduce(own, op=hvd.Sum), summed(range(size), (5,)))
    assert even.process_set_id is None


def test_sets_given_to_init_run_their_collectives_apart(ranks):
    ranks.run(check_collectives, world_size=3)


def check_dynamic(rank, size):
    with job(**DYNAMIC):
        for _ in range(3):
            first = hvd.add_process_set([0, size - 1])
            second = hvd.add_process_set(hvd.ProcessSet(range(size - 1)))
            assert raised(hvd.add_process_set, [0, size - 1])[0] == "ValueError"
            for each in (first, second):
                if each.included():
                    result = hvd.allreduce(values(rank, (3,)), name="x", op=hvd.Sum, process_set=each)
                    assert torch.equal(result, summed(each.ranks, (3,)))
            assert hvd.remove_process_set(first) and first.process_set_id is None
            assert hvd.remove_process_set(second)
            assert not hvd.remove_process_set(first)
        assert not hvd.remove_process_set(hvd.global_process_set)


def test_sets_can_be_added_and_removed_again_and_again(ranks):
    ranks.run(check_dynamic, world_size=3)


def check_differing(rank, size):
    with job(**DYNAMIC):
        kind, said = raised(hvd.add_process_set, [0, 1 + rank % 2])
        assert kind == "ValueError" and "[0, 1]" in said and "[0, 2]" in said
        added = hvd.add_process_set([1, 2])
        assert added.ranks == [1, 2]


def test_ranks_that_add_different_sets_get_an_error_that_shows_both(ranks):
    ranks.run(check_differing, world_size=3)


def check_not_allowed(rank, size):
    with job():
        assert raised(hvd.add_process_set, [0])[0] == "ValueError"
        assert "HOROVOD_DYNAMIC_PROCESS_SETS=1" in raised(hvd.add_process_set, [0])[1]
    with job(process_sets="dynamic"):
        hvd.add_process_set([0])


def test_adding_a_set_needs_permission(ranks):
    ranks.run(check_not_allowed, world_size=2)


def check_wrong_sets(rank, size):
    for wrong in ([[0, 9]], [[]], [[0], [0]], [list(range(size))], "static", [[0, 0]]):
        kind, said = raised(hvd.init, process_sets=wrong)
        assert kind == "ValueError", f"{wrong}: {said}"
        assert not hvd.is_initialized()
    kind, _ = raised(hvd.init, process_sets=[[rank]])
    assert kind == "ValueError", "the ranks name different sets"
    with job():
        hvd.barrier()


def test_wrong_sets_are_value_errors_and_the_next_init_works(ranks):
    ranks.run(check_wrong_sets, world_size=2)


def check_independence(rank, size):
    first, second = hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3])
    with job(process_sets=[first, second]):
        if rank >= 2:  # they need nothing of the others, which wait
            for i in range(10):
                result = hvd.allreduce(values(rank, (4,), salt=i), name="x", op=hvd.Sum, process_set=second)
                assert torch.equal(result, summed([2, 3], (4,), salt=i))
        hvd.barrier()
        if rank < 2:
            hvd.barrier(process_set=first)


def test_a_set_does_not_wait_for_ranks_outside(ranks):
    ranks.run(check_independence, world_size=4)
