"""How long a training step takes: an α–β–γ model, with every assumption in this file.

Each operation takes  fixed + units · per unit  seconds (:class:`Cost`): a collective α + β · bytes that a rank sends, a
codec stage its own fixed part + γ · elements. What these are for a cluster is measured (``fusedcomm probe``) or assumed
(``fusedcomm plan``); here they are put together as the engine does (csrc/engine.h):

- Gradients become ready during the backward pass, in order; a bucket is ready with its last gradient.
- A bucket travels in chunks: pack → collective → reduce → collective → unpack, or pack → all-reduce → unpack. Sizes and
  numbers come from the wire layout, none are worked out here.
- Each resource (the network, the network within a host, each codec lane) does one thing at a time, in the order in
  which things become ready. A collective's fixed part is latency: it delays its chunk and leaves the network free.
- As many chunks are under way as the configuration allows.
- Where ranks compute on the cores that also move the bytes, a step cannot be shorter than the sum of all that work, by
  the cores a rank has.
- The step ends with the optimizer, which waits for every bucket.
"""

import dataclasses
import heapq
from collections.abc import Mapping, Sequence

import torch

from fusedcomm.config import Config
from fusedcomm.native import _C

FIRST_BUCKET_NBYTES = 1 << 20
DEFAULT_CAP_NBYTES = 25 << 20
"""How DDP cuts its buckets unless it is told otherwise."""
FEW_CORES = 3
"""With fewer for each rank, the codec's lanes take turns on them instead of running side by side."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of an operation on so many units."""

    fixed_s: float
    per_unit_s: float

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


@dataclasses.dataclass(frozen=True)
class Codec:
    """The stages of one wire. Units are gradient elements: of the chunk for pack and unpack, and for reduce, which
    decodes one part of each rank, of all its parts together."""

    pack: Cost
    reduce: Cost
    unpack: Cost


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
    """That each rank has for everything; None: what computes does not move bytes."""
    ranks_per_host: int = 1
    """More than one: `network` is a host's, shared by its ranks, and its costs are for bytes that a host sends."""
    local: Network | None = None
    """Within a host; needed if hosts have several ranks."""


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
    """The network is busy for so long."""
    sent_nbytes: int
    """By a rank; with several ranks on a host, by a host to others."""
    num_buckets: int
    bound: str
    """What the step is made of for the most part: "compute", "network", "codec", "latency" or "cores"."""

    @property
    def exposed_s(self) -> float:
        return self.step_s - self.compute_s


def linear_gradients(numels: Sequence[int], backward_s: float, exempt: Sequence[bool] | None = None) -> list[Gradient]:
    """Gradients that take time in proportion to their numel, in the order of the backward pass."""
    total, done, gradients = sum(numels), 0, []
    for index, numel in enumerate(numels):
        done += numel
        gradients.append(Gradient(numel, backward_s * done / total, bool(exempt and exempt[index])))
    return gradients


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


def predict(workload: Workload, choice: Choice, cluster: Cluster) -> Prediction:
    """One step of every rank, all alike and beginning together."""
    simulation = _Simulation(cluster, choice.config)
    buckets = cut_buckets(workload.gradients, choice.cap_nbytes)
    copied_s = 0.0
    for bucket in buckets:
        copied_s += 4 * sum(gradient.numel for gradient in bucket) * cluster.copy_s_per_byte
        simulation.add(bucket, workload.forward_s + bucket[-1].ready_s + copied_s)
    done_s = simulation.run()
    now = workload.forward_s + workload.backward_s + copied_s
    for bucket, bucket_done_s in zip(buckets, done_s, strict=True):
        now = max(now, bucket_done_s)
        if not workload.bucket_views:
            copy_s = 4 * sum(gradient.numel for gradient in bucket) * cluster.copy_s_per_byte
            now += copy_s
            copied_s += copy_s
    step_s = now + workload.optimizer_s
    network_s = simulation.busy_s.get("network", 0.0)
    codec_s = sum(seconds for lane, seconds in simulation.busy_s.items() if lane not in ("network", "local"))
    compute_s = workload.compute_s + copied_s
    work_s = 0.0
    if cluster.cores is not None:
        work_s = (compute_s + codec_s + simulation.cpu_s) / cluster.cores
    parts = {"compute": compute_s, "network": network_s, "codec": codec_s, "cores": work_s}
    bound = max(parts, key=parts.get)
    step_s = max(step_s, work_s)
    if bound != "cores" and parts[bound] < step_s / 2:
        bound = "latency"
    return Prediction(step_s, workload.compute_s, network_s, simulation.sent_nbytes, len(buckets), bound)


@dataclasses.dataclass(frozen=True)
class _Stage:
    resource: str
    busy_s: float
    latency_s: float = 0.0


class _Simulation:
    """Chunks of buckets through the stages of the engine; DDP's all-reduces, which are one stage, too."""

    def __init__(self, cluster: Cluster, config: Config | None) -> None:
        self.cluster, self.config = cluster, config
        self.busy_s: dict[str, float] = {}
        self.cpu_s = 0.0
        self.sent_nbytes = 0
        self._two_levels = bool(config and config.hosts is not None and cluster.ranks_per_host > 1)
        if config is not None:
            per_host = cluster.ranks_per_host if self._two_levels else 1
            device = "cpu" if cluster.cores is not None else "cuda"
            self._native = config.native(cluster.world_size, device, per_host)
        self._num_slots = config.chunks_in_flight_for(cluster.world_size, device) if config else None
        self._chunks: list[tuple[int, float, list[_Stage]]] = []  # bucket, when it is ready, stages
        self._num_buckets = 0

    def add(self, bucket: Sequence[Gradient], ready_s: float) -> None:
        numel = sum(gradient.numel for gradient in bucket)
        exempt = sum(gradient.numel for gradient in bucket if gradient.exempt)
        index = self._num_buckets
        self._num_buckets += 1
        if self.config is None:
            self._chunks.append((index, ready_s, self._all_reduce(4 * numel)))
            return
        lossy = [numel - exempt, *[0] * (len(self.config.wires) - 1)]
        plan = _C.plan_bucket(self._native, self.cluster.world_size, torch.empty(0), exempt, lossy)
        if plan.in_place:
            scale = self._codec_stage("pack", self.cluster.codecs["fp32"].pack, numel)
            self._chunks.append((index, ready_s, [scale, *self._all_reduce(4 * numel)]))
            return
        layout = plan.layout
        codec = self.cluster.codecs[layout.wire]
        for chunk in range(layout.num_chunks):
            of_chunk = min(layout.padded_numel, numel) / layout.num_chunks
            if plan.sum == "two-shot":
                stages = self._two_shot(plan, codec, of_chunk)
            else:
                stages = [
                    self._codec_stage("pack", codec.pack, of_chunk),
                    *self._all_reduce(layout.chunk_nbytes),
                    self._codec_stage("unpack", codec.unpack, of_chunk),
                ]
            self._chunks.append((index, ready_s if chunk == 0 else 0.0, stages))

    def _codec_stage(self, lane: str, cost: Cost, numel: float) -> _Stage:
        few = self.cluster.cores is not None and self.cluster.cores < FEW_CORES
        return _Stage("codec" if few else lane, cost(numel))

    def _all_reduce(self, nbytes: float) -> list[_Stage]:
        """A ring over all ranks that leaves each host once."""
        p, per_host = self.cluster.world_size, self.cluster.ranks_per_host
        sent = 2 * (p - 1) / p * nbytes
        stages = [self._transfer("network", self.cluster.network, "all_reduce", sent)] if p > per_host else []
        if per_host > 1:
            stages.append(self._transfer("local", self.cluster.local, "all_reduce", sent))
        return stages

    def _exchange(self, nbytes: float, num_hosts: int, per_host: int) -> list[_Stage]:
        """Of a message of `nbytes` on every rank, to `num_hosts` hosts with `per_host` ranks each that take part."""
        p = num_hosts * per_host
        stages = []
        if num_hosts > 1:
            # The ranks of a host share what leads out of it, whether they take part in the same exchange or not.
            sent = self.cluster.ranks_per_host * (p - per_host) / p * nbytes
            stages.append(self._transfer("network", self.cluster.network, "exchange", sent))
        if per_host > 1:
            stages.append(self._transfer("local", self.cluster.local, "exchange", (per_host - 1) / p * nbytes))
        return stages

    def _two_shot(self, plan: "_C.BucketPlan", codec: Codec, numel: float) -> list[_Stage]:
        per_host = self.cluster.ranks_per_host
        num_hosts = self.cluster.world_size // per_host
        nbytes = plan.layout.chunk_nbytes
        if not self._two_levels:
            exchange = self._exchange(nbytes, num_hosts, per_host)
            return [
                self._codec_stage("pack", codec.pack, numel),
                *exchange,
                self._codec_stage("reduce", codec.reduce, numel),
                *self._exchange(nbytes, num_hosts, per_host),
                self._codec_stage("unpack", codec.unpack, numel),
            ]
        host_layout = plan.host_layouts[0]
        local = self.cluster.codecs[host_layout.wire]
        between = nbytes / per_host
        return [
            self._codec_stage("pack", local.pack, numel),
            *self._exchange(host_layout.chunk_nbytes, 1, per_host),
            self._codec_stage("local reduce", local.reduce, numel),
            *self._exchange(between, num_hosts, 1),
            self._codec_stage("reduce", codec.reduce, numel / per_host),
            *self._exchange(between, num_hosts, 1),
            *self._exchange(nbytes, 1, per_host),
            self._codec_stage("unpack", codec.unpack, numel),
        ]

    def _transfer(self, resource: str, network: Network, kind: str, nbytes: float) -> _Stage:
        cost: Cost = getattr(network, kind)
        self.cpu_s += network.cpu_s_per_byte * nbytes
        if resource == "network":
            self.sent_nbytes += round(nbytes)
        return _Stage(resource, nbytes * cost.per_unit_s, cost.fixed_s)

    def run(self) -> list[float]:
        """When each bucket is done."""
        done_s = [0.0] * self._num_buckets
        free_s: dict[str, float] = {}
        num_slots = self._num_slots or len(self._chunks)
        # By the time at which a chunk's next stage is ready: the order in which a resource serves them.
        events: list[tuple[float, int, int]] = []
        released_s = [0.0] * len(self._chunks)
        bucket_ready_s = 0.0
        ready_s = []
        for _, ready, _ in self._chunks:
            bucket_ready_s = max(bucket_ready_s, ready)
            ready_s.append(bucket_ready_s)
        for chunk in range(min(num_slots, len(self._chunks))):
            heapq.heappush(events, (ready_s[chunk], chunk, 0))
        while events:
            now, chunk, number = heapq.heappop(events)
            bucket, _, stages = self._chunks[chunk]
            if number == len(stages):
                done_s[bucket] = max(done_s[bucket], now)
                successor = chunk + num_slots
                if successor < len(self._chunks):
                    released_s[successor] = now
                    heapq.heappush(events, (max(now, ready_s[successor]), successor, 0))
                continue
            stage = stages[number]
            end = max(now, free_s.get(stage.resource, 0.0)) + stage.busy_s
            free_s[stage.resource] = end
            self.busy_s[stage.resource] = self.busy_s.get(stage.resource, 0.0) + stage.busy_s
            heapq.heappush(events, (end + stage.latency_s, chunk, number + 1))
        return done_s
