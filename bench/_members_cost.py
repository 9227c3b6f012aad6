"""Ranks of bench/members.py --parts cost: steps with members and without, in turn."""

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from lib.common import Report, Row, keep_memory
from lib.oracle import tcp_nbytes_sent
from lib.ways import TOLERANCES
from torch import Tensor, nn

import fusedcomm
from fusedcomm.ranks import groups

WITHOUT, AGAIN, WITH = "without", "without, again", "members"
WAYS = (WITHOUT, AGAIN, WITH)
"""The second tells what differs by chance."""
CHUNKS = fusedcomm.Chunks(nbytes=1 << 20, in_flight=4)
"""Left open, they would depend on how fast the link was when the reducer was made, and ways would differ by chance."""
NUM_PARAMETERS = 25
WARM_ROUNDS = 5


class Spread(torch.autograd.Function):
    """Gives each parameter a gradient of its own, at little cost."""

    @staticmethod
    def forward(ctx, gradients: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return None, *(of_parameter.clone() for of_parameter in ctx.gradients)


class Model(nn.Module):
    def __init__(self, num_parameters: int, numel: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(numel) for _ in range(num_parameters))

    def forward(self, gradients: torch.Tensor) -> torch.Tensor:
        return Spread.apply(gradients, *self.weights)


class Way:
    """A reducer with gradients and an optimizer of its own."""

    def __init__(self, name: str, wire: str, numel: int) -> None:
        self.name = name
        self.model = Model(NUM_PARAMETERS, numel)
        config = fusedcomm.Config(wire, sum="two-shot", hosts=None, wires={"1d": wire}, chunks=CHUNKS)
        self.members = fusedcomm.Members() if name == WITH else None
        self.comm = fusedcomm.GradReducer(self.model, config, quiet=True, members=self.members)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, fused=True)
        if self.members is not None:
            self.members.carry(optimizer=self.optimizer)
        self.times: list[float] = []
        self.core_times: list[float] = []
        self.sent: list[int] = []

    def step(self, gradients: Tensor, is_timed: bool) -> None:
        """A step whose gradients, [parameters, elements], are given. All ranks begin together."""
        sent = tcp_nbytes_sent()
        dist.barrier()
        cores_s, began = time.process_time(), time.perf_counter()
        self.optimizer.zero_grad()
        self.model(gradients).backward()
        self.optimizer.step()
        taken_s = time.perf_counter() - began
        cores_s = time.process_time() - cores_s
        dist.barrier()
        if is_timed:
            self.times.append(taken_s)
            self.core_times.append(cores_s)
            self.sent.append((tcp_nbytes_sent() or 0) - (sent or 0))

    def error(self, exact: Tensor) -> float:
        """‖mean − exact‖ / ‖exact‖ of the last step's mean."""
        found = torch.stack([weight.grad for weight in self.model.parameters()])
        return float((found - exact).norm() / exact.norm())

    def kept_nbytes(self) -> int:
        """Bytes of the codes and the means that are kept between steps: the means have as many as the codes."""
        synchronizer = self.comm.session.synchronizer
        if self.members is None:
            return 0
        return 2 * sum(synchronizer.kept_means(bucket).numel() for bucket in range(len(synchronizer.buckets())))


def slowest(of_rank: Sequence[float]) -> list[float]:
    """Of each step, the time of the slowest rank."""
    times = torch.tensor(of_rank, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def total(values: Sequence[float]) -> list[float]:
    """Of each value, the sum over ranks."""
    sums = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(sums)
    return sums.tolist()


def check(ways: Sequence[Way], numel: int) -> None:
    """Three steps of whole numbers whose means every wire carries. Raises RuntimeError if a mean is wrong."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for factor in (1.0, -2.0, 3.0):
        gradients = torch.full((NUM_PARAMETERS, numel), factor * 2 * rank)
        for way in ways:
            way.step(gradients, is_timed=False)
            found = [weight.grad for weight in way.model.parameters()]
            if not all(torch.all(mean == factor * (size - 1)) for mean in found):
                raise RuntimeError(f"{way.name}: wrong mean on rank {rank}")


def measure(arguments: argparse.Namespace) -> int:
    """Runs on every rank; rank 0 reports. Returns the exit status."""
    torch.set_num_threads(1)
    keep_memory()
    report = Report(arguments.found if dist.get_rank() == 0 else None)
    for wire in arguments.wires:
        report.add(list(rows(wire, arguments)))
    groups.end_together()
    return 0


def rows(wire: str, arguments: argparse.Namespace) -> Iterator[Row]:
    """A row for each way over this wire."""
    numel = max(1, round(arguments.mib * 2**18 / NUM_PARAMETERS))
    ways = []
    for name in WAYS:
        ways.append(Way(name, wire, numel))
        check(ways[-1:], numel)
    check(ways, numel)
    generator = torch.Generator().manual_seed(dist.get_rank())
    gradients = torch.randn(NUM_PARAMETERS, numel, generator=generator)
    for turn in range(-WARM_ROUNDS, arguments.rounds):
        for place in range(len(ways)):
            ways[(turn + place) % len(ways)].step(gradients, is_timed=turn >= 0)
    exact = gradients.double()
    dist.all_reduce(exact)
    exact /= dist.get_world_size()
    times = {way.name: slowest(way.times) for way in ways}
    for way in ways:
        own, first = times[way.name], times[WITHOUT]
        stats = way.comm.stats()
        cores, nbytes, counted, kept = total(
            [
                statistics.median(way.core_times),
                statistics.fmean(way.sent),
                stats.sent_nbytes / stats.steps,
                way.kept_nbytes(),
            ]
        )
        size = dist.get_world_size()
        figures = {
            "step_ratio": statistics.median(own) / statistics.median(first),
            "paired_ratio": statistics.median(a / b for a, b in zip(own, first, strict=True)),
            "cores_s": cores,
            "socket_nbytes": nbytes / size,
            "sent_nbytes": counted / size,
            "kept_nbytes": kept / size,
            "load": os.getloadavg()[0],
        }
        case = f"cost/{wire}, {size} ranks"
        checked = way.error(exact) <= TOLERANCES[wire]
        yield Row(case, way.name, exact.numel(), 0, statistics.median(own), min(own), checked, figures=figures)
    for way in ways:
        if way.members is not None:
            way.members.leave()
