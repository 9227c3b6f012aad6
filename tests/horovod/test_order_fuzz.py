"""Each rank submits 200 named tensors in a random order of its own, with joins and process sets among them. The results
are bit-equal to torch's own all-reduce, and nothing hangs."""

import random

import pytest
import torch
import torch.distributed as dist
from jobs import job

import fusedcomm.horovod as hvd

pytestmark = pytest.mark.check

NUM_TENSORS = 200
NUMELS = [0, 1, 3, 17, 100, 1000, 4097, 30_000, 200_000, 1_000_000]
# Small tensors are as common as in models: together they have about 3 million elements.
WEIGHTS = [2, 10, 20, 30, 40, 40, 30, 10, 3, 0.4]
SETS = [[0, 1, 2, 3], [0, 2], [1, 2, 3]]
DTYPES = [torch.float32, torch.float32, torch.int64, torch.float64]
JOINS_EVERY = 5


def tensors_of(number: int) -> list[tuple[str, int, int, int, torch.dtype]]:
    """(name, process set, numel, seed, dtype) of each tensor of a round, the same on every rank. Names stay, and
    now and then numels change."""
    shapes = random.Random(number // 4)
    return [
        (
            f"tensor.{i}",
            shapes.choices(range(len(SETS)), [10, 1, 1])[0],
            shapes.choices(NUMELS, WEIGHTS)[0],
            number * NUM_TENSORS + i,
            shapes.choice(DTYPES),
        )
        for i in range(NUM_TENSORS)
    ]


def numbers(seed: int, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, signed: their sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed * 7 + rank)
    return torch.randint(-8, 9, (numel,), generator=generator).to(dtype)


def fuzz(rank: int, size: int, rounds: range) -> None:
    sets = [hvd.global_process_set, hvd.ProcessSet(SETS[1]), hvd.ProcessSet(SETS[2])]
    groups = [dist.group.WORLD, dist.new_group(SETS[1]), dist.new_group(SETS[2])]
    with job(process_sets=sets[1:]):
        for number in rounds:
            mine = random.Random(f"{rank} {number}")
            work = [each for each in tensors_of(number) if rank in SETS[each[1]]]
            # In some rounds a rank joins before it has submitted the global set's tensors.
            joiner = number % size if number % JOINS_EVERY == JOINS_EVERY - 1 else None
            if joiner == rank:
                work = [each for each in work if each[1] != 0]
            results = run_round(rank, work, sets, mine)
            if joiner is not None:
                hvd.join()
            check_round(rank, number, results, groups, joiner)


def run_round(rank, work, sets, mine) -> dict[str, torch.Tensor]:
    handles, results = [], {}
    for name, which, numel, seed, dtype in mine.sample(work, len(work)):
        tensor = numbers(seed, rank, numel, dtype)
        start = hvd.allreduce_async_ if mine.random() < 0.5 else hvd.allreduce_async
        handles.append((name, start(tensor, name=name, op=hvd.Sum, process_set=sets[which])))
        if mine.random() < 0.1:
            for done in [each for each in handles if hvd.poll(each[1])]:
                handles.remove(done)
                results[done[0]] = hvd.synchronize(done[1])
    mine.shuffle(handles)
    results.update((name, hvd.synchronize(handle)) for name, handle in handles)
    return results


def check_round(rank, number, results, groups, joiner) -> None:
    for name, which, numel, seed, dtype in tensors_of(number):
        if rank not in SETS[which]:
            continue
        expected = numbers(seed, rank, numel, dtype)
        if which == 0 and joiner == rank:
            expected.zero_()
        if numel:
            dist.all_reduce(expected, group=groups[which])
        if name in results:
            about = f"round {number}, {name}: numel {numel}, {dtype}, set {which}"
            assert torch.equal(results[name], expected), about


@pytest.mark.parametrize(
    "rounds",
    [
        range(10),
        *(pytest.param(range(first, first + 100), marks=pytest.mark.full) for first in range(0, 1000, 100)),
    ],
    ids=str,
)
def test_any_order_gives_the_bits_of_an_all_reduce(ranks, rounds):
    ranks.run(fuzz, rounds, world_size=4)
