"""Predicts how long a training step takes, with an α–β–γ model. This list has every assumption.

cluster.py gives the time of each operation on a cluster. This file schedules the operations as the engine does
(csrc/engine/engine.h):

- Gradients become ready during the backward pass, in order. A bucket is ready when its last gradient is.
- A bucket is cut into chunks. Each chunk takes the steps of its plan (csrc/engine/sums.h), which say how many bytes
  they move.
- Each resource (the network between hosts, the network within a host, each codec lane) does one thing at a time, in the
  order in which work becomes ready. A collective sends its bytes between hosts and within hosts at the same time.
- On CPU the fixed part of a collective is latency: it delays the chunk and leaves the network free. On an accelerator
  collectives follow one another on one stream, fixed parts included, and every codec stage except pack shares a stream
  with unpack.
- At most as many chunks are in flight as the configuration allows.
- Where ranks compute on the cores that also move bytes, a step takes at least the core time of all work, divided by the
  cores of a rank. Communication that finds no idle core delays the backward pass.
- An accelerator may compute more slowly while collectives and codec stages run on it.
- The step ends with the optimizer, which waits for every bucket.
"""

import dataclasses
import heapq
from collections.abc import Mapping, Sequence

import torch

from fusedcomm import chunks
from fusedcomm.config import Config
from fusedcomm.native import _C
from fusedcomm.tools.cluster import COSTS_OF_OPERATIONS, Cluster, Cost, Network

# The cap of DDP's first bucket if bucket_cap_mb is DDP's default, in bytes.
FIRST_BUCKET_NBYTES = 1 << 20
DEFAULT_CAP_NBYTES = 25 << 20
"""DDP's default bucket_cap_mb, in bytes."""
WORTHWHILE = 0.03
"""Share of a step. A smaller gain is within the errors of the model and of measurements, and not worth a change."""
# How often a prediction is repeated at most: a delayed backward pass overlaps with more stages, which delay it further.
MAX_DELAYS = 4
FEW_CORES = 3
"""With fewer cores for each rank, the codec's lanes take turns on them instead of running side by side."""


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter."""

    numel: int
    ready_s: float
    """Seconds from the start of the backward pass, in a step without synchronization."""
    exempt: bool = False
    """Whether it is sent in fp32 whatever the wire."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """One rank's step without synchronization. Gradients are fp32."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    gradients: Sequence[Gradient]
    """In the order in which they become ready, usually from the model's last parameter to its first."""
    busy_cores: float = 1.0
    """Cores that computing keeps busy on average, where ranks compute on the cores that also move bytes. Near zero if
    the step mostly waits for something else."""

    @property
    def numel(self) -> int:
        """Elements of all gradients."""
        return sum(gradient.numel for gradient in self.gradients)

    @property
    def compute_s(self) -> float:
        """Seconds of the step."""
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a user can decide."""

    # None: DDP's own all-reduce.
    config: Config | None
    # DDP's bucket_cap_mb, in bytes.
    cap_nbytes: int = DEFAULT_CAP_NBYTES


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted step of one choice."""

    step_s: float
    compute_s: float
    """Seconds of the same step without synchronization."""
    network_s: float
    """Seconds for which the network is busy, latencies excluded."""
    sent_nbytes: int
    """Bytes that a rank sends. With several ranks on a host: bytes that a host sends to other hosts."""
    num_buckets: int
    bound: str
    """The largest part of the step: "compute", "network", "codec" or "cores"; "latency" if none is half the step."""

    @property
    def exposed_s(self) -> float:
        """Seconds that synchronization adds to the step."""
        return self.step_s - self.compute_s


def cut_buckets(gradients: Sequence[Gradient], cap_nbytes: int) -> list[list[Gradient]]:
    """Cuts gradients into buckets as DDP does. A bucket ends with the gradient that takes it to its cap. The first
    bucket's cap is 1 MiB if `cap_nbytes` is DDP's default."""
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
    """Predicts one step. All ranks are alike and begin together.

    Raises:
        ValueError: `cluster` lacks the costs of a wire or of a codec stage that the choice needs.
    """
    buckets = cut_buckets(workload.gradients, choice.cap_nbytes)
    prediction, delay_s = _predict(workload, choice, cluster, buckets, stretch=1.0)
    # On cores that also move bytes, a delayed backward pass overlaps with more stages, which delay it further.
    for _ in range(1 if cluster.cores is None else MAX_DELAYS):
        if delay_s <= 0 or workload.backward_s <= 0:
            break
        stretch = 1 + delay_s / workload.backward_s
        prediction, delay_s = _predict(workload, choice, cluster, buckets, stretch)
    return prediction


def _predict(
    workload: Workload, choice: Choice, cluster: Cluster, buckets: Sequence[Sequence[Gradient]], stretch: float
) -> tuple[Prediction, float]:
    """Predicts a step whose backward pass takes `stretch` times as long.

    Returns:
        The prediction, and the seconds by which the stages that run during the backward pass delay it.
    """
    simulation = _Simulation(cluster, choice.config)
    copies_s = [4 * sum(gradient.numel for gradient in bucket) * cluster.copy_s_per_byte for bucket in buckets]
    copied_s = 0.0
    for bucket, copy_s in zip(buckets, copies_s, strict=True):
        copied_s += copy_s
        simulation.add(bucket, workload.forward_s + stretch * bucket[-1].ready_s + copied_s)
    done_s = simulation.run()
    backward_end_s = now = workload.forward_s + stretch * workload.backward_s + copied_s
    for bucket_done_s, copy_s in zip(done_s, copies_s, strict=True):
        now = max(now, bucket_done_s) + copy_s
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


# The resources that are networks. All others are codec lanes.
_WIRES = ("network", "local", "wire stream")


@dataclasses.dataclass(frozen=True)
class _Stage:
    """One operation on one chunk."""

    busy_s: Mapping[str, float]
    """Seconds by resource. The stage begins on each resource as soon as that is free, and ends when all have ended."""
    # Seconds after the busy ones, in which no resource is busy.
    latency_s: float = 0.0
    # Seconds for which the network is busy.
    network_s: float = 0.0
    # Counted as in Prediction.
    sent_nbytes: float = 0.0
    # Core seconds.
    cpu_s: float = 0.0

    @property
    def alone_s(self) -> float:
        """Seconds if no resource is busy with another stage."""
        return max(self.busy_s.values()) + self.latency_s


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A chunk of a bucket; or a whole bucket, for DDP's own all-reduce."""

    bucket: int
    ready_s: float
    stages: Sequence[_Stage]
    # Whether it needs a workspace.
    takes_slot: bool


class _Simulation:
    """Takes the chunks of all buckets through the engine's stages. DDP's own all-reduce of a bucket is one stage."""

    def __init__(self, cluster: Cluster, config: Config | None) -> None:
        self.cluster, self.config = cluster, config
        self.busy_s: dict[str, float] = {}
        self.spans: list[tuple[float, float, float]] = []
        """(begin, end, core seconds) of each stage, in seconds."""
        self.network_s = self.sent_nbytes = self.cpu_s = 0.0
        self._on_streams = cluster.cores is None
        several_hosts_and_ranks = 1 < cluster.ranks_per_host < cluster.world_size
        self._two_levels = config is not None and config.two_levels is not None and several_hosts_and_ranks
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
        """Adds a bucket that is ready at `ready_s`. Buckets are added in the order in which they become ready."""
        numel = sum(gradient.numel for gradient in bucket)
        index = self._num_buckets
        self._num_buckets += 1
        if self.config is None:
            stages = self._all_reduce(4 * numel, self.cluster.num_hosts, self.cluster.ranks_per_host)
            self._chunks.append(_Chunk(index, ready_s, stages, takes_slot=False))
            return
        slices = [(gradient.numel, _C.EXACT_WIRE if gradient.exempt else 0) for gradient in bucket]
        plan = _C.plan_bucket(self._native, self.cluster.world_size, torch.empty(0, dtype=torch.float32), slices)
        if plan.num_chunks == 0:
            return  # the bucket is empty
        stages = [stage for step in plan.steps for stage in self._stages(plan, step, numel / plan.num_chunks)]
        self._chunks += [_Chunk(index, ready_s, stages, takes_slot=not plan.in_place)] * plan.num_chunks

    def _stages(self, plan: "_C.BucketPlan", step: "_C.Step", numel: float) -> list[_Stage]:
        """The stages of one step of a chunk that has `numel` elements."""
        layout = plan.host_layouts[0] if step.in_local_wire else plan.layout
        if step.is_collective:
            return self._of_collective(step)
        cost = COSTS_OF_OPERATIONS[step.operation]
        if cost == "reduce":
            numel *= step.nbytes / layout.chunk_nbytes  # between hosts a rank reduces its part only
        return [self._codec_stage(step.stage, self.cluster.codec(layout.wire).seconds(cost, numel))]

    def _of_collective(self, step: "_C.Step") -> list[_Stage]:
        num_hosts, per_host = self.cluster.num_hosts, self.cluster.ranks_per_host
        if step.channel.startswith("local"):
            num_hosts = 1
        elif step.channel.startswith("cross"):
            per_host = 1
        if step.operation == "all-reduce":
            return self._all_reduce(step.nbytes, num_hosts, per_host)
        collective = {"all-to-all": self._exchange, "all-gather": self._gather}[step.operation]
        return collective(step.nbytes, num_hosts, per_host)

    def _codec_stage(self, lane: str, seconds: float) -> _Stage:
        if self._on_streams:
            lane = "pack" if lane == "pack" else "unpack"
        elif self.cluster.cores < FEW_CORES:
            lane = "codec"
        return _Stage({lane: seconds}, cpu_s=seconds)

    def _levels(self, num_hosts: int, per_host: int) -> dict[str, Network]:
        """The networks that a collective of `num_hosts` hosts with `per_host` ranks on each uses, by resource."""
        levels = {"network": self._network} if num_hosts > 1 else {}
        return {**levels, "local": self._local} if per_host > 1 else levels

    def _all_reduce(self, nbytes: float, num_hosts: int, per_host: int) -> list[_Stage]:
        """An all-reduce around a ring that leaves each host once, or along a tree where that is faster."""
        levels, p = self._levels(num_hosts, per_host), num_hosts * per_host
        sent = self._round_ring(2 * (p - 1) / p * nbytes, per_host)
        ways = [self._collective("all_reduce", levels, sent)]
        if all(level.tree is not None for level in levels.values()):
            ways.append(self._collective("tree", levels, sent))
        return min(ways, key=lambda stages: sum(stage.alone_s for stage in stages))

    def _exchange(self, nbytes: float, num_hosts: int, per_host: int) -> list[_Stage]:
        """An all-to-all of a message of `nbytes` on every rank, among `per_host` ranks of each of `num_hosts` hosts."""
        p = num_hosts * per_host
        # The ranks of a host share its link to other hosts, whether or not they take part in the same exchange.
        between = self.cluster.ranks_per_host * (p - per_host) / p * nbytes
        sent = {"network": between, "local": (per_host - 1) / p * nbytes}
        return self._collective("exchange", self._levels(num_hosts, per_host), sent)

    def _gather(self, nbytes: float, num_hosts: int, per_host: int) -> list[_Stage]:
        """An all-gather around a ring, or as an exchange if the ring has no cost on one of the levels."""
        levels, p = self._levels(num_hosts, per_host), num_hosts * per_host
        if any(level.gather is None for level in levels.values()):
            return self._exchange(nbytes, num_hosts, per_host)
        return self._collective("gather", levels, self._round_ring((p - 1) / p * nbytes, per_host))

    def _round_ring(self, nbytes: float, per_host: int) -> dict[str, float]:
        """Bytes sent if each rank sends `nbytes` around a ring. A host has a ring for each `per_host` of its ranks."""
        return {"network": self.cluster.ranks_per_host // per_host * nbytes, "local": nbytes}

    def _collective(self, kind: str, levels: Mapping[str, Network], sent: Mapping[str, float]) -> list[_Stage]:
        """The stage of one collective; empty if `levels` is.

        Args:
            sent: bytes that a host sends over "network" and a rank over "local".
        """
        if not levels:
            return []
        busy_s, latency_s, cpu_s = {}, 0.0, 0.0
        for name, level in levels.items():
            cost: Cost = getattr(level, kind)
            busy_s[name] = sent[name] * cost.per_unit_s
            latency_s += cost.fixed_s
            of_rank = sent[name] / self.cluster.ranks_per_host if name == "network" else sent[name]
            cpu_s += of_rank * level.cpu_s_per_byte
        network_s, sent_nbytes = max(busy_s.values()), sent["network"] if "network" in levels else 0.0
        if self._on_streams:
            busy_s, latency_s = {"wire stream": network_s + latency_s}, 0.0
        return [_Stage(busy_s, latency_s, network_s, sent_nbytes, cpu_s)]

    def run(self) -> list[float]:
        """Simulates all chunks. Returns the time in seconds at which each bucket is done."""
        done_s = [0.0] * self._num_buckets
        free_s: dict[str, float] = {}
        # A chunk uses the workspace of the chunk that comes num_slots before it.
        slotted = [index for index, chunk in enumerate(self._chunks) if chunk.takes_slot]
        num_slots = self._num_slots if self.config else 0
        successors = dict(zip(slotted, slotted[num_slots:], strict=False))
        waiting = set(successors.values())
        # A heap by the time at which a chunk's next stage is ready: resources serve stages in this order.
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
        """Seconds by which the stages that run during a backward pass from begin_s to end_s delay it."""
        shares = [(max(0.0, min(end, end_s) - begin), end - begin, cpu_s) for begin, end, cpu_s in self.spans]
        if self.cluster.cores is None:
            return self.cluster.slowdown * sum(overlap_s for overlap_s, _, _ in shares)
        # Communication threads are scheduled first and take the idle cores; only the rest of their work delays the
        # backward pass. The backward pass makes up for it on the cores that it keeps busy, or on one if fewer.
        work_s = sum(cpu_s * overlap_s / whole_s for overlap_s, whole_s, cpu_s in shares if whole_s > 0)
        free_cores = max(0.0, self.cluster.cores - busy_cores)
        return max(0.0, work_s - free_cores * (end_s - begin_s)) / max(busy_cores, min(1.0, self.cluster.cores))

    def _serve(self, stage: _Stage, now: float, free_s: dict[str, float]) -> float:
        """Runs a stage that is ready at `now`, and updates `free_s`. Returns when the chunk's next stage is ready."""
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
