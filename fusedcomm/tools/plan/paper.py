"""``fusedcomm plan``: predicts a step on a cluster that need not be available, with the model of cost_model.py. The
costs that ``fusedcomm probe`` measures are assumed here, and every assumption is printed.

Latencies come from the model by which NCCL chooses its algorithms (src/graph/tuning.cc of NCCL 2.8). With p ranks on H
hosts, L = p/H ranks on each, a latency of aₙ for a hop between hosts and aₗ for one within a host, and c for a launch:

    ring all-reduce    c + r·(2(H−1)·aₙ + 2(p−H)·aₗ)     2(p−1) steps; r = 1.9 with several hosts, else 1
    tree all-reduce    c + 2·log₂H·aₙ' + 2(L−1)·aₗ'      each hop carries a piece of 256 KiB: a' = a + 256 KiB/rate
    ring all-gather    c + (H−1)·aₙ + (p−H)·aₗ

An all-to-all has one message for each peer. We assume that 16 of them are in flight at a time:

    all-to-all         c + ⌈(p−L)/16⌉·aₙ + ⌈(L−1)/16⌉·aₗ
"""

import dataclasses
import math
from collections.abc import Sequence

from fusedcomm import chunks
from fusedcomm.chunks import nbytes_per_element
from fusedcomm.config import WIRES, Config
from fusedcomm.tools import cost_model
from fusedcomm.tools.cluster import Cluster, Codec, Cost, Network, TwoLevels
from fusedcomm.tools.code import attach_arguments
from fusedcomm.tools.cost_model import WORTHWHILE, Choice, Gradient, Prediction, Workload, predict
from fusedcomm.tools.plan.architectures import Parameter

# Bytes that a hop of the tree carries at a time.
TREE_PIECE_NBYTES = 256 << 10
TREE_RATE = 0.9
"""A tree's rate as a share of a ring's: NCCL's own figure (busBw * .9)."""
RING_PLATEAU = 1.9
"""Factor on the latencies of a ring through several hosts: NCCL's own figure, which it uses for all messages except
short ones. Short messages take NCCL's faster protocols, which are not modeled."""
# Messages of an all-to-all that a rank has in flight at a time; an assumption.
MESSAGES_UNDER_WAY = 16
WORTH_INT4 = 0.10
"""The share of a step that int4 has to save over the best other wire. It is larger than WORTHWHILE because int4's
rounding errors are up to 18 times those of int8."""
EVEN_PARAMETERS = 100
"""Number of parameters, all of equal size, if only --params is given."""


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Accelerators and their connections. Every default is an assumption that is printed.

    Raises:
        ValueError: a field is out of range; names the field, its value and what is possible.
    """

    ranks: int
    ranks_per_host: int = 1
    nic_gbps: float = 25.0
    """Line rate of a host, all its NICs together, each way; Gbit/s."""
    efficiency: float = 0.926
    """Share of that line rate that gradients can use."""
    # Latency of a hop between hosts.
    nic_latency_us: float = 9.6
    local_gbps: float = 200.0
    """Rate from a rank to the others on its host; Gbit/s."""
    # Latency of a hop within a host.
    local_latency_us: float = 5.7
    launch_us: float = 8.4
    """Time to launch a collective."""
    # Whether all-reduces may take a tree.
    tree: bool = True
    memory_gbytes_per_s: float = 1500.0
    codec_share: float = 0.25
    """Share of the memory rate that fusedcomm's kernels reach beside the backward pass."""
    kernel_us: float = 10.0
    """Time to launch one of fusedcomm's kernels, with the events around it."""
    slowdown: float = 0.4
    """See cluster.Cluster."""

    def __post_init__(self) -> None:
        for name, least in (("ranks", 2), ("ranks_per_host", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} is not possible: use at least {least}")
        if self.ranks % self.ranks_per_host:
            raise ValueError(
                f"ranks={self.ranks} do not fill hosts of ranks_per_host={self.ranks_per_host}: use a multiple of "
                "ranks_per_host"
            )
        for name in ("nic_gbps", "local_gbps", "memory_gbytes_per_s"):
            _check(name, getattr(self, name), 0, math.inf)
        for name in ("efficiency", "codec_share"):
            _check(name, getattr(self, name), 0, 1)
        for name in ("nic_latency_us", "local_latency_us", "launch_us", "kernel_us", "slowdown"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} is not possible: use 0 or more")

    @property
    def num_hosts(self) -> int:
        return self.ranks // self.ranks_per_host

    def assumptions(self) -> dict[str, str]:
        """The assumptions about the hardware and their sources, by topic, in the order in which they are printed."""
        hosts = f"{self.num_hosts} hosts × {self.ranks_per_host} GPUs"
        said = {
            "ranks": f"{self.ranks}: {hosts}, all alike and always equally fast",
            "between hosts": f"{self.nic_gbps:g} Gbit/s each way per host; gradients can use "
            f"{self.efficiency:g} of it (0.926: RoCE, 1024 bytes in 1106 on the wire); the switch is never the limit",
            "latency between hosts": f"{self.nic_latency_us:g} µs a hop (9.6: NCCL's own model, src/graph/tuning.cc)",
        }
        if self.ranks_per_host > 1:
            said["within a host"] = (
                f"{self.local_gbps:g} Gbit/s each way per GPU, {self.local_latency_us:g} µs a hop (NCCL's model: 5.7 "
                "over PCIe, 3.4 over NVLink)"
            )
        said |= {
            "all-reduce": f"NCCL's ring, {RING_PLATEAU} × these latencies between hosts"
            + (
                f", or its tree, in pieces of {TREE_PIECE_NBYTES >> 10} KiB at {TREE_RATE} of a ring's rate, where "
                "the tree is faster"
                if self.tree
                else " (no tree)"
            ),
            "all-to-all": f"{MESSAGES_UNDER_WAY} messages of a GPU in flight at a time (assumed, no source)",
            "collectives": f"one after another on one stream, {self.launch_us:g} µs each to launch (NCCL's model)",
            "memory": f"{self.memory_gbytes_per_s:g} GB/s; gradients are copied into buckets and out of them, each "
            "byte read and written at that rate (no gradient_as_bucket_view); fusedcomm's kernels reach "
            f"{self.codec_share:g} of it, and take {self.kernel_us:g} µs more each (assumed, not measured on a GPU)",
            "slowdown": f"the backward pass is longer by {self.slowdown:g} of the time that collectives and "
            "kernels run beside it (0.4: roughly fitted to PyTorch's benchmarks/distributed/ddp/README.md)",
        }
        return said

    def assumptions_of_ways(self) -> dict[str, str]:
        """The assumptions about buckets, chunks and the recommendation, in the order in which they are printed."""
        whole = chunks.resolved(Config(), self.ranks, "cuda")
        said = {
            "buckets": f"a first one of {cost_model.FIRST_BUCKET_NBYTES >> 20} MiB where the cap is DDP's own, "
            f"{cost_model.DEFAULT_CAP_NBYTES >> 20} MiB",
            "chunks": f"fusedcomm's, of {whole.chunks.nbytes >> 20} MiB, {whole.chunks.in_flight} in flight",
            "exact": "parameters of one dimension, in a wire that has scales, if --model gives the parameters",
        }
        if 1 < self.ranks_per_host < self.ranks:
            said["within a host, on two levels"] = f"{whole.local_wire} (local_wire)"
        said["recommended"] = (
            f"the first of --wires within {WORTHWHILE:.0%} of the fastest, if the fastest makes a step "
            f"shorter by more than {WORTHWHILE:.0%}; int4 only if nothing else does, or it is faster by more than "
            f"{WORTH_INT4:.0%}"
        )
        return said

    def cluster(self) -> Cluster:
        """The costs that follow from the assumptions."""
        memory = 1e9 * self.memory_gbytes_per_s
        network, local = self._networks(two_levels=False)
        return Cluster(
            world_size=self.ranks,
            network=network,
            codecs={wire: self._codec(wire) for wire in WIRES},
            copy_s_per_byte=2 / memory,  # each byte is read and written
            ranks_per_host=self.ranks_per_host,
            local=local if self.ranks_per_host > 1 else None,
            two_levels=TwoLevels(*self._networks(two_levels=True)),
            slowdown=self.slowdown,
        )

    def _networks(self, two_levels: bool) -> tuple[Network, Network]:
        """The networks (between hosts, within a host).

        Args:
            two_levels: exchanges and all-gathers have the ranks of one host, or one rank of each host, instead of all.
        """
        p, hosts, per_host = self.ranks, self.num_hosts, self.ranks_per_host
        launch, hop, local_hop = (us * 1e-6 for us in (self.launch_us, self.nic_latency_us, self.local_latency_us))
        rate, local_rate = 1e9 / 8 * self.nic_gbps * self.efficiency, 1e9 / 8 * self.local_gbps
        between, within = 1 / rate, 1 / local_rate
        tree_hop, local_tree_hop = hop + TREE_PIECE_NBYTES * between, local_hop + TREE_PIECE_NBYTES * within
        peers, gather_steps = (hosts - 1, hosts - 1) if two_levels else (p - per_host, hosts - 1)
        # A collective is launched once. If it has both levels, the launch is part of its cost between hosts.
        local_launch = launch if two_levels or hosts == 1 else 0.0
        local_gather_steps = per_host - 1 if two_levels else p - hosts
        ring = 2 * (RING_PLATEAU if hosts > 1 else 1)
        network = Network(
            all_reduce=Cost(launch + ring * (hosts - 1) * hop, between),
            exchange=Cost(launch + math.ceil(peers / MESSAGES_UNDER_WAY) * hop, between),
            tree=Cost(launch + 2 * math.log2(hosts) * tree_hop, between / TREE_RATE) if self.tree else None,
            gather=Cost(launch + gather_steps * hop, between),
        )
        all_reduce_launch = launch if hosts == 1 else 0.0
        local = Network(
            all_reduce=Cost(all_reduce_launch + ring * (p - hosts) * local_hop, within),
            exchange=Cost(local_launch + math.ceil((per_host - 1) / MESSAGES_UNDER_WAY) * local_hop, within),
            tree=Cost(all_reduce_launch + 2 * (per_host - 1) * local_tree_hop, within / TREE_RATE)
            if self.tree
            else None,
            gather=Cost(local_launch + local_gather_steps * local_hop, within),
        )
        return network, local

    def _codec(self, wire: str) -> Codec:
        """Costs by the bytes that each stage reads and writes for an element of fp32 gradients, with w bytes in the
        wire: pack 4 + w, reduce w (the p-th part that it writes is left out), unpack w + 4, sum p·w + 4."""
        rate = 1e9 * self.memory_gbytes_per_s * self.codec_share
        w = nbytes_per_element(wire)
        kernel = self.kernel_us * 1e-6
        pack = Cost(kernel, 8 / rate) if wire == "fp32" else Cost(kernel, (4 + w) / rate)
        reduce, unpack = Cost(kernel, w / rate), Cost(kernel, (w + 4) / rate)
        return Codec(pack, reduce, unpack, sum=Cost(kernel, (self.ranks * w + 4) / rate))


@dataclasses.dataclass(frozen=True)
class Training:
    """One rank's step without synchronization.

    Raises:
        ValueError: a field is out of range, or there is no parameter.
    """

    parameters: Sequence[Parameter]
    """In the order of registration. Their gradients become ready from last to first."""
    step_s: float
    backward_share: float = 2 / 3

    def __post_init__(self) -> None:
        _check("step_s", self.step_s, 0, math.inf)
        _check("backward_share", self.backward_share, 0, 1)
        if not any(parameter.numel for parameter in self.parameters):
            raise ValueError("a model without parameters has no gradients to send: use at least one parameter")

    def workload(self, config: Config | None = None) -> Workload:
        """The input of the cost model. A parameter's part of the backward pass is proportional to its multiply-adds, or
        to its numel if no parameter has multiply-adds.

        Args:
            config: decides which gradients are exempt; None: none are.
        """
        exempt_1d = config is not None and config.exempts_1d
        backward_s, total = self.step_s * self.backward_share, sum(p.multiply_adds for p in self.parameters)
        weights = [p.multiply_adds if total else p.numel for p in self.parameters]
        done, gradients = 0, []
        for parameter, weight in zip(reversed(self.parameters), reversed(weights), strict=True):
            done += weight
            if parameter.numel:
                ready_s = backward_s * done / sum(weights)
                gradients.append(Gradient(parameter.numel, ready_s, exempt_1d and parameter.one_dimensional))
        return Workload(self.step_s - backward_s, backward_s, 0.0, gradients)


def even_parameters(numel: int) -> list[Parameter]:
    """Parameters of equal size with `numel` elements in total, for a model whose parameters are unknown."""
    count = min(EVEN_PARAMETERS, numel)
    return [Parameter(numel * (i + 1) // count - numel * i // count, 0) for i in range(count)]


@dataclasses.dataclass(frozen=True)
class Row:
    """A way of synchronizing, with the fastest of the given bucket caps. DDP's default has DDP's own cap."""

    way: str
    wire: str | None
    """None: DDP alone."""
    attach: str | None
    """The arguments of fusedcomm.attach after the module, as source text. None: DDP alone."""
    cap_mib: float
    step_s: float
    speedup: float
    """The step with DDP's default, divided by this one."""
    efficiency: float
    """A step without synchronization, divided by this one."""
    sent_nbytes: int
    """Bytes that a host sends to other hosts."""
    exposed_s: float
    num_buckets: int
    bound: str


DDP_DEFAULT, DDP_TUNED = "DDP default", "DDP, best cap"


def ways(wires: Sequence[str], several_levels: bool) -> dict[str, Config]:
    """The ways to synchronize, by name: wire by wire, and with each wire the most exact way first. :func:`recommend`
    takes the first of equally fast ones. With several levels the default has two, and hosts=None one."""
    found: dict[str, Config] = {}
    for wire in wires:
        name = f"wire={wire}"
        if several_levels and wire != "fp32":
            found[f"{name}, hosts=None"] = Config(wire, hosts=None)
        found[name] = Config(wire)
        if wire in ("bf16", "fp16"):
            found[f"{name}, sum=direct"] = Config(wire, sum="direct")
    return found


def plan(hardware: Hardware, training: Training, wires: Sequence[str], caps_mib: Sequence[float]) -> list[Row]:
    """Rows for DDP's default, DDP with the best cap, and every way, in this order. ValueError for impossible caps."""
    _check_caps(caps_mib)
    several_levels = 1 < hardware.ranks_per_host < hardware.ranks
    cluster = hardware.cluster()
    default = predict(training.workload(), Choice(None), cluster)

    def best(way: str, config: Config | None) -> Row:
        wire, attach = (None, None) if config is None else (config.wire, attach_arguments(config))
        workload = training.workload(config)
        found = [(predict(workload, Choice(config, round(cap * 2**20)), cluster), cap) for cap in caps_mib]
        prediction, cap = min(found, key=lambda pair: pair[0].step_s)
        return _row(way, wire, attach, cap, prediction, default)

    rows = [
        _row(DDP_DEFAULT, None, None, cost_model.DEFAULT_CAP_NBYTES / 2**20, default, default),
        best(DDP_TUNED, None),
    ]
    for name, config in ways(wires, several_levels).items():
        rows.append(best(name, config))
    return rows


def _row(way: str, wire: str | None, attach: str | None, cap_mib: float, found: Prediction, default: Prediction) -> Row:
    return Row(
        way=way,
        wire=wire,
        attach=attach,
        cap_mib=cap_mib,
        step_s=found.step_s,
        speedup=default.step_s / found.step_s,
        efficiency=found.compute_s / found.step_s,
        sent_nbytes=found.sent_nbytes,
        exposed_s=found.exposed_s,
        num_buckets=found.num_buckets,
        bound=found.bound,
    )


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """The result of :func:`recommend`."""

    line: str
    """A line of code, or "leave it off: " and the reason. Never empty."""
    faster: Row | None
    """The fastest way with a wire that was not accepted, if it is faster by more than WORTHWHILE; else None."""


def recommend(rows: Sequence[Row], accepted: Sequence[str]) -> Recommendation:
    """Recommends the first of the ways with an accepted wire that are nearly as fast as the fastest of these, or DDP
    alone. The first is the most exact, because wires by default are listed from the most to the least exact."""
    line, step_s = _recommend(rows[0], rows[1], [row for row in rows[2:] if row.wire in accepted])
    others = [row for row in rows[2:] if row.wire not in accepted and row.step_s < (1 - WORTHWHILE) * step_s]
    return Recommendation(line, min(others, key=lambda row: row.step_s, default=None))


def _recommend(default: Row, tuned: Row, others: Sequence[Row]) -> tuple[str, float]:
    """(line of the recommendation, seconds of a step with it)"""
    if default.exposed_s < WORTHWHILE * default.step_s:
        waits = default.exposed_s / default.step_s
        return f"leave it off: compute-bound, DDP's default waits for {waits:.1%} of a step", default.step_s
    plain = tuned if tuned.step_s < default.step_s * (1 - WORTHWHILE) else default
    instead = "" if plain is default else f"; DDP(…, bucket_cap_mb={plain.cap_mib:g}) alone is {plain.speedup:.2f}×"
    if not others:
        return f"leave it off: no fusedcomm wire was accepted{instead}", plain.step_s
    fastest = min(row.step_s for row in others)
    if fastest > plain.step_s * (1 - WORTHWHILE):
        gain = plain.step_s / fastest
        # The step mostly computes, yet it waits. Sending fewer bytes does not help, so it waits for latency.
        bound = "latency" if plain.bound == "compute" else plain.bound
        line = f"leave it off: {bound}-bound, and the fastest way is {gain:.2f} times as fast as DDP{instead}"
        return line, plain.step_s
    exacter = [row for row in others if row.wire != "int4"]
    limit = min(plain.step_s * (1 - WORTHWHILE), fastest / (1 - WORTH_INT4))
    if exacter and min(row.step_s for row in exacter) <= limit:
        others = exacter
        fastest = min(row.step_s for row in others)
    chosen = next(row for row in others if row.step_s <= fastest * (1 + WORTHWHILE))
    cap = "" if chosen.cap_mib == default.cap_mib else f"  # with DDP(…, bucket_cap_mb={chosen.cap_mib:g})"
    return f"fusedcomm.attach(ddp, {chosen.attach}){cap}", chosen.step_s


def _check(name: str, value: float, low: float, high: float) -> None:
    """Raises ValueError unless low < value ≤ high and `value` is finite."""
    if not (low < value <= high and value < math.inf):
        limit = "a positive number" if high == math.inf else f"more than {low:g} and at most {high:g}"
        raise ValueError(f"{name}={value:g} is not possible: use {limit}")


def _check_caps(caps_mib: Sequence[float]) -> None:
    if not caps_mib or any(not 0 <= cap < math.inf for cap in caps_mib):
        raise ValueError(f"caps={list(caps_mib)} is not possible: use at least one bucket_cap_mb, 0 or more")
