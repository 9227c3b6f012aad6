"""How fast the cores are in real steps, by which predictions are corrected: what computes by itself has the caches for
itself, and a machine is not always as fast."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from fusedcomm.cost_model import Cluster, Workload
from fusedcomm.probe.check import Check
from fusedcomm.probe.choices import predict_option

FACTORS = [1.025**exponent for exponent in range(-12, 13)]
"""That are considered: from 0.74 to 1.34."""
OF_A_CORE = {"forward_s", "backward_s", "optimizer_s", "ready_s", "copy_s_per_byte"}
OF_A_CORE |= {"cpu_s_per_byte", "cpu_s_per_unit", "cpu_fixed_s"}
"""Fields of the cost model's inputs, besides all that the codec takes."""


def slowed(value: object, factor: float, everything: bool = False) -> object:
    """A workload, a cluster, or both of them, in which all that a core does takes `factor` times as long, and what the
    network does as long as before."""
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


def slowdown(workload: Workload, cluster: Cluster, checks: Sequence[Check]) -> float:
    """By how much all that a core does takes longer in these steps of `workload` than the model has it.

    The factor f for which Σ log²(predicted(f) / measured) + log² f is least: a factor that the steps do not tell, since
    they wait for the network, is 1.
    """

    def badness(factor: float) -> float:
        slow = slowed((workload, cluster), factor)
        predicted = [predict_option(*slow, check.option.way, check.option.cap_mb).prediction.step_s for check in checks]
        errors = [math.log(step_s / check.measured_s) for step_s, check in zip(predicted, checks, strict=True)]
        return math.fsum(error**2 for error in errors) + math.log(factor) ** 2

    return min(FACTORS, key=badness)
