"""What the network costs, used as DDP and the engine use it: DDP's all-reduces on its own process group, a few buckets
under way; the engine's all-to-alls and 16-bit all-reduces on its own channels, as many chunks under way as it has."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fusedcomm import groups
from fusedcomm.config import Config
from fusedcomm.cost_model import DEFAULT_CAP_NBYTES, Cost, Network
from fusedcomm.probe.fit import Point, collective, theil_sen
from fusedcomm.probe.steps import cpu_s
from fusedcomm.probe.team import Team

PAIR_NBYTES = (4 << 10, 256 << 10)
"""Messages that tell roughly how fast the network is, so that what follows is not too long for the budget."""
DDP_NBYTES = (64 << 10, 1 << 20, 5 << 20, DEFAULT_CAP_NBYTES)
DDP_IN_FLIGHT = 2
"""A gloo group works on two collectives at once."""
MIN_MESSAGES_OF_A_SLOT, MAX_MESSAGES_OF_A_SLOT = 3, 5
"""So many one after the other: filling and draining a link is a small part of it."""
MIN_ROUNDS, MAX_ROUNDS = 3, 20


@dataclasses.dataclass(frozen=True)
class Sample:
    """Seconds of so many collectives on messages of `nbytes`, at most `in_flight` of them under way: one value for each
    round, the slowest rank's."""

    kind: str
    nbytes: int
    sent_nbytes: float
    """By one rank, for each message."""
    num_messages: int
    in_flight: int
    seconds: list[float]
    cpu_s: float = 0.0
    """Of all threads of a rank, for all rounds together."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


@dataclasses.dataclass(frozen=True)
class MeasuredNetwork:
    network: Network
    samples: list[Sample]
    s_per_byte: float | None
    """As attach times the link, on cpu."""
    seconds: float
    """That measuring took."""


def measure_network(team: Team, budget_s: float) -> MeasuredNetwork:
    """A collective call. Takes about `budget_s` where the smallest messages fit into that."""
    began = time.perf_counter()
    bench = _Bench(team)
    fits = {}
    samples = []
    for kind, share in (("exchange", 0.3), ("direct", 0.25), ("all_reduce", 0.45)):
        found = bench.measure(kind, share * budget_s)
        samples += found
        fits[kind] = fit(found)
    network = Network(**fits)
    return MeasuredNetwork(network, samples, bench.s_per_byte, time.perf_counter() - began)


def fit(samples: Sequence[Sample]) -> Cost:
    """Of samples of one kind.

    Where small messages under way together stall each other (a shaped link's queue, delayed acknowledgements), what one
    of them takes alone says more of what it costs the network.
    """
    alone = points_alone(samples)
    several = sorted((sample for sample in samples if sample.in_flight > 1), key=lambda sample: sample.nbytes)
    together = [(sample.sent_nbytes, sample.median_s / sample.num_messages) for sample in several]
    alone_s = dict(alone)
    together[:-1] = [(nbytes, min(seconds, alone_s.get(nbytes, seconds))) for nbytes, seconds in together[:-1]]
    largest = several[-1]
    cpu_s_per_byte = largest.cpu_s / (len(largest.seconds) * largest.num_messages * largest.sent_nbytes)
    return dataclasses.replace(collective(alone, together), cpu_s_per_unit=cpu_s_per_byte)


def points_alone(samples: Sequence[Sample]) -> list[Point]:
    return [(sample.sent_nbytes, sample.median_s) for sample in samples if sample.in_flight == 1]


class _Bench:
    def __init__(self, team: Team) -> None:
        self.team = team
        self._backend = team.group._get_backend(team.device)
        self._channels = [self._backend, self._backend]
        if team.device.type == "cpu":
            channels = groups.make_channels(team.group, team.device, groups.private_store(team.group))
            self._channels = [channels.scatter, channels.gather]
        on_cpu = team.device.type == "cpu"
        self.s_per_byte = groups.time_link(self._channels[0]) if on_cpu else None

    def measure(self, kind: str, budget_s: float) -> list[Sample]:
        if kind == "all_reduce":
            sizes, in_flight, num_messages = DDP_NBYTES, DDP_IN_FLIGHT, 2 * DDP_IN_FLIGHT
        else:
            config = Config(sum="two-shot" if kind == "exchange" else kind)
            config = config.resolved(self.team.world_size, self.team.device.type, self.s_per_byte)
            sizes = tuple(config.chunk_nbytes // part for part in (16, 4, 1))
            in_flight = config.chunks_in_flight
            num_messages = MAX_MESSAGES_OF_A_SLOT * in_flight
        smallest, other = (self._sample(kind, nbytes, 1, 1, MAX_ROUNDS) for nbytes in PAIR_NBYTES)
        estimate = theil_sen([(smallest.nbytes, smallest.median_s), (other.nbytes, other.median_s)])
        of_a_size_s = budget_s / len(sizes) / 2
        samples = [smallest]
        for nbytes in sizes:
            expected_s = estimate(nbytes)
            if kind == "all_reduce" and nbytes > sizes[1] and MIN_ROUNDS * expected_s * num_messages > 2 * of_a_size_s:
                continue  # this link is too slow for that; smaller ones tell its rate
            fits = int(of_a_size_s / (MIN_ROUNDS * expected_s))
            together = min(max(fits, MIN_MESSAGES_OF_A_SLOT * in_flight), num_messages)
            for count, under_way in ((1, 1), (together, in_flight)):
                rounds = min(max(int(of_a_size_s / (count * expected_s)), MIN_ROUNDS), MAX_ROUNDS)
                samples.append(self._sample(kind, nbytes, count, under_way, rounds))
            if len(points := [(sample.nbytes, sample.median_s) for sample in samples if sample.in_flight == 1]) > 1:
                estimate = theil_sen(points)
        return samples

    def _sample(self, kind: str, nbytes: int, num_messages: int, in_flight: int, rounds: int) -> Sample:
        p, device = self.team.world_size, self.team.device
        share = (p - 1) / p * (1 if kind == "exchange" else 2)
        dtype = torch.bfloat16 if kind == "direct" else torch.float32
        numel = math.ceil(nbytes / p / 16) * p * 16 // dtype.itemsize
        slots = [(torch.zeros(numel, dtype=dtype, device=device), torch.zeros(numel, dtype=dtype, device=device))]
        slots += [(torch.zeros_like(slots[0][0]), torch.zeros_like(slots[0][0])) for _ in range(in_flight - 1)]

        def start(index: int, slot: tuple[torch.Tensor, torch.Tensor]) -> dist.Work | None:
            if kind == "all_reduce":
                return self._backend.allreduce([slot[0]])
            if kind == "direct":
                return self._channels[0].allreduce([slot[0]])
            # A chunk's two collectives are on a channel each.
            return self._channels[index % 2].alltoall_base(slot[1].view(torch.uint8), slot[0].view(torch.uint8), [], [])

        def move() -> None:
            _rotate(start, slots, num_messages)

        move()
        before = cpu_s()
        seconds = self.team.time(move, rounds, warmup=0)
        (taken_s,) = self.team.mean([cpu_s() - before])
        return Sample(kind, nbytes, share * nbytes, num_messages, in_flight, seconds, taken_s)


def _rotate(start: Callable, slots: list, num_messages: int) -> None:
    """A message begins when the one that had its slot has ended."""
    under_way: list = [None] * len(slots)
    for index in range(num_messages):
        slot = index % len(slots)
        if under_way[slot] is not None:
            under_way[slot].wait()
        # Slots change channels, if their number is even, so that both have as much to do.
        under_way[slot] = start(index, slots[slot])
    for work in under_way:
        if work is not None:
            work.wait()
