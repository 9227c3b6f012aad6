"""What a user can choose, how long a step would take with each, and which one to take."""

import dataclasses
from collections.abc import Sequence

from fusedcomm.config import ONE_DIMENSIONAL, Config
from fusedcomm.cost_model import DEFAULT_CAP_NBYTES, WORTHWHILE, Choice, Cluster, Cost, Prediction, Workload, predict
from fusedcomm.native import _C

OFF = "off"
"""DDP's own all-reduce."""
AS_GOOD = 0.02
"""Between choices this near to the fastest, a more exact wire and DDP's own bucket size win."""
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Option:
    """One choice and what is predicted of it."""

    wire: str
    """OFF, or a wire of ours."""
    sum: str
    cap_mb: float
    prediction: Prediction

    @property
    def name(self) -> str:
        return self.wire if self.sum == "auto" else f"{self.wire} {self.sum}"

    @property
    def code(self) -> str:
        """What to write; "model" is the user's module."""
        cap = "" if self.cap_mb * MIB == DEFAULT_CAP_NBYTES else f", bucket_cap_mb={self.cap_mb:g}"
        wrap = f"ddp = DistributedDataParallel(model{cap})"
        if self.wire == OFF:
            return wrap
        arguments = f'wire="{self.wire}"' + ("" if self.sum == "auto" else f', sum="{self.sum}"')
        return f"{wrap}; comm = fusedcomm.attach(ddp, {arguments})"


def config_of(wire: str, sum: str) -> Config | None:
    return None if wire == OFF else Config(wire=wire, sum=sum)


def predict_option(workload: Workload, cluster: Cluster, wire: str, sum: str, cap_mb: float) -> Option:
    config = config_of(wire, sum)
    gradients = workload.gradients
    if config is not None and ONE_DIMENSIONAL not in config.exempt:
        gradients = [dataclasses.replace(gradient, exempt=False) for gradient in gradients]
    workload = dataclasses.replace(workload, gradients=gradients)
    prediction = predict(workload, Choice(config, round(cap_mb * MIB)), cluster)
    return Option(wire, sum, cap_mb, prediction)


def options(workload: Workload, cluster: Cluster, wires: Sequence[str], caps_mb: Sequence[float]) -> list[Option]:
    """Of DDP's own all-reduce and each wire, by each way to sum it; buckets of each size."""
    sums = [(OFF, "auto")]
    for wire in wires:
        sums.append((wire, "auto"))
        if wire in ("bf16", "fp16"):
            # "auto" takes the other one.
            sums.append((wire, "two-shot" if cluster.world_size <= 2 else "direct"))
    return [predict_option(workload, cluster, wire, sum, cap) for cap in caps_mb for wire, sum in sums]


@dataclasses.dataclass(frozen=True)
class Recommendation:
    option: Option
    """Of DDP's own all-reduce where fusedcomm is better left off."""
    baseline: Option
    """DDP as it is without being told anything."""
    reason: str
    faster: Option | None
    """One that is worth a look, with a wire that was not accepted."""

    @property
    def leave_off(self) -> bool:
        return self.option.wire == OFF

    @property
    def gain(self) -> float:
        """The share of the baseline's step that is saved."""
        return 1 - self.option.prediction.step_s / self.baseline.prediction.step_s


def recommend(found: Sequence[Option], accepted: Sequence[str]) -> Recommendation:
    """The fastest whose wire is accepted, unless DDP's own all-reduce is as good."""
    offs = [option for option in found if option.wire == OFF]
    baseline = min(offs, key=lambda option: abs(option.cap_mb * MIB - DEFAULT_CAP_NBYTES))
    ours = [option for option in found if option.wire in accepted]
    best_off, best = _best(offs), _best(ours) if ours else None
    all_ours = [option for option in found if option.wire != OFF]
    fastest = min(all_ours, key=_step_s, default=None)
    if best is None or _step_s(best) > (1 - WORTHWHILE) * _step_s(best_off):
        # Another bucket size has to be worth the change, too.
        chosen = best_off if _step_s(best_off) < (1 - WORTHWHILE) * _step_s(baseline) else baseline
        reason = why_off(chosen.prediction, best)
    else:
        chosen = best
        hidden = baseline.prediction.exposed_s - chosen.prediction.exposed_s
        reason = (
            f"of {ms(baseline.prediction.step_s)} with DDP's own all-reduce, {ms(baseline.prediction.exposed_s)} are "
            f"spent waiting for gradients; {ms(hidden)} of them would be saved"
        )
    better = fastest is not None and _step_s(fastest) < (1 - WORTHWHILE) * _step_s(chosen)
    return Recommendation(chosen, baseline, reason, fastest if better and fastest.wire not in accepted else None)


def why_off(off: Prediction, best: Option | None) -> str:
    if best is None:
        return "no wire of ours was accepted"
    if off.exposed_s < WORTHWHILE * off.step_s:
        return (
            f"communication is hidden behind the backward pass: a step waits {ms(off.exposed_s)} of {ms(off.step_s)} "
            "for it, so sending fewer bytes cannot make it shorter"
        )
    if best.prediction.bound in ("cores", "codec"):
        return (
            f"bytes are nearly free here: encoding them would take as long as sending them ({best.name} "
            f"{ms(best.prediction.step_s)}, off {ms(off.step_s)})"
        )
    return f"too little would be saved: {best.name} {ms(best.prediction.step_s)}, off {ms(off.step_s)}"


def _best(found: Sequence[Option]) -> Option:
    limit_s = (1 + AS_GOOD) * min(map(_step_s, found))
    good = [option for option in found if _step_s(option) <= limit_s]

    def preference(option: Option) -> tuple:
        exactness = 0 if option.wire == OFF else _C.exactness(option.wire)
        return (-exactness, option.sum != "auto", option.cap_mb * MIB != DEFAULT_CAP_NBYTES, _step_s(option))

    return min(good, key=preference)


def _step_s(option: Option) -> float:
    return option.prediction.step_s


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


# ---- other links than the one that was measured


SLOWEST_BYTES_S, FASTEST_BYTES_S = 1e6, 1e11
"""Of the links that are considered."""


def link_bytes_s(cluster: Cluster) -> float:
    """What the measured link carries, by the collective that makes the most of it."""
    network = cluster.network
    least_s = min(cost.per_unit_s for cost in (network.all_reduce, network.exchange, network.direct) if cost)
    return min(1 / max(least_s, 1e-15), FASTEST_BYTES_S)


def at_rate(cluster: Cluster, bytes_s: float) -> Cluster:
    """The same ranks on a link that carries so many bytes a second. On a slower link all collectives are as slow as it;
    on a faster one each is faster by as much, whatever else may hold it up then."""
    network, gain = cluster.network, bytes_s / link_bytes_s(cluster)

    def scaled(cost: Cost | None) -> Cost | None:
        if cost is None:
            return None
        per_byte_s = cost.per_unit_s / gain if gain > 1 else max(cost.per_unit_s, 1 / bytes_s)
        return dataclasses.replace(cost, per_unit_s=per_byte_s)

    kinds = {kind: scaled(getattr(network, kind)) for kind in ("all_reduce", "exchange", "direct")}
    return dataclasses.replace(cluster, network=dataclasses.replace(network, **kinds))


def crossover_bytes_s(workload: Workload, cluster: Cluster, wire: str, cap_mb: float) -> float | None:
    """On links up to this fast the wire makes a step shorter by WORTHWHILE at least: FASTEST_BYTES_S means on all, None
    on none from SLOWEST_BYTES_S on."""

    def pays(bytes_s: float) -> bool:
        there = at_rate(cluster, bytes_s)
        off, ours = (predict_option(workload, there, name, "auto", cap_mb) for name in (OFF, wire))
        return _step_s(ours) < (1 - WORTHWHILE) * _step_s(off)

    low, high = SLOWEST_BYTES_S, FASTEST_BYTES_S
    if pays(high):
        return high
    if not pays(low):
        return None
    for _ in range(10):  # to within 1%
        middle = (low * high) ** 0.5
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low
