"""What a user can choose, how long a step would take with each, and which one to take."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from torch.nn.parallel import DistributedDataParallel

from fusedcomm.config import Config
from fusedcomm.ddp.attach import attach
from fusedcomm.ddp.handle import Handle
from fusedcomm.native import _C
from fusedcomm.ranks.hosts import AUTO
from fusedcomm.tools.cluster import Cluster, Cost, Network
from fusedcomm.tools.code import attach_arguments
from fusedcomm.tools.cost_model import DEFAULT_CAP_NBYTES, WORTHWHILE, Choice, Prediction, Workload, predict

OFF = "off"
"""DDP's own all-reduce."""
AS_GOOD = 0.02
"""Between choices this near to the fastest, a more exact wire and DDP's own bucket size win."""
NEAR, MAX_FINALISTS = 1.3, 3
"""So much slower by prediction, and so many of ours, may turn out to be the fastest when they are measured."""
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to synchronise gradients: `wire` is OFF, or with the others as of fusedcomm.Config."""

    wire: str
    sum: str = "auto"
    hosts: str | None = None

    @property
    def name(self) -> str:
        name = self.wire if self.sum == "auto" else f"{self.wire} {self.sum}"
        return name if self.hosts is None else f"{name} by host"

    @property
    def config(self) -> Config | None:
        return None if self.wire == OFF else Config(wire=self.wire, sum=self.sum, hosts=self.hosts)

    def attach(self, ddp: DistributedDataParallel) -> Handle | None:
        return None if self.wire == OFF else attach(ddp, self.config, quiet=True)


@dataclasses.dataclass(frozen=True)
class Option:
    """One choice and what is predicted of it."""

    way: Way
    cap_mb: float
    prediction: Prediction

    @property
    def name(self) -> str:
        return self.way.name

    @property
    def wire(self) -> str:
        return self.way.wire

    @property
    def own_cap_mb(self) -> float | None:
        return own_cap_mb(self.cap_mb)

    @property
    def code(self) -> str:
        """What to write; "model" is the user's module."""
        cap = "" if self.own_cap_mb is None else f", bucket_cap_mb={self.cap_mb:g}"
        wrap = f"ddp = DistributedDataParallel(model{cap})"
        config = self.way.config
        return wrap if config is None else f"{wrap}; comm = fusedcomm.attach(ddp, {attach_arguments(config)})"


def own_cap_mb(cap_mb: float) -> float | None:
    """None where it is DDP's own: only then its first bucket is a small one."""
    return None if cap_mb * MIB == DEFAULT_CAP_NBYTES else cap_mb


StepTime = Callable[[Option], float]


def predict_option(workload: Workload, cluster: Cluster, way: Way, cap_mb: float) -> Option:
    config, gradients = way.config, workload.gradients
    if config is not None and not config.exempts_1d:
        gradients = [dataclasses.replace(gradient, exempt=False) for gradient in gradients]
    workload = dataclasses.replace(workload, gradients=gradients)
    prediction = predict(workload, Choice(config, round(cap_mb * MIB)), cluster)
    return Option(way, cap_mb, prediction)


def ways(wires: Sequence[str], by_host: bool) -> list[Way]:
    """DDP's own all-reduce and each wire, by each way to sum it; `by_host`: on two levels, too."""
    found = [Way(OFF)]
    for wire in wires:
        found.append(Way(wire))
        if wire in ("bf16", "fp16"):
            found.append(Way(wire, sum="direct"))
        if wire != "fp32" and by_host:
            found.append(Way(wire, hosts=AUTO))
    return found


def options(workload: Workload, cluster: Cluster, wires: Sequence[str], caps_mb: Sequence[float]) -> list[Option]:
    """All ways, in buckets of each size."""
    found = ways(wires, cluster.two_levels is not None)
    return [predict_option(workload, cluster, way, cap) for cap in caps_mb for way in found]


@dataclasses.dataclass(frozen=True)
class Recommendation:
    option: Option
    """Of DDP's own all-reduce where fusedcomm is better left off."""
    baseline: Option
    """DDP as it is without being told anything."""
    reason: str
    faster: Option | None
    """One that is predicted to be faster and worth a look, with a wire that was not accepted."""
    step_s: float
    baseline_s: float
    """Seconds of a step with either, by which this was decided."""
    measured: bool
    """Whether these were measured; otherwise they are predicted."""

    @property
    def leave_off(self) -> bool:
        return self.option.wire == OFF

    @property
    def gain(self) -> float:
        """The share of the baseline's step that is saved."""
        return 1 - self.step_s / self.baseline_s


def recommend(
    found: Sequence[Option], accepted: Sequence[str], measured: Mapping[Option, float] | None = None
) -> Recommendation:
    """The fastest whose wire is accepted, unless DDP's own all-reduce is as good.

    Args:
        measured: seconds of real steps, by option, DDP's own among them: it is chosen from these alone. None: by what
            is predicted of all.
    """
    step_s = _predicted_s if measured is None else measured.__getitem__
    candidates = found if measured is None else list(measured)
    offs = [option for option in candidates if option.wire == OFF]
    baseline = min(offs, key=lambda option: abs(option.cap_mb * MIB - DEFAULT_CAP_NBYTES))
    ours = [option for option in candidates if option.wire in accepted]
    best_off, best = _best(offs, step_s), _best(ours, step_s) if ours else None
    all_ours = [option for option in found if option.wire != OFF]
    fastest = min(all_ours, key=_predicted_s, default=None)
    if best is None or step_s(best) > (1 - WORTHWHILE) * step_s(best_off):
        # Another bucket size has to be worth the change, too.
        chosen = best_off if step_s(best_off) < (1 - WORTHWHILE) * step_s(baseline) else baseline
        reason = why_off(chosen, best, step_s)
    else:
        chosen = best
        waits_s = _exposed_s(baseline, step_s)
        reason = (
            f"of {ms(step_s(baseline))} with DDP's own all-reduce, {ms(waits_s)} are spent waiting for gradients; "
            f"{ms(waits_s - _exposed_s(chosen, step_s))} of them would be saved"
        )
    better = fastest is not None and _predicted_s(fastest) < (1 - WORTHWHILE) * _predicted_s(chosen)
    faster = fastest if better and fastest.wire not in accepted else None
    return Recommendation(
        chosen, baseline, reason, faster, step_s(chosen), step_s(baseline), measured=measured is not None
    )


def why_off(off: Option, best: Option | None, step_s: StepTime) -> str:
    if best is None:
        return "no wire of ours was accepted"
    exposed_s = _exposed_s(off, step_s)
    if exposed_s < WORTHWHILE * step_s(off):
        return (
            f"communication is hidden behind the backward pass: a step waits {ms(exposed_s)} of {ms(step_s(off))} "
            "for it, so sending fewer bytes cannot make it shorter"
        )
    if best.prediction.bound in ("cores", "codec"):
        return (
            f"bytes are nearly free here: encoding them would take as long as sending them ({best.name} "
            f"{ms(step_s(best))}, off {ms(step_s(off))})"
        )
    return f"too little would be saved: {best.name} {ms(step_s(best))}, off {ms(step_s(off))}"


def finalists(found: Sequence[Option], recommendation: Recommendation, accepted: Sequence[str]) -> list[Option]:
    """What is worth real steps: the baseline first, what is recommended, and what the model cannot tell from it; of
    DDP's own, each wire and each sum the best bucket size. At least one of ours, to show that it is no faster."""
    ways: dict[str, Option] = {}
    for option in sorted(found, key=_predicted_s):
        if option.wire == OFF or option.wire in accepted:
            ways.setdefault(option.name, option)
    best_off = ways.pop(OFF)
    near = [option for option in ways.values() if _predicted_s(option) <= NEAR * recommendation.step_s]
    ours = near[:MAX_FINALISTS] or list(ways.values())[:1]
    chosen = [recommendation.baseline, recommendation.option, *ours]
    if _predicted_s(best_off) <= min(NEAR * recommendation.step_s, _predicted_s(recommendation.baseline)):
        chosen.append(best_off)
    return list(dict.fromkeys(chosen))


def _best(found: Sequence[Option], step_s: StepTime) -> Option:
    limit_s = (1 + AS_GOOD) * min(map(step_s, found))
    good = [option for option in found if step_s(option) <= limit_s]

    def preference(option: Option) -> tuple:
        exactness = 0 if option.wire == OFF else _C.exactness(option.wire)
        is_plain = option.way == Way(option.wire)
        return (-exactness, not is_plain, option.own_cap_mb is not None, step_s(option))

    return min(good, key=preference)


def _predicted_s(option: Option) -> float:
    return option.prediction.step_s


def _exposed_s(option: Option, step_s: StepTime) -> float:
    # A measured step can be shorter than what was predicted of its computation alone.
    return max(0.0, step_s(option) - option.prediction.compute_s)


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


# ---- other links than the one that was measured


SLOWEST_BYTES_S, FASTEST_BYTES_S = 1e6, 1e11
"""Of the links that are considered."""


def link_bytes_s(cluster: Cluster) -> float:
    """What the measured link carries, by the collective that makes the most of it."""
    return min(cluster.link_bytes_s, FASTEST_BYTES_S)


def at_rate(cluster: Cluster, bytes_s: float) -> Cluster:
    """The same ranks on a link that carries so many bytes a second. On a slower link all collectives are as slow as it;
    on a faster one each is faster by as much, whatever else may hold it up then. Chunks are as long as attach would
    make them there."""
    gain = bytes_s / link_bytes_s(cluster)

    def scaled(cost: Cost | None) -> Cost | None:
        if cost is None:
            return None
        per_byte_s = cost.per_unit_s / gain if gain > 1 else max(cost.per_unit_s, 1 / bytes_s)
        return dataclasses.replace(cost, per_unit_s=per_byte_s)

    def over_it(network: Network) -> Network:
        kinds = {kind: scaled(getattr(network, kind)) for kind in ("all_reduce", "exchange", "direct")}
        return dataclasses.replace(network, **kinds)

    two_levels = cluster.two_levels
    if two_levels is not None:
        two_levels = dataclasses.replace(two_levels, network=over_it(two_levels.network))
    return dataclasses.replace(
        cluster,
        network=over_it(cluster.network),
        two_levels=two_levels,
        link_bytes_s=bytes_s,
        timed_s_per_byte=None if cluster.timed_s_per_byte is None else cluster.timed_s_per_byte / gain,
    )


def crossover_bytes_s(workload: Workload, cluster: Cluster, way: Way, cap_mb: float) -> float | None:
    """On links up to this fast it makes a step shorter by WORTHWHILE at least: FASTEST_BYTES_S means on all, None
    on none from SLOWEST_BYTES_S on."""

    def pays(bytes_s: float) -> bool:
        there = at_rate(cluster, bytes_s)
        off, ours = (predict_option(workload, there, which, cap_mb) for which in (Way(OFF), way))
        return _predicted_s(ours) < (1 - WORTHWHILE) * _predicted_s(off)

    low, high = SLOWEST_BYTES_S, FASTEST_BYTES_S
    if pays(high):
        return high
    if not pays(low):
        return None
    for _ in range(10):  # to within 1%
        middle = (low * high) ** 0.5
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low
