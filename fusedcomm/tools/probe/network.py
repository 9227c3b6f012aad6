"""Measures the costs of the network when it is used as DDP and the engine use it.

DDP's all-reduces run on DDP's process group, with a few buckets in flight. The engine's all-to-alls and 16-bit
all-reduces run on channels like the engine's, with as many chunks in flight as the engine has. Where hosts have several
ranks, the all-to-alls of sums on two levels are measured, too.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fusedcomm import chunks
from fusedcomm.config import Config
from fusedcomm.native import _C
from fusedcomm.ranks import groups
from fusedcomm.ranks.hosts import AUTO, Hosts
from fusedcomm.tools.cluster import Cost, Network, TwoLevels
from fusedcomm.tools.cost_model import DEFAULT_CAP_NBYTES
from fusedcomm.tools.probe.fit import Point, collective, theil_sen
from fusedcomm.tools.probe.team import Team, cpu_s

PAIR_NBYTES = (4 << 10, 256 << 10)
"""Bytes of the first two messages. They show roughly how fast the network is, so that later ones fit the budget."""
# Bytes of DDP's all-reduces.
DDP_NBYTES = (64 << 10, 1 << 20, 5 << 20, DEFAULT_CAP_NBYTES)
DDP_IN_FLIGHT = 2
"""A gloo group runs two collectives at once."""
MIN_MESSAGES_OF_A_SLOT, MAX_MESSAGES_OF_A_SLOT = 3, 5
"""Messages that follow one another on a slot: enough that filling and draining the link is a small part of the time."""
# Repetitions of a measurement. A large message is left out if it cannot be repeated MIN_ROUNDS times.
MIN_ROUNDS, MAX_ROUNDS = 3, 20
MAX_OVER = 4
"""The engine's largest messages are left out if sending them once takes this many times the budget."""
# The kinds of collective that are measured, with their shares of the budget.
ON_ONE_LEVEL = {"exchange": 0.3, "direct": 0.25, "all_reduce": 0.45}
BETWEEN, WITHIN = "between hosts", "within hosts"
ON_TWO_LEVELS = {"exchange": 0.2, "direct": 0.15, "all_reduce": 0.35, BETWEEN: 0.2, WITHIN: 0.1}
"""The same where sums can have two levels."""
FREE = Cost(0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Times of rounds of collectives. A round has `num_messages` messages of `nbytes`, at most `in_flight` at once."""

    kind: str
    nbytes: int
    sent_nbytes: float
    """Bytes that one rank sends for each message; where hosts have several ranks, counted as in cluster.Network."""
    num_messages: int
    in_flight: int
    # For each round, on the slowest rank.
    seconds: list[float]
    cpu_s: float = 0.0
    """Core seconds of all threads of a rank for all rounds together; the mean of all ranks."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


@dataclasses.dataclass(frozen=True)
class MeasuredNetwork:
    """The costs of the network, and the samples that they are fitted to."""

    network: Network
    samples: list[Sample]
    s_per_byte: float | None
    """Seconds per byte of the link as attach times it; None on accelerators."""
    ranks_per_host: int = 1
    """If more than one, `network` counts bytes that a host sends; its costs include messages within the host."""
    two_levels: TwoLevels | None = None

    def carried_bytes_s(self, kind: str) -> float:
        """The highest rate of collectives of this kind, in bytes per second.

        The rate of a fitted Cost can be higher: the fixed part of a message may overlap with other messages' bytes.
        """
        several = [sample for sample in self.samples if sample.kind == kind and sample.in_flight > 1]
        return max(sample.num_messages * sample.sent_nbytes / sample.median_s for sample in several)

    @property
    def local(self) -> Network | None:
        """The network within a host, which is free, because `network` includes it. None: sums have one level."""
        return None if self.two_levels is None else Network(all_reduce=FREE, exchange=FREE)


def measure_network(team: Team, hosts: Hosts | None, budget_s: float) -> MeasuredNetwork:
    """Measures every kind of collective. A collective call.

    Args:
        hosts: the hosts on which sums can have two levels; None: sums have one level.
        budget_s: about how long it takes, if the smallest messages fit into that.
    """
    bench = _Bench(team, hosts)
    found = {
        kind: bench.measure(kind, share * budget_s)
        for kind, share in (ON_TWO_LEVELS if hosts is not None else ON_ONE_LEVEL).items()
    }
    per_host, two_levels = 1 if hosts is None else hosts.ranks_per_host, None
    network = Network(**{kind: fit(found[kind], per_host) for kind in ON_ONE_LEVEL})
    if hosts is not None:
        between, within = (
            with_cpu_of_messages(fit(found[kind], n), found[kind], n) for kind, n in ((BETWEEN, per_host), (WITHIN, 1))
        )
        two_levels = TwoLevels(dataclasses.replace(network, exchange=between), Network(FREE, exchange=within))
    samples = [sample for of_kind in found.values() for sample in of_kind]
    return MeasuredNetwork(network, samples, bench.s_per_byte, per_host, two_levels)


def fit(samples: Sequence[Sample], num_senders: int = 1) -> Cost:
    """The cost of one kind of collective, from its samples.

    Small messages in flight together may stall each other (a shaped link's queue, delayed acknowledgements). Then the
    time of one alone describes better what it costs the network.

    Args:
        num_senders: ranks that send the bytes that a sample counts.
    """
    alone = points_alone(samples)
    several = sorted((sample for sample in samples if sample.in_flight > 1), key=lambda sample: sample.nbytes)
    together = [(sample.sent_nbytes, sample.median_s / sample.num_messages) for sample in several]
    alone_s = dict(alone)
    together[:-1] = [(nbytes, min(seconds, alone_s.get(nbytes, seconds))) for nbytes, seconds in together[:-1]]
    largest = several[-1]
    of_a_rank = len(largest.seconds) * largest.num_messages * largest.sent_nbytes / num_senders
    return dataclasses.replace(collective(alone, together), cpu_s_per_unit=largest.cpu_s / of_a_rank)


def with_cpu_of_messages(cost: Cost, samples: Sequence[Sample], num_senders: int) -> Cost:
    """`cost` with separate core times for messages and bytes: on two levels each wire has messages of another size."""
    several = [sample for sample in samples if sample.in_flight > 1]
    points = [(s.sent_nbytes / num_senders, s.cpu_s / (len(s.seconds) * s.num_messages)) for s in several]
    line = theil_sen(points)
    return dataclasses.replace(cost, cpu_fixed_s=line.fixed_s, cpu_s_per_unit=line.per_unit_s)


def points_alone(samples: Sequence[Sample]) -> list[Point]:
    """(bytes sent, seconds) of the samples with one message in flight."""
    return [(sample.sent_nbytes, sample.median_s) for sample in samples if sample.in_flight == 1]


class _Bench:
    """Runs collectives on channels like those of DDP and the engine."""

    def __init__(self, team: Team, hosts: Hosts | None) -> None:
        self.team, self.hosts = team, hosts
        backend, on_cpu = team.group._get_backend(team.device), team.device.type == "cpu"
        self._plan = Config().plan_of_large_buckets(team.world_size)
        self._channels = {"all_reduce": [backend], "direct": [backend], "exchange": [backend]}
        store = groups.private_store(team.group).native
        if on_cpu:
            # Both channels are kept: if one is destroyed while another rank still connects it, that rank sees a crash.
            self._own = own = groups.make_channels(team.group, team.device, store)
            # Each collective of a chunk has its own channel.
            exchange = [getattr(own, step.channel) for step in self._plan.steps if step.is_collective]
            self._channels |= {"direct": [own.scatter], "exchange": exchange}
        if hosts is not None:
            of_hosts = groups.make_host_channels(team.group, team.device, store, hosts)
            self._channels[BETWEEN] = [of_hosts.cross_scatter, of_hosts.cross_gather]
            self._channels[WITHIN] = [of_hosts.local_scatter, of_hosts.local_gather]
        # Over gloo the engine sends messages through an Exchange.
        kinds = {"exchange", BETWEEN, WITHIN} & set(self._channels) if on_cpu else ()
        self.s_per_byte = groups.time_link(self._channels["exchange"][0]) if on_cpu else None
        self._exchanges = {kind: [self._exchange(kind, channel) for channel in self._channels[kind]] for kind in kinds}

    def _exchange(self, kind: str, channel: "dist.Backend") -> "_C.Exchange":
        max_sending = 0 if kind == WITHIN else chunks.max_sending(self.team.world_size, self.s_per_byte)
        return _C.Exchange(channel, max_sending=max_sending)

    def measure(self, kind: str, budget_s: float) -> list[Sample]:
        """Samples of one kind of collective, of several sizes, with one and with several messages in flight."""
        if kind == "all_reduce":
            sizes, in_flight, num_messages = DDP_NBYTES, DDP_IN_FLIGHT, 2 * DDP_IN_FLIGHT
        else:
            nbytes, in_flight = self._chunk(kind)
            sizes = tuple(nbytes // part for part in (16, 4, 1))
            num_messages = MAX_MESSAGES_OF_A_SLOT * in_flight
        smallest, other = (self._sample(kind, nbytes, 1, 1, MAX_ROUNDS) for nbytes in PAIR_NBYTES)
        estimate = theil_sen([(smallest.nbytes, smallest.median_s), (other.nbytes, other.median_s)])
        of_a_size_s = budget_s / len(sizes) / 2
        samples = [smallest]
        for nbytes in sizes:
            expected_s = estimate(nbytes)
            least_s = MIN_MESSAGES_OF_A_SLOT * in_flight * expected_s
            limit_s = 2 * of_a_size_s / MIN_ROUNDS if kind == "all_reduce" else MAX_OVER * budget_s
            if nbytes > sizes[1] and least_s > limit_s:
                continue  # the link is too slow for this size; smaller ones give its rate
            fits = int(of_a_size_s / (MIN_ROUNDS * expected_s))
            together = min(max(fits, MIN_MESSAGES_OF_A_SLOT * in_flight), num_messages)
            for count, under_way in ((1, 1), (together, in_flight)):
                least = MIN_ROUNDS if MIN_ROUNDS * count * expected_s <= budget_s else 1
                rounds = min(max(int(of_a_size_s / (count * expected_s)), least), MAX_ROUNDS)
                samples.append(self._sample(kind, nbytes, count, under_way, rounds))
            points = [(sample.nbytes, sample.median_s) for sample in samples if sample.in_flight == 1]
            if len({size for size, _ in points}) > 1:
                estimate = theil_sen(points)
        return samples

    def _chunk(self, kind: str) -> tuple[int, int]:
        """(bytes of one of the engine's messages, how many are in flight)"""
        config, per_host = Config(sum="direct") if kind == "direct" else Config(), 1
        if kind in (BETWEEN, WITHIN):
            # Within a host messages are longest with the narrowest wire.
            config, per_host = Config(wire="bf16" if kind == BETWEEN else "int4", hosts=AUTO), self.hosts.ranks_per_host
        config = chunks.resolved(config, self.team.world_size, self.team.device.type, self.s_per_byte, per_host)
        num_parts = per_host if kind == BETWEEN else 1
        # An all-gather of whole chunks has the chunks of all ranks in its message.
        num_messages = self._plan.steps[-1].num_ranks if kind == "exchange" else 1
        return num_messages * config.chunks.nbytes // num_parts, config.chunks.in_flight

    def _sample(self, kind: str, nbytes: int, num_messages: int, in_flight: int, rounds: int) -> Sample:
        """Times `rounds` rounds after one that does not count. A collective call."""
        channels, device = self._channels[kind], self.team.device
        p = channels[0].size()
        dtype = torch.bfloat16 if kind == "direct" else torch.float32
        numel = math.ceil(nbytes / p / 16) * p * 16 // dtype.itemsize
        slots = [(torch.zeros(numel, dtype=dtype, device=device), torch.zeros(numel, dtype=dtype, device=device))]
        slots += [(torch.zeros_like(slots[0][0]), torch.zeros_like(slots[0][0])) for _ in range(in_flight - 1)]

        exchanges = self._exchanges.get(kind)

        def start(index: int, slot: tuple[torch.Tensor, torch.Tensor]) -> "dist.Work | _C.Ended | None":
            channel = channels[index % len(channels)]
            if kind in ("all_reduce", "direct"):
                return channel.allreduce([slot[0]])
            send, receive = (tensor.view(torch.uint8) for tensor in slot)
            if exchanges:
                return exchanges[index % len(exchanges)].start(send=send, receive=receive)
            return channel.alltoall_base(receive, send, [], [])

        def move() -> None:
            _rotate(start, slots, num_messages)

        move()
        before = cpu_s()
        seconds = self.team.time(move, rounds, warmup=0)
        (taken_s,) = self.team.mean([cpu_s() - before])
        return Sample(kind, nbytes, self._sent_share(kind) * nbytes, num_messages, in_flight, seconds, taken_s)

    def _sent_share(self, kind: str) -> float:
        """Bytes sent for each byte of a message, as the cost model counts: by a host, or within a host by a rank."""
        p, hosts = self.team.world_size, self.hosts
        if kind in ("all_reduce", "direct"):
            return 2 * (p - 1) / p  # around a ring that leaves each host once
        per_host = 1 if hosts is None else hosts.ranks_per_host
        if kind == "exchange":
            return per_host * (p - per_host) / p
        if kind == WITHIN:
            return (per_host - 1) / per_host
        return per_host * (hosts.num_hosts - 1) / hosts.num_hosts


def _rotate(start: Callable, slots: list, num_messages: int) -> None:
    """Sends `num_messages` messages. A message begins when the one before it on its slot has ended."""
    under_way: list = [None] * len(slots)
    for index in range(num_messages):
        slot = index % len(slots)
        if under_way[slot] is not None:
            under_way[slot].wait()
        # Messages alternate between channels, so all channels have as much to do.
        under_way[slot] = start(index, slots[slot])
    for work in under_way:
        if work is not None:
            work.wait()
