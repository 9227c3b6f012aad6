"""What the network costs, used as DDP and the engine use it: DDP's all-reduces on its own process group, a few buckets
under way; the engine's all-to-alls and 16-bit all-reduces on its own channels, as many chunks under way as it has.
Where hosts have several ranks, all-to-alls of sums on two levels, too."""

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
"""Messages that tell roughly how fast the network is, so that what follows is not too long for the budget."""
DDP_NBYTES = (64 << 10, 1 << 20, 5 << 20, DEFAULT_CAP_NBYTES)
DDP_IN_FLIGHT = 2
"""A gloo group works on two collectives at once."""
MIN_MESSAGES_OF_A_SLOT, MAX_MESSAGES_OF_A_SLOT = 3, 5
"""So many one after the other: filling and draining a link is a small part of it."""
MIN_ROUNDS, MAX_ROUNDS = 3, 20
ON_ONE_LEVEL = {"exchange": 0.3, "direct": 0.25, "all_reduce": 0.45}
BETWEEN, WITHIN = "between hosts", "within hosts"
ON_TWO_LEVELS = {"exchange": 0.2, "direct": 0.15, "all_reduce": 0.35, BETWEEN: 0.2, WITHIN: 0.1}
"""What is measured, and its share of the time."""
FREE = Cost(0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Seconds of so many collectives on messages of `nbytes`, at most `in_flight` of them under way: one value for each
    round, the slowest rank's."""

    kind: str
    nbytes: int
    sent_nbytes: float
    """For each message, by one rank; where hosts have several, as cluster.Network counts."""
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
    ranks_per_host: int = 1
    """More than one: `network` is of bytes that a host sends, with what its ranks send each other included."""
    two_levels: TwoLevels | None = None

    def carried_bytes_s(self, kind: str) -> float:
        """The most that collectives of this kind got out of the network. A cost's bytes can be cheaper: the rest of it,
        which each message has, may be work done while others' bytes are on their way."""
        several = [sample for sample in self.samples if sample.kind == kind and sample.in_flight > 1]
        return max(sample.num_messages * sample.sent_nbytes / sample.median_s for sample in several)

    @property
    def local(self) -> Network | None:
        return None if self.two_levels is None else Network(all_reduce=FREE, exchange=FREE)


def measure_network(team: Team, budget_s: float, hosts: Hosts | None = None) -> MeasuredNetwork:
    """A collective call. Takes about `budget_s` where the smallest messages fit into that.

    Args:
        hosts: on which sums can have two levels.
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
    """Of samples of one kind, whose bytes are those of so many ranks.

    Where small messages under way together stall each other (a shaped link's queue, delayed acknowledgements), what one
    of them takes alone says more of what it costs the network.
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
    """Told apart from that of bytes: on two levels messages are of many sizes, by the wire."""
    several = [sample for sample in samples if sample.in_flight > 1]
    points = [(s.sent_nbytes / num_senders, s.cpu_s / (len(s.seconds) * s.num_messages)) for s in several]
    line = theil_sen(points)
    return dataclasses.replace(cost, cpu_fixed_s=line.fixed_s, cpu_s_per_unit=line.per_unit_s)


def points_alone(samples: Sequence[Sample]) -> list[Point]:
    return [(sample.sent_nbytes, sample.median_s) for sample in samples if sample.in_flight == 1]


class _Bench:
    def __init__(self, team: Team, hosts: Hosts | None) -> None:
        self.team, self.hosts = team, hosts
        backend, on_cpu = team.group._get_backend(team.device), team.device.type == "cpu"
        self._plan = Config().plan_of_large_buckets(team.world_size)
        self._channels = {"all_reduce": [backend], "direct": [backend], "exchange": [backend]}
        store = groups.private_store(team.group)
        if on_cpu:
            # Kept whole: a channel let go of while another rank still connects it looks like a crash there.
            self._own = own = groups.make_channels(team.group, team.device, store)
            # Each of a chunk's collectives is on a channel of its own.
            exchange = [getattr(own, step.channel) for step in self._plan.steps if step.is_collective]
            self._channels |= {"direct": [own.scatter], "exchange": exchange}
        if hosts is not None:
            of_hosts = groups.make_host_channels(team.group, team.device, store, hosts)
            self._channels[BETWEEN] = [of_hosts.cross_scatter, of_hosts.cross_gather]
            self._channels[WITHIN] = [of_hosts.local_scatter, of_hosts.local_gather]
        # Gloo's messages are sent as the engine sends them.
        kinds = {"exchange", BETWEEN, WITHIN} & set(self._channels) if on_cpu else ()
        self.s_per_byte = groups.time_link(self._channels["exchange"][0]) if on_cpu else None
        self._exchanges = {kind: [self._exchange(kind, channel) for channel in self._channels[kind]] for kind in kinds}

    def _exchange(self, kind: str, channel: "dist.Backend") -> "_C.Exchange":
        max_sending = 0 if kind == WITHIN else chunks.max_sending(self.team.world_size, self.s_per_byte)
        return _C.Exchange(channel, max_sending=max_sending)

    def measure(self, kind: str, budget_s: float) -> list[Sample]:
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
            if kind == "all_reduce" and nbytes > sizes[1] and MIN_ROUNDS * expected_s * num_messages > 2 * of_a_size_s:
                continue  # this link is too slow for that; smaller ones tell its rate
            fits = int(of_a_size_s / (MIN_ROUNDS * expected_s))
            together = min(max(fits, MIN_MESSAGES_OF_A_SLOT * in_flight), num_messages)
            for count, under_way in ((1, 1), (together, in_flight)):
                rounds = min(max(int(of_a_size_s / (count * expected_s)), MIN_ROUNDS), MAX_ROUNDS)
                samples.append(self._sample(kind, nbytes, count, under_way, rounds))
            points = [(sample.nbytes, sample.median_s) for sample in samples if sample.in_flight == 1]
            if len({size for size, _ in points}) > 1:
                estimate = theil_sen(points)
        return samples

    def _chunk(self, kind: str) -> tuple[int, int]:
        """(bytes of a message of the engine's, how many are under way)"""
        config, per_host = Config(sum="direct") if kind == "direct" else Config(), 1
        if kind in (BETWEEN, WITHIN):
            # Within a host the messages of the narrowest wire are the longest.
            config, per_host = Config(wire="bf16" if kind == BETWEEN else "int4", hosts=AUTO), self.hosts.ranks_per_host
        config = chunks.resolved(config, self.team.world_size, self.team.device.type, self.s_per_byte, per_host)
        num_parts = per_host if kind == BETWEEN else 1
        # Where every rank's whole chunk is gathered, the message of a collective is that of all of them.
        num_messages = self._plan.steps[-1].num_ranks if kind == "exchange" else 1
        return num_messages * config.chunks.nbytes // num_parts, config.chunks.in_flight

    def _sample(self, kind: str, nbytes: int, num_messages: int, in_flight: int, rounds: int) -> Sample:
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
        """Of a message, in the cost model's units: by a host, or by a rank within it."""
        p, hosts = self.team.world_size, self.hosts
        if kind in ("all_reduce", "direct"):
            return 2 * (p - 1) / p  # round a ring, which leaves each host once
        per_host = 1 if hosts is None else hosts.ranks_per_host
        if kind == "exchange":
            return per_host * (p - per_host) / p
        if kind == WITHIN:
            return (per_host - 1) / per_host
        return per_host * (hosts.num_hosts - 1) / hosts.num_hosts


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
