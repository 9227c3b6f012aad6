"""The choices that a user has, how long a step takes with each, and which one to recommend."""

import dataclasses
import statistics
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
"""Takes the place of a wire for DDP's own all-reduce."""
AS_GOOD = 0.02
"""Share of a step. Among choices this near to the fastest, a more exact wire and DDP's own bucket size win."""
NEAR, MAX_FINALISTS = 1.3, 3
"""A fusedcomm choice that is predicted to take up to NEAR times as long as the recommended one may still be the fastest
when measured. At most MAX_FINALISTS of them are measured."""
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to synchronize gradients: DDP's own all-reduce if `wire` is OFF, else these fields of fusedcomm.Config.
    `hosts` is None, for one level, or "auto"."""

    wire: str
    sum: str = "auto"
    hosts: str | None = None

    @property
    def name(self) -> str:
        name = self.wire if self.sum == "auto" else f"{self.wire} {self.sum}"
        return name if self.hosts is None else f"{name} by host"

    @property
    def config(self) -> Config | None:
        """None for DDP's own all-reduce."""
        return None if self.wire == OFF else Config(wire=self.wire, sum=self.sum, hosts=self.hosts)

    def attach(self, ddp: DistributedDataParallel) -> Handle | None:
        """Attaches fusedcomm to `ddp`. For DDP's own all-reduce does nothing and returns None."""
        return None if self.wire == OFF else attach(ddp, self.config, quiet=True)


@dataclasses.dataclass(frozen=True)
class Option:
    """One choice, with the prediction for it."""

    way: Way
    cap_mb: float
    prediction: Prediction
    two_levels: bool = False
    """Whether sums can have two levels there, so that a way with one level has to say so."""

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
        """The code that makes this choice; "model" is the user's module. Never empty."""
        cap = "" if self.own_cap_mb is None else f", bucket_cap_mb={self.cap_mb:g}"
        wrap = f"ddp = DistributedDataParallel(model{cap})"
        config = self.way.config
        if config is not None:
            default = dataclasses.replace(config, hosts=AUTO)
            config = config if self.two_levels and default.two_levels is not None else default
        return wrap if config is None else f"{wrap}; comm = fusedcomm.attach(ddp, {attach_arguments(config)})"


def own_cap_mb(cap_mb: float) -> float | None:
    """The bucket_cap_mb to give to DDP. None for DDP's default: only then DDP makes its first bucket small."""
    return None if cap_mb * MIB == DEFAULT_CAP_NBYTES else cap_mb


# The seconds of an option's step, predicted or measured.
StepTime = Callable[[Option], float]


def predict_option(workload: Workload, cluster: Cluster, way: Way, cap_mb: float) -> Option:
    """The choice of this way and bucket size, with its prediction."""
    config, gradients = way.config, workload.gradients
    if config is not None and not config.exempts_1d:
        gradients = [dataclasses.replace(gradient, exempt=False) for gradient in gradients]
    workload = dataclasses.replace(workload, gradients=gradients)
    prediction = predict(workload, Choice(config, round(cap_mb * MIB)), cluster)
    return Option(way, cap_mb, prediction, cluster.two_levels is not None)


def ways(wires: Sequence[str], by_host: bool) -> list[Way]:
    """DDP's own all-reduce, and each wire with each way to sum it. by_host: includes sums on two levels."""
    found = [Way(OFF)]
    for wire in wires:
        found.append(Way(wire))
        if wire in ("bf16", "fp16"):
            found.append(Way(wire, sum="direct"))
        if wire != "fp32" and by_host:
            found.append(Way(wire, hosts=AUTO))
    return found


def options(workload: Workload, cluster: Cluster, wires: Sequence[str], caps_mb: Sequence[float]) -> list[Option]:
    """Every way with every bucket size."""
    found = ways(wires, cluster.two_levels is not None)
    return [predict_option(workload, cluster, way, cap) for cap in caps_mb for way in found]


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """The result of :func:`recommend`."""

    option: Option
    """DDP's own all-reduce where fusedcomm is better left off."""
    baseline: Option
    """DDP's own all-reduce, with the bucket size nearest to DDP's default."""
    # Never empty.
    reason: str
    faster: Option | None
    """The fastest choice by prediction, if it is worthwhile and its wire was not accepted; else None."""
    # Seconds of a step with `option`; the decision is based on it.
    step_s: float
    baseline_s: float
    """Seconds of a step with `baseline`; the decision is based on it."""
    measured: bool
    """Whether `step_s` and `baseline_s` were measured; otherwise they are predicted."""

    @property
    def leave_off(self) -> bool:
        return self.option.wire == OFF

    @property
    def gain(self) -> float:
        """The share of the baseline's step that `option` saves; less than 0 if it is slower."""
        return 1 - self.step_s / self.baseline_s


def recommend(
    found: Sequence[Option], accepted: Sequence[str], measured: Mapping[Option, Sequence[float]] | None = None
) -> Recommendation:
    """Recommends the fastest option whose wire is accepted, unless DDP's own all-reduce is as good.

    Args:
        found: all options.
        accepted: wires that may be recommended.
        measured: seconds of each real step by option. Only these options are candidates; DDP's own all-reduce must be
            among them. Medians decide; a choice whose steps overlap with another's is not faster. None: all options are
            candidates, by their predictions.
    """

    def step_s(option: Option) -> float:
        return _predicted_s(option) if measured is None else statistics.median(measured[option])

    def is_shown(faster: Option, slower: Option) -> bool:
        return measured is None or are_apart(measured[faster], measured[slower])

    candidates = found if measured is None else list(measured)
    offs = [option for option in candidates if option.wire == OFF]
    baseline = min(offs, key=lambda option: abs(option.cap_mb * MIB - DEFAULT_CAP_NBYTES))
    ours = [option for option in candidates if option.wire in accepted]
    best_off, best = _best(offs, step_s), _best(ours, step_s) if ours else None
    all_ours = [option for option in found if option.wire != OFF]
    fastest = min(all_ours, key=_predicted_s, default=None)
    if best is None or step_s(best) > (1 - WORTHWHILE) * step_s(best_off) or not is_shown(best, best_off):
        # Another bucket size, too, has to be worth the change.
        is_better = step_s(best_off) < (1 - WORTHWHILE) * step_s(baseline) and is_shown(best_off, baseline)
        chosen = best_off if is_better else baseline
        reason = why_off(chosen, best, step_s, is_shown=best is None or is_shown(best, best_off))
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


def are_apart(faster_s: Sequence[float], slower_s: Sequence[float]) -> bool:
    """Whether real steps show one choice to be faster than another: three quarters of its steps are shorter than three
    quarters of the other's. One step of each is compared as it is."""
    if min(len(faster_s), len(slower_s)) < 2:
        return statistics.median(faster_s) < statistics.median(slower_s)
    return statistics.quantiles(faster_s)[2] < statistics.quantiles(slower_s)[0]


def why_off(off: Option, best: Option | None, step_s: StepTime, is_shown: bool = True) -> str:
    """Why fusedcomm is better left off. Never empty.

    Args:
        best: the best choice with an accepted wire, if any.
        is_shown: real steps show, if there are any, that `best` is faster.
    """
    if best is None:
        return "no fusedcomm wire was accepted"
    exposed_s = _exposed_s(off, step_s)
    figures = f"{best.name} {ms(step_s(best))}, off {ms(step_s(off))}"
    if step_s(best) <= (1 - WORTHWHILE) * step_s(off) and not is_shown:
        return f"the measured steps do not show that anything is saved, because they overlap: {figures}"
    if exposed_s < WORTHWHILE * step_s(off):
        return (
            f"communication is hidden behind the backward pass: a step waits {ms(exposed_s)} of {ms(step_s(off))} "
            f"for it, so sending fewer bytes cannot make it shorter ({figures})"
        )
    if best.prediction.bound in ("cores", "codec"):
        return f"bytes are nearly free here: encoding them would take as long as sending them ({figures})"
    return f"{'steps would be longer' if step_s(best) > step_s(off) else 'too little would be saved'}: {figures}"


def finalists(found: Sequence[Option], recommendation: Recommendation, accepted: Sequence[str]) -> list[Option]:
    """The options that are worth real steps: the baseline first, then the recommended one, then those that the model
    cannot tell from it.

    DDP's own all-reduce and each way take part with their best bucket size. If a wire is accepted, at least one
    fusedcomm option is included, to show that it is no faster.
    """
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
    """The preferred one of the options that are within AS_GOOD of the fastest."""
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
    # A measured step can be shorter than the predicted time of its computation.
    return max(0.0, step_s(option) - option.prediction.compute_s)


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


# ---- links other than the measured one


SLOWEST_BYTES_S, FASTEST_BYTES_S = 1e6, 1e11
"""The range of links that are considered; bytes per second."""


def link_bytes_s(cluster: Cluster) -> float:
    """Bytes per second of the measured link, by the collective that uses it best; at most FASTEST_BYTES_S."""
    return min(cluster.link_bytes_s, FASTEST_BYTES_S)


def at_rate(cluster: Cluster, bytes_s: float) -> Cluster:
    """The same ranks on a link that carries `bytes_s` bytes per second.

    On a slower link no collective is faster than the link. On a faster link every collective is faster by the same
    factor; other limits are ignored. Chunks have the size that attach would choose on that link.
    """
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
    """The fastest link, in bytes per second, on which this way makes a step shorter by more than WORTHWHILE.

    FASTEST_BYTES_S: it does so on all links that are considered. None: on none of them.
    """

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
