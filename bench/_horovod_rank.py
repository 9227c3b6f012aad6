"""One rank of bench/horovod.py, which starts the ranks and reads the rows that rank 0 writes."""

import dataclasses
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from horovod import DIST
from lib.common import Row, in_turn, make_row
from lib.rank import gathered, started
from torch import Tensor

import fusedcomm.horovod as hvd

SMALL_NUMELS = (1, 1_000, 100_000)
MANY_NUMELS = [round(10 ** (1 + 3 * (index % 10) / 9)) for index in range(300)]
"""10 to 10,000 elements."""
WARM_CALLS = 10
"""Untimed calls before each turn."""


def own(numel: int, index: int = 0) -> Tensor:
    """This rank's values: small whole numbers of both signs, so that sums are exact."""
    return torch.arange(numel, dtype=torch.float32) % 7 - 3 * dist.get_rank() + index


def total(numel: int, index: int = 0) -> Tensor:
    """The sum of all ranks' own()."""
    size = dist.get_world_size()
    return size * (torch.arange(numel, dtype=torch.float32) % 7 + index) - 3 * sum(range(size))


def submit(tensors: list[Tensor]) -> None:
    handles = [hvd.allreduce_async_(each, op=hvd.Sum, name=f"t{index}") for index, each in enumerate(tensors)]
    for handle in handles:
        hvd.synchronize(handle)


def one_by_one(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)


class Bench:
    def __init__(self, settings: dict, hand_over: Callable[..., None]) -> None:
        self.settings, self.hand_over = settings, hand_over
        self.rows: list[Row] = []

    def turns(self, functions: dict[str, Callable[[], object]], calls: int) -> dict[str, list[float]]:
        """By name: seconds of one call, the mean of `calls` of the slowest rank, in each round."""
        seconds = {name: [] for name in functions}
        for index in range(self.settings["rounds"]):
            for name in in_turn(functions, index):
                for _ in range(WARM_CALLS):
                    functions[name]()
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(calls):
                    functions[name]()
                seconds[name].append((time.perf_counter() - begin) / calls)
        return {
            name: [max(of_ranks) for of_ranks in zip(*gathered(each), strict=True)] for name, each in seconds.items()
        }

    def small(self, numel: int) -> None:
        zeros, name = torch.zeros(numel), f"x{numel}"
        functions = {
            DIST: lambda: dist.all_reduce(zeros),
            "hvd.allreduce_": lambda: hvd.allreduce_(zeros, op=hvd.Sum, name=name),
            "hvd.allreduce": lambda: hvd.allreduce(zeros, op=hvd.Sum, name=name),
        }
        in_place = own(numel)
        found = hvd.allreduce(in_place, op=hvd.Sum, name=name)
        hvd.allreduce_(in_place, op=hvd.Sum, name=name)
        right = torch.equal(found, total(numel)) and torch.equal(in_place, found)
        self.add(f"all-reduce of {4 * numel} bytes", numel, functions, self.settings["calls"], right)

    def many(self) -> None:
        zeros = [torch.zeros(numel) for numel in MANY_NUMELS]
        functions = {
            DIST: lambda: one_by_one(zeros),
            "hvd.allreduce_async_": lambda: submit(zeros),
            "hvd.grouped_allreduce_": lambda: hvd.grouped_allreduce_(zeros, op=hvd.Sum, name="group"),
        }
        right = True
        for call in (submit, lambda tensors: hvd.grouped_allreduce_(tensors, op=hvd.Sum, name="group")):
            checked = [own(numel, index) for index, numel in enumerate(MANY_NUMELS)]
            call(checked)
            right &= all(torch.equal(each, total(len(each), index)) for index, each in enumerate(checked))
        self.add(f"{len(zeros)} tensors", sum(MANY_NUMELS), functions, 1, right)

    def add(self, what: str, numel: int, functions: dict[str, Callable], calls: int, right: bool) -> None:
        right, case = all(gathered(right)), f"{self.settings['case']}/{what}"
        seconds = self.turns(functions, calls)
        self.rows += [make_row(case, name, numel, 8 * numel, each, right) for name, each in seconds.items()]
        self.hand_over([dataclasses.asdict(row) for row in self.rows], case)


def main() -> None:
    with started() as (settings, hand_over):
        hvd.init()
        bench = Bench(settings, hand_over)
        for numel in SMALL_NUMELS:
            bench.small(numel)
        bench.many()
        hvd.shutdown()


if __name__ == "__main__":
    main()
