"""``fusedcomm plan``: predicts a step on a cluster that need not be available, with the model of cost_model.py and the
costs of costs.py."""

import dataclasses
import math
from collections.abc import Sequence

from fusedcomm import chunks
from fusedcomm.config import Config
from fusedcomm.tools import cost_model
from fusedcomm.tools.code import attach_arguments
from fusedcomm.tools.cost_model import WORTHWHILE, Choice, Gradient, Prediction, Workload, predict
from fusedcomm.tools.plan.architectures import Parameter
from fusedcomm.tools.plan.costs import cluster_of, rates
from fusedcomm.tools.plan.hardware import CpuHosts, GpuHosts

WORTH_INT4 = 0.10
"""The share of a step that int4 has to save over the best other wire. It is larger than WORTHWHILE because int4's
rounding errors are up to 18 times those of int8."""
EVEN_PARAMETERS = 100
"""Number of parameters, all of equal size, if only --params is given."""


def assumptions_of_ways(hosts: GpuHosts | CpuHosts) -> dict[str, str]:
    """The assumptions about buckets, chunks and the recommendation, in the order in which they are printed."""
    on_cpu = isinstance(hosts, CpuHosts)
    s_per_byte = 1 / rates(hosts)[0] if on_cpu else None
    whole = chunks.resolved(Config(), hosts.ranks, "cpu" if on_cpu else "cuda", s_per_byte)
    nbytes = whole.chunks.nbytes
    size = f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
    said = {
        "buckets": f"a first one of {cost_model.FIRST_BUCKET_NBYTES >> 20} MiB where the cap is DDP's own, "
        f"{cost_model.DEFAULT_CAP_NBYTES >> 20} MiB",
        "chunks": f"fusedcomm's, of {size}{' in bf16' if on_cpu else ''}, {whole.chunks.in_flight} in flight",
        "exact": "parameters of one dimension, in a wire that has scales, if --model gives the parameters",
    }
    if 1 < hosts.ranks_per_host < hosts.ranks:
        said["within a host, on two levels"] = f"{whole.local_wire} (local_wire)"
    said["recommended"] = (
        f"the first of --wires within {WORTHWHILE:.0%} of the fastest, if the fastest makes a step "
        f"shorter by more than {WORTHWHILE:.0%}; int4 only if nothing else does, or it is faster by more than "
        f"{WORTH_INT4:.0%}"
    )
    return said


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
    busy_cores: float = 1.0
    """See cost_model.Workload."""

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
        return Workload(self.step_s - backward_s, backward_s, 0.0, gradients, busy_cores=self.busy_cores)


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


def plan(hosts: GpuHosts | CpuHosts, training: Training, wires: Sequence[str], caps_mib: Sequence[float]) -> list[Row]:
    """Rows for DDP's default, DDP with the best of the caps, and every way, in this order. `caps_mib` is not empty."""
    several_levels = 1 < hosts.ranks_per_host < hosts.ranks
    cluster = cluster_of(hosts)
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
    row: Row
    """The recommended way; DDP's default or DDP with the best cap if `line` says to leave fusedcomm off."""
    faster: Row | None
    """The fastest way with a wire that was not accepted, if it is faster by more than WORTHWHILE; else None."""


def recommend(rows: Sequence[Row], accepted: Sequence[str]) -> Recommendation:
    """Recommends the first of the ways with an accepted wire that are nearly as fast as the fastest of these, or DDP
    alone. The first is the most exact, because wires by default are listed from the most to the least exact."""
    line, chosen = _recommend(rows[0], rows[1], [row for row in rows[2:] if row.wire in accepted])
    others = [row for row in rows[2:] if row.wire not in accepted and row.step_s < (1 - WORTHWHILE) * chosen.step_s]
    return Recommendation(line, chosen, min(others, key=lambda row: row.step_s, default=None))


def _recommend(default: Row, tuned: Row, others: Sequence[Row]) -> tuple[str, Row]:
    """(line of the recommendation, the way that it recommends)"""
    if default.exposed_s < WORTHWHILE * default.step_s:
        waits = default.exposed_s / default.step_s
        return f"leave it off: compute-bound, DDP's default waits for {waits:.1%} of a step", default
    plain = tuned if tuned.step_s < default.step_s * (1 - WORTHWHILE) else default
    instead = "" if plain is default else f"; DDP(…, bucket_cap_mb={plain.cap_mib:g}) alone is {plain.speedup:.2f}×"
    if not others:
        return f"leave it off: no fusedcomm wire was accepted{instead}", plain
    fastest = min(row.step_s for row in others)
    if fastest > plain.step_s * (1 - WORTHWHILE):
        gain = plain.step_s / fastest
        # The step mostly computes, yet it waits. Sending fewer bytes does not help, so it waits for latency.
        bound = "latency" if plain.bound == "compute" else plain.bound
        line = f"leave it off: {bound}-bound, and the fastest way is {gain:.2f} times as fast as DDP{instead}"
        return line, plain
    exacter = [row for row in others if row.wire != "int4"]
    limit = min(plain.step_s * (1 - WORTHWHILE), fastest / (1 - WORTH_INT4))
    if exacter and min(row.step_s for row in exacter) <= limit:
        others = exacter
        fastest = min(row.step_s for row in others)
    chosen = next(row for row in others if row.step_s <= fastest * (1 + WORTHWHILE))
    cap = "" if chosen.cap_mib == default.cap_mib else f"  # with DDP(…, bucket_cap_mb={chosen.cap_mib:g})"
    return f"fusedcomm.attach(ddp, {chosen.attach}){cap}", chosen


def _check(name: str, value: float, low: float, high: float) -> None:
    """Raises ValueError unless low < value ≤ high and `value` is finite."""
    if not (low < value <= high and value < math.inf):
        limit = "a positive number" if high == math.inf else f"more than {low:g} and at most {high:g}"
        raise ValueError(f"{name}={value:g} is not possible: use {limit}")
