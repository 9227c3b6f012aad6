"""How long a training step takes: an α–β–γ model, with every assumption in this file.

Each operation takes  fixed + units · per unit  seconds (:class:`Cost`): a collective α + β · bytes that a rank sends, a
codec stage its own fixed part + γ · elements. What these are for a cluster is measured (``fusedcomm probe``) or assumed
(``fusedcomm plan``); here they are put together as the engine does (csrc/engine/engine.h):

- Gradients become ready during the backward pass, in order; a bucket is ready with its last gradient.
- A bucket travels in chunks: pack → collective → reduce → collective → unpack, pack → all-reduce → unpack, or pack →
  all-gather → sum. Sizes and numbers come from the wire layout, none are worked out here.
- Each resource (the network, the network within a host, each codec lane) does one thing at a time, in the order in
  which things become ready. What a collective sends out of a host and within it travels at once.
- On CPU a collective's fixed part is latency: it delays its chunk and leaves the network free. On an accelerator the
  collectives follow one another on one stream, fixed parts included, and sums share a stream with unpack.
- As many chunks are under way as the configuration allows.
- Where ranks compute on the cores that also move the bytes, a step cannot be shorter than the sum of all that work, by
  the cores a rank has, and what finds no core that computing leaves free delays the backward pass; an accelerator may
  compute more slowly while collectives run on it.
- The step ends with the optimizer, which waits for every bucket.
"""

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence

import torch

from fusedcomm import chunks
from fusedcomm.config import Config
from fusedcomm.native import _C

FIRST_BUCKET_NBYTES = 1 << 20
DEFAULT_CAP_NBYTES = 25 << 20
"""How DDP cuts its buckets unless it is told otherwise."""
WORTHWHILE = 0.03
"""Of a step: a smaller gain is less than the model and a machine's moods can tell, and not worth a change."""
MAX_DELAYS = 4
FEW_CORES = 3
"""With fewer for each rank, the codec's lanes take turns on them instead of running side by side."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of an operation on so many units."""

    fixed_s: float
    per_unit_s: float
    occupied_s: float = 0.0
    """Of the fixed part of a collective: the network is taken for so long, however few bytes the message has."""
    cpu_s_per_unit: float | None = None
    """Of a core, for a collective; None: the network's `cpu_s_per_byte`."""
    cpu_fixed_s: float = 0.0
    """Of a core, for each message of a collective beside its bytes."""

    def __call__(self, units: float) -> float:
        return self.fixed_s + units * self.per_unit_s


@dataclasses.dataclass(frozen=True)
class Network:
    """One level of the network, as all ranks see it that use it at once. Units are bytes that one rank sends."""

    all_reduce: Cost
    """Of n bytes among p ranks, each sends 2(p−1)/p · n."""
    exchange: Cost
    """An all-to-all, or an all-gather, of a message of n bytes: each rank sends (p−1)/p · n."""
    cpu_s_per_byte: float = 0.0
    """Of a core, for each byte that a rank sends."""
    tree: Cost | None = None
    """Another all-reduce, of as many bytes, which is taken where it is faster."""
    direct: Cost | None = None
    """An all-reduce in a 16-bit wire; None: as `all_reduce` of as many bytes."""
    gather: Cost | None = None
    """An all-gather round a ring, which leaves each host once; None: it is an exchange."""


@dataclasses.dataclass(frozen=True)
class TwoLevels:
    """What sums on two levels find in place of a cluster's networks: their collectives have fewer ranks."""

    network: Network
    """Among ranks of which each is on another host; all ranks of a host at once."""
    local: Network
    """Among the ranks of a host."""


# An exact sum is of gradients where they are, which are scaled once.
STAGES_OF_SUMS = {
    "exact": ("pack",),
    "direct": ("pack", "unpack"),
    "two-shot": ("pack", "reduce", "unpack"),
    "one-shot": ("pack", "sum"),
}


@dataclasses.dataclass(frozen=True)
class Codec:
    """The stages of one wire; None: not known. Units are gradient elements: of the chunk for pack, unpack and sum, and
    for reduce, which decodes one part of each rank, of all its parts together."""

    pack: Cost
    reduce: Cost | None = None
    unpack: Cost | None = None
    sum: Cost | None = None
    """Unpack in a one-shot, where all ranks' messages are there."""

    def seconds(self, stage: str, numel: float) -> float:
        """Of one stage. ValueError if it is not known: what was measured are the stages that "auto" has there."""
        cost: Cost | None = getattr(self, stage)
        if cost is None:
            raise ValueError(f"how long the codec's {stage!r} takes is not known: predict a sum that does without it")
        return cost(numel)

    def whole_s(self, sum: str, numel: float) -> float:
        """Of all stages of a chunk that is summed so."""
        return math.fsum(self.seconds(stage, numel) for stage in STAGES_OF_SUMS[sum])


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Ranks, their network and their processors."""

    world_size: int
    network: Network
    codecs: Mapping[str, Codec]
    """By wire; "fp32" has what an exact sum does to a bucket in its own memory."""
    copy_s_per_byte: float
    """Of DDP's copies into and out of its buckets."""
    cores: float | None = None
    """That each rank has for everything; None: ranks compute on accelerators, which do not move bytes."""
    timed_s_per_byte: float | None = None
    """As attach would time the link, by which it chooses the size of chunks; None: of 1 Gbit/s."""
    ranks_per_host: int = 1
    """More than one: `network` is a host's, shared by its ranks, and its costs are for bytes that a host sends."""
    local: Network | None = None
    """Within a host; needed if hosts have several ranks."""
    two_levels: TwoLevels | None = None
    """None: sums on two levels find what others do."""
    link_bytes_s: float = math.inf
    """What `network` has been seen to carry at most."""
    slowdown: float = 0.0
    """Of an accelerator's computing by what runs beside it: collectives and codec stages that take t during the
    backward pass make that longer by slowdown · t."""

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.ranks_per_host < 1 or self.world_size % self.ranks_per_host:
            raise ValueError(
                f"{self.world_size} ranks, {self.ranks_per_host} on each host, are not possible: use a multiple of the "
                "ranks of a host"
            )
        if self.ranks_per_host > 1 and self.local is None:
            raise ValueError(f"ranks_per_host={self.ranks_per_host} needs the network within a host: set local")
        if self.cores is not None and self.cores <= 0:
            raise ValueError(f"cores={self.cores} is not possible: use a positive number, or None for accelerators")

    @property
    def num_hosts(self) -> int:
        return self.world_size // self.ranks_per_host

    def codec(self, wire: str) -> Codec:
        if wire not in self.codecs:
            raise ValueError(f"no codec costs of wire {wire!r} are known, only of {', '.join(sorted(self.codecs))}")
        return self.codecs[wire]


@dataclasses.dataclass(frozen=True)
class Gradient:
    numel: int
    ready_s: float
    """Since the backward pass began, without any synchronisation."""
    exempt: bool = False
    """It travels in fp32 whatever the wire."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """One rank's step without synchronisation; fp32 gradients."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    gradients: Sequence[Gradient]
    """In the order in which they become ready: from the model's last parameter to its first."""
    bucket_views: bool = False
    """DDP's gradient_as_bucket_view: nothing is copied out of buckets."""
    busy_cores: float = 1.0
    """Of a rank's, on average, where it computes on those that also move bytes; next to none if it waits for something
    else."""

    @property
    def numel(self) -> int:
        return sum(gradient.numel for gradient in self.gradients)

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a user can decide: a configuration of ours, or None for DDP's own all-reduce, and DDP's bucket_cap_mb."""

    config: Config | None
    cap_nbytes: int = DEFAULT_CAP_NBYTES


@dataclasses.dataclass(frozen=True)
class Prediction:
    step_s: float
    compute_s: float
    """Of the same step without synchronisation."""
    network_s: float
    """The network is busy for so long, latencies not counted."""
    sent_nbytes: int
    """By a rank; with several ranks on a host, by a host to others (none to itself)."""
    num_buckets: int
    bound: str
    """What the step is made of for the most part: "compute", "network", "codec", "latency" or "cores"."""

    @property
    def exposed_s(self) -> float:
        return self.step_s - self.compute_s


def cut_buckets(gradients: Sequence[Gradient], cap_nbytes: int) -> list[list[Gradient]]:
    """As DDP cuts them: a bucket is full with the gradient that takes it to its cap; the first one's is 1 MiB where the
    cap is DDP's own."""
    caps = [FIRST_BUCKET_NBYTES, cap_nbytes] if cap_nbytes == DEFAULT_CAP_NBYTES else [cap_nbytes]
    buckets: list[list[Gradient]] = [[]]
    nbytes = 0
    for gradient in gradients:
        buckets[-1].append(gradient)
        nbytes += 4 * gradient.numel
        if nbytes >= caps[min(len(buckets), len(caps)) - 1]:
            buckets.append([])
            nbytes = 0
    return [bucket for bucket in buckets if bucket]


def predict(
    workload: Workload, choice: Choice, cluster: Cluster, buckets: Sequence[Sequence[Gradient]] | None = None
) -> Prediction:
    """One step of every rank, all alike and beginning together. buckets: if not as DDP cuts them."""
    if buckets is None:
        buckets = cut_buckets(workload.gradients, choice.cap_nbytes)
    prediction, delay_s = _predict(workload, choice, cluster, buckets, stretch=1.0)
    # On cores that also move bytes, what is moved while the backward pass is delayed delays it further.
    for _ in range(1 if cluster.cores is None else MAX_DELAYS):
        if delay_s <= 0 or workload.backward_s <= 0:
            break
        stretch = 1 + delay_s / workload.backward_s
        prediction, delay_s = _predict(workload, choice, cluster, buckets, stretch)
    return prediction


def _predict(
    workload: Workload, choice: Choice, cluster: Cluster, buckets: Sequence[Sequence[Gradient]], stretch: float
) -> tuple[Prediction, float]:
    """With a backward pass that takes `stretch` times as long. Also: by how much what ran meanwhile makes it longer."""
    simulation = _Simulation(cluster, choice.config)
    copies_s = [4 * sum(gradient.numel for gradient in bucket) * cluster.copy_s_per_byte for bucket in buckets]
    copied_s = 0.0
    for bucket, copy_s in zip(buckets, copies_s, strict=True):
        copied_s += copy_s
        simulation.add(bucket, workload.forward_s + stretch * bucket[-1].ready_s + copied_s)
    done_s = simulation.run()
    backward_end_s = now = workload.forward_s + stretch * workload.backward_s + copied_s
    for bucket_done_s, copy_s in zip(done_s, copies_s, strict=True):
        now = max(now, bucket_done_s)
        if not workload.bucket_views:
            now += copy_s
            copied_s += copy_s
    compute_s = workload.compute_s + copied_s
    lanes_s = {lane: busy_s for lane, busy_s in simulation.busy_s.items() if lane not in _WIRES}
    parts = {"compute": compute_s, "network": simulation.network_s, "codec": max(lanes_s.values(), default=0.0)}
    if cluster.cores is not None:
        work_s = workload.compute_s * workload.busy_cores + copied_s + simulation.cpu_s
        parts["cores"] = work_s / cluster.cores
    step_s = max(now + workload.optimizer_s, parts.get("cores", 0.0))
    bound = max(parts, key=parts.get)
    if parts[bound] < step_s / 2:
        bound = "latency"
    delay_s = simulation.delay_s(workload.forward_s, backward_end_s, workload.busy_cores)
    sent_nbytes = round(simulation.sent_nbytes)
    return (
        Prediction(step_s, workload.compute_s, simulation.network_s, sent_nbytes, len(buckets), bound),
        delay_s,
    )


_WIRES = ("network", "local", "wire stream")


@dataclasses.dataclass(frozen=True)
class _Stage:
    busy_s: Mapping[str, float]
    """By resource: it begins with each as soon as that is free, and ends when all have ended."""
    latency_s: float = 0.0
    network_s: float = 0.0
    sent_nbytes: float = 0.0
    cpu_s: float = 0.0

    @property
    def alone_s(self) -> float:
        return max(self.busy_s.values()) + self.latency_s


@dataclasses.dataclass(frozen=True)
class _Chunk:
    bucket: int
    ready_s: float
    stages: Sequence[_Stage]
    takes_slot: bool


class _Simulation:
    """Chunks of buckets through the stages of the engine; DDP's all-reduces, which are one stage, too."""

    def __init__(self, cluster: Cluster, config: Config | None) -> None:
        self.cluster, self.config = cluster, config
        self.busy_s: dict[str, float] = {}
        self.spans: list[tuple[float, float, float]] = []
        """When each stage began and ended, and how long it kept a core busy."""
        self.network_s = self.sent_nbytes = self.cpu_s = 0.0
        self._on_streams = cluster.cores is None
        self._two_levels = bool(config and config.hosts is not None and 1 < cluster.ranks_per_host < cluster.world_size)
        if config is not None:
            per_host = cluster.ranks_per_host if self._two_levels else 1
            device = "cuda" if self._on_streams else "cpu"
            config = chunks.resolved(config, cluster.world_size, device, cluster.timed_s_per_byte, per_host)
            self._native = config.native(config.chunks, per_host)
            self._num_slots = config.chunks.in_flight
        networks = cluster.two_levels if self._two_levels and cluster.two_levels is not None else cluster
        self._network, self._local = networks.network, networks.local
        self._chunks: list[_Chunk] = []
        self._num_buckets = 0

    def add(self, bucket: Sequence[Gradient], ready_s: float) -> None:
        """Buckets in the order in which they become ready."""
        numel = sum(gradient.numel for gradient in bucket)
        exempt = sum(gradient.numel for gradient in bucket if gradient.exempt)
        index = self._num_buckets
        self._num_buckets += 1
        if self.config is None:
            self._chunks.append(_Chunk(index, ready_s, self._all_reduce(4 * numel), takes_slot=False))
            return
        plan = _C.plan_bucket(self._native, self.cluster.world_size, torch.empty(0), exempt, [numel - exempt])
        if plan.in_place:
            scale = self._codec_stage("pack", self.cluster.codec("fp32").pack(numel))
            self._chunks.append(_Chunk(index, ready_s, [scale, *self._all_reduce(4 * numel)], takes_slot=False))
            return
        num_chunks = plan.layout.num_chunks
        stages = {"two-shot": self._two_shot, "one-shot": self._one_shot}.get(plan.sum, self._direct)
        self._chunks += [_Chunk(index, ready_s, stages(plan, numel / num_chunks), takes_slot=True)] * num_chunks

    def _codec_stage(self, lane: str, seconds: float) -> _Stage:
        if self._on_streams:
            lane = "pack" if lane == "pack" else "unpack"
        elif self.cluster.cores < FEW_CORES:
            lane = "codec"
        return _Stage({lane: seconds}, cpu_s=seconds)

    def _direct(self, plan: "_C.BucketPlan", numel: float) -> list[_Stage]:
        codec = self.cluster.codec(plan.layout.wire)
        return [
            self._codec_stage("pack", codec.pack(numel)),
            *self._all_reduce(plan.layout.chunk_nbytes, "direct"),
            self._codec_stage("unpack", codec.seconds("unpack", numel)),
        ]

    def _one_shot(self, plan: "_C.BucketPlan", numel: float) -> list[_Stage]:
        codec, world_size = self.cluster.codec(plan.layout.wire), self.cluster.world_size
        gathered = world_size * plan.layout.chunk_nbytes
        return [
            self._codec_stage("pack", codec.pack(numel)),
            *self._gather(gathered, self.cluster.num_hosts, self.cluster.ranks_per_host),
            self._codec_stage("unpack", codec.seconds("sum", numel)),
        ]

    def _two_shot(self, plan: "_C.BucketPlan", numel: float) -> list[_Stage]:
        codec, nbytes = self.cluster.codec(plan.layout.wire), plan.layout.chunk_nbytes
        num_hosts, per_host = self.cluster.num_hosts, self.cluster.ranks_per_host
        if not self._two_levels:
            return [
                self._codec_stage("pack", codec.pack(numel)),
                *self._exchange(nbytes, num_hosts, per_host),
                self._codec_stage("reduce", codec.seconds("reduce", numel)),
                *self._gather(nbytes, num_hosts, per_host),
                self._codec_stage("unpack", codec.seconds("unpack", numel)),
            ]
        host_layout = plan.host_layouts[0]
        local, between = self.cluster.codec(host_layout.wire), nbytes / per_host
        return [
            self._codec_stage("pack", local.pack(numel)),
            *self._exchange(host_layout.chunk_nbytes, 1, per_host),
            self._codec_stage("local reduce", local.seconds("reduce", numel)),
            *self._exchange(between, num_hosts, 1),
            self._codec_stage("reduce", codec.seconds("reduce", numel / per_host)),
            *self._gather(between, num_hosts, 1),
            *self._gather(nbytes, 1, per_host),
            self._codec_stage("unpack", codec.seconds("unpack", numel)),
        ]

    def _levels(self, num_hosts: int, per_host: int) -> dict[str, Network]:
        """What a collective of so many hosts and of so many ranks on each of them goes over."""
        levels = {"network": self._network} if num_hosts > 1 else {}
        return {**levels, "local": self._local} if per_host > 1 else levels

    def _all_reduce(self, nbytes: float, kind: str = "all_reduce") -> list[_Stage]:
        """Over all ranks; round a ring that leaves each host once."""
        p = self.cluster.world_size
        levels = self._levels(self.cluster.num_hosts, self.cluster.ranks_per_host)
        sent = dict.fromkeys(levels, 2 * (p - 1) / p * nbytes)
        ways = [self._collective(kind, levels, sent)]
        if all(level.tree is not None for level in levels.values()):
            ways.append(self._collective("tree", levels, sent))
        return min(ways, key=lambda stages: sum(stage.alone_s for stage in stages))

    def _exchange(self, nbytes: float, num_hosts: int, per_host: int) -> list[_Stage]:
        """Of a message of `nbytes` on every rank, among `num_hosts` hosts with `per_host` ranks each that take part."""
        p = num_hosts * per_host
        # The ranks of a host share what leads out of it, whether they take part in the same exchange or not.
        between = self.cluster.ranks_per_host * (p - per_host) / p * nbytes
        sent = {"network": between, "local": (per_host - 1) / p * nbytes}
        return self._collective("exchange", self._levels(num_hosts, per_host), sent)

    def _gather(self, nbytes: float, num_hosts: int, per_host: int) -> list[_Stage]:
        levels, p = self._levels(num_hosts, per_host), num_hosts * per_host
        if any(level.gather is None for level in levels.values()):
            return self._exchange(nbytes, num_hosts, per_host)
        # Ranks of a host that are not in the same ring have rings of their own.
        rings, sent = self.cluster.ranks_per_host // per_host, (p - 1) / p * nbytes
        return self._collective("gather", levels, {"network": rings * sent, "local": sent})

    def _collective(self, kind: str, levels: Mapping[str, Network], sent: Mapping[str, float]) -> list[_Stage]:
        """sent: bytes, by a host over "network" and by a rank over "local". With no level there is nothing to do."""
        if not levels:
            return []
        busy_s, latency_s, cpu_s = {}, 0.0, 0.0
        for name, level in levels.items():
            cost: Cost = getattr(level, kind) or level.all_reduce
            busy_s[name] = cost.occupied_s + sent[name] * cost.per_unit_s
            latency_s += cost.fixed_s - cost.occupied_s
            of_rank = sent[name] / self.cluster.ranks_per_host if name == "network" else sent[name]
            per_byte_s = level.cpu_s_per_byte if cost.cpu_s_per_unit is None else cost.cpu_s_per_unit
            cpu_s += cost.cpu_fixed_s + of_rank * per_byte_s
        network_s, sent_nbytes = max(busy_s.values()), sent["network"] if "network" in levels else 0.0
        if self._on_streams:
            busy_s, latency_s = {"wire stream": network_s + latency_s}, 0.0
        return [_Stage(busy_s, latency_s, network_s, sent_nbytes, cpu_s)]

    def run(self) -> list[float]:
        """When each bucket is done."""
        done_s = [0.0] * self._num_buckets
        free_s: dict[str, float] = {}
        # A chunk has the workspace of the one that is so many before it.
        slotted = [index for index, chunk in enumerate(self._chunks) if chunk.takes_slot]
        num_slots = self._num_slots if self.config else 0
        successors = dict(zip(slotted, slotted[num_slots:], strict=False))
        waiting = set(successors.values())
        # By the time at which a chunk's next stage is ready: the order in which a resource serves them.
        events = [(chunk.ready_s, index, 0) for index, chunk in enumerate(self._chunks) if index not in waiting]
        heapq.heapify(events)
        while events:
            now, index, number = heapq.heappop(events)
            chunk = self._chunks[index]
            if number == len(chunk.stages):
                done_s[chunk.bucket] = max(done_s[chunk.bucket], now)
                if index in successors:
                    successor = successors[index]
                    heapq.heappush(events, (max(now, self._chunks[successor].ready_s), successor, 0))
                continue
            end = self._serve(chunk.stages[number], now, free_s)
            heapq.heappush(events, (end, index, number + 1))
        return done_s

    def delay_s(self, begin_s: float, end_s: float, busy_cores: float) -> float:
        """Of a backward pass from begin_s to end_s, by the stages that ran meanwhile."""
        shares = [(max(0.0, min(end, end_s) - begin), end - begin, cpu_s) for begin, end, cpu_s in self.spans]
        if self.cluster.cores is None:
            return self.cluster.slowdown * sum(overlap_s for overlap_s, _, _ in shares)
        # What wakes up goes first, on what the model leaves free of the cores before what it computes on. What it loses
        # it then makes up for on as much as it keeps busy, or on one core where it waits now and then.
        work_s = sum(cpu_s * overlap_s / whole_s for overlap_s, whole_s, cpu_s in shares if whole_s > 0)
        free_cores = max(0.0, self.cluster.cores - busy_cores)
        return max(0.0, work_s - free_cores * (end_s - begin_s)) / max(busy_cores, min(1.0, self.cluster.cores))

    def _serve(self, stage: _Stage, now: float, free_s: dict[str, float]) -> float:
        begin_s, end_s = [], []
        for resource, seconds in stage.busy_s.items():
            begin_s.append(max(now, free_s.get(resource, 0.0)))
            end_s.append(begin_s[-1] + seconds)
            free_s[resource] = end_s[-1]
            self.busy_s[resource] = self.busy_s.get(resource, 0.0) + seconds
        self.spans.append((min(begin_s), max(end_s), stage.cpu_s))
        self.network_s += stage.network_s
        self.sent_nbytes += stage.sent_nbytes
        self.cpu_s += stage.cpu_s
        return max(end_s) + stage.latency_s
