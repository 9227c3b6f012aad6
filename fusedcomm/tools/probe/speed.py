"""How fast the cores are in real steps. Predictions are corrected by it.

Operations that were measured alone had the caches to themselves, a machine's speed varies, and in a step collectives
wait for cores that compute.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from fusedcomm.tools.cluster import Cluster, Network, TwoLevels, kind_of_all_reduce
from fusedcomm.tools.cost_model import Workload
from fusedcomm.tools.probe.check import Check
from fusedcomm.tools.probe.choices import Way, predict_option

FACTORS = [1.05**exponent for exponent in range(-9, 10)]
"""The factors that are tried, from 0.64 to 1.55."""
PRIOR = 0.05
"""Weight of a factor's deviation from 1 beside a step's deviation from its prediction. It expresses that costs measured
alone are right within a fifth, and medians of steps within a twentieth."""
ROUNDS = 3
"""Rounds of the fit. In a round each factor is fitted in turn, with the others fixed."""
# Fields of the cost model's inputs that are a core's time. All costs of the codec are, too.
OF_A_CORE = {"forward_s", "backward_s", "optimizer_s", "ready_s", "copy_s_per_byte"}
OF_A_CORE |= {"cpu_s_per_byte", "cpu_s_per_unit", "cpu_fixed_s"}
"""The second part has the core times of collectives."""


def slowed(value: object, factor: float, everything: bool = False) -> object:
    """A copy of a workload, a cluster or both, in which a core's work takes `factor` times as long. The network's times
    are unchanged.

    Args:
        everything: every float is a core's time, as in the costs of a codec.
    """
    if isinstance(value, Mapping):
        return {key: slowed(inner, factor, everything) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [slowed(inner, factor, everything) for inner in value]
    if not dataclasses.is_dataclass(value):
        return value
    changed = {}
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if isinstance(inner, float) and (everything or field.name in OF_A_CORE):
            changed[field.name] = factor * inner
        elif not isinstance(inner, float):
            changed[field.name] = slowed(inner, factor, everything or field.name == "codecs")
    return dataclasses.replace(value, **changed)


@dataclasses.dataclass(frozen=True)
class Speed:
    """How many times as long things take in real steps as when measured alone."""

    cores: float = 1.0
    """The factor of a core's work."""
    collectives: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """A further factor for each kind of collective, by its field in cluster.Network: of a core's work for it, and of
    waiting for another rank's core."""

    def of(self, workload: Workload, cluster: Cluster) -> tuple[Workload, Cluster]:
        """`workload` and `cluster` as they are in real steps."""
        workload, cluster = slowed((workload, cluster), self.cores)
        two_levels = cluster.two_levels
        if two_levels is not None:
            two_levels = TwoLevels(self._of_network(two_levels.network), self._of_network(two_levels.local))
        return workload, dataclasses.replace(cluster, network=self._of_network(cluster.network), two_levels=two_levels)

    def _of_network(self, network: Network) -> Network:
        costs = {kind: slowed(getattr(network, kind), factor) for kind, factor in self.collectives.items()}
        return dataclasses.replace(network, **costs)


def collective_of(way: Way, world_size: int) -> str:
    """The field of cluster.Network with the collective that sends the bytes of large buckets."""
    config = way.config
    if config is None:
        return "all_reduce"
    plan = config.plan_of_large_buckets(world_size)
    return "exchange" if plan.sums_codes else kind_of_all_reduce(plan.layout.wire)


def speed_of(workload: Workload, cluster: Cluster, checks: Sequence[Check]) -> Speed:
    """The factors f that minimize  Σ log²(predicted(f) / measured) + PRIOR · Σ log² f.

    A factor that the steps do not determine, because they wait for the network, is 1. If no step has a 16-bit
    all-reduce, its factor is that of DDP's own all-reduce, which goes around the same ring.

    Args:
        checks: real steps of `workload`.
    """
    kinds = [collective_of(check.option.way, cluster.world_size) for check in checks]
    factors = dict.fromkeys(("cores", *kinds), 1.0)

    def speed(factors: Mapping[str, float]) -> Speed:
        collectives = {name: factor for name, factor in factors.items() if name != "cores"}
        return Speed(factors["cores"], collectives)

    def badness(name: str, factor: float) -> float:
        """The terms of the sum that the factor of this name affects."""
        slow = speed(factors | {name: factor}).of(workload, cluster)
        errors = []
        for check, kind in zip(checks, kinds, strict=True):
            if name in ("cores", kind):
                predicted = predict_option(*slow, check.option.way, check.option.cap_mb).prediction
                errors.append(math.log(predicted.step_s / check.measured_s))
        return math.fsum(error**2 for error in errors) + PRIOR * math.log(factor) ** 2

    for _ in range(ROUNDS):
        for name in factors:
            factors[name] = min(FACTORS, key=lambda factor, name=name: badness(name, factor))
    if "all_reduce" in factors:
        factors.setdefault("direct", factors["all_reduce"])
    return speed(factors)
