"""The choices that a user has, what was seen of each, and which one to recommend."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from fusedcomm.autotune.turns import MARGIN
from fusedcomm.config import Config
from fusedcomm.native import _C
from fusedcomm.ranks.hosts import AUTO

DEFAULT_CAP_MIB = 25.0
"""DDP's default bucket_cap_mb."""
AS_GOOD = 0.02
"""Share of a step. Among choices this near to the fastest, a more exact wire and DDP's own bucket size win."""
NEAR, MAX_FINALISTS = 1.15, 3
"""A choice whose first steps took up to NEAR times as long as the fastest one's may still be the fastest. At most
MAX_FINALISTS of them take further steps, in turns with DDP's own all-reduce."""


@dataclasses.dataclass(frozen=True)
class FrontEnd:
    """What reports call the model's wrapper and its communication."""

    name: str
    torchs_own: str
    """Its sums without fusedcomm."""
    waits_for: str
    alone: str
    """A step without communication."""


DDP = FrontEnd("DDP", "DDP's own all-reduce", "gradients", "no all-reduce")
FSDP2 = FrontEnd("FSDP2", "torch's own collectives", "gradients and parameters", "no collectives")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One choice of a user."""

    wire: str
    sum: str = "auto"
    by_host: bool = False
    """Whether sums have two levels."""
    bucket_mib: float | None = None
    """DDP's bucket_cap_mb. None: not chosen."""
    params: str = "fp32"
    """The wire in which FSDP2's parameters are gathered."""

    def __str__(self) -> str:
        name = self.wire if self.sum == "auto" else f"{self.wire} {self.sum}"
        return (
            name
            + (" by host" if self.by_host else "")
            + ("" if self.params == "fp32" else f", params {self.params}")
            + ("" if self.bucket_mib is None else f" in buckets of {self.bucket_mib:g} MiB")
        )


OFF = Candidate("off")
"""DDP's own exact all-reduce, or torch's own collectives with FSDP2."""


def config_of(choice: Candidate) -> Config | None:
    """The configuration of a choice. None for DDP's own all-reduce."""
    if choice.wire == OFF.wire:
        return None
    return Config(choice.wire, choice.sum, hosts=AUTO if choice.by_host else None, params=choice.params)


def way_of(choice: Candidate) -> str:
    """The choice without its bucket size, for people. Never empty."""
    return str(dataclasses.replace(choice, bucket_mib=None))


def own_cap_mb(choice: Candidate) -> float | None:
    """The bucket_cap_mb to give to DDP. None for DDP's default: only then DDP makes its first bucket small."""
    return None if choice.bucket_mib == DEFAULT_CAP_MIB else choice.bucket_mib


def code_of(choice: Candidate, by_host: bool, front_end: FrontEnd = DDP) -> str:
    """The code that makes this choice; "model" is the user's module. Never empty. by_host: sums can have two levels
    there, so that a choice with one level has to say so."""
    cap = "" if own_cap_mb(choice) is None else f", bucket_cap_mb={choice.bucket_mib:g}"
    is_sharded = front_end == FSDP2
    wrap = "fully_shard(model)" if is_sharded else f"ddp = DistributedDataParallel(model{cap})"
    config = config_of(choice)
    if config is None:
        return wrap
    default = dataclasses.replace(config, hosts=AUTO)
    config = config if by_host and default.two_levels is not None else default
    how = f'"{config.wire}"' if config == Config(config.wire) else f"fusedcomm.{config!r}".replace("'", '"')
    return f"{wrap}; comm = fusedcomm.attach({'model' if is_sharded else 'ddp'}, {how})"


def choices(
    wires: Sequence[str], accepted: Sequence[str], by_host: bool, cap_mib: float | None, front_end: FrontEnd = DDP
) -> list[Candidate]:
    """DDP's own all-reduce, then each wire with each way to sum it, all with buckets of `cap_mib` MiB. Accepted wires
    come first, and each wire's usual sum: where time is short, the last ones are not tried. by_host: includes sums on
    two levels. FSDP2 has no buckets, no "direct" sums, and two levels in fp32, too."""
    usual, others = [], []
    for wire in sorted(wires, key=lambda wire: wire not in accepted):
        usual.append(Candidate(wire, by_host=by_host and (wire != "fp32" or front_end == FSDP2)))
        if by_host and wire != "fp32":
            others.append(Candidate(wire))
        if wire in ("bf16", "fp16") and front_end == DDP:
            others.append(Candidate(wire, "direct"))
    others.sort(key=lambda choice: choice.wire not in accepted)
    first = [choice for choice in usual if choice.wire in accepted]
    last = [choice for choice in usual if choice.wire not in accepted]
    return [dataclasses.replace(choice, bucket_mib=cap_mib) for choice in (OFF, *first, *others, *last)]


@dataclasses.dataclass(frozen=True)
class Seen:
    """The figures of real steps with one choice."""

    steps_s: Sequence[float]
    """Seconds of each step on the slowest rank."""
    ratios: Sequence[float]
    """For each turn: the mean step, divided by that of DDP's own all-reduce in the same turn."""
    sent_nbytes: int
    """Bytes that a rank sends in a step."""
    line_nbytes: int | None
    """Bytes that a host sends to other hosts in a step; None if that is not known. If no host has several ranks, or all
    are on one, those of a rank."""

    @property
    def step_s(self) -> float:
        """Median of the steps, in seconds."""
        return statistics.median(self.steps_s)


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """The result of :func:`recommend`."""

    choice: Candidate
    """DDP's own all-reduce where fusedcomm is better left off."""
    baseline: Candidate
    """DDP's own all-reduce, with the bucket size nearest to DDP's default."""
    reason: str
    """Never empty."""
    step_s: float
    """Median step with `choice`, in seconds."""
    baseline_s: float
    """Median step with `baseline`, in seconds."""

    @property
    def leave_off(self) -> bool:
        """Whether fusedcomm is better left off."""
        return self.choice.wire == OFF.wire

    @property
    def gain(self) -> float:
        """The share of the baseline's step that `choice` saves; less than 0 if it is slower."""
        return 1 - self.step_s / self.baseline_s


def are_apart(faster_s: Sequence[float], slower_s: Sequence[float]) -> bool:
    """Whether steps show one choice to be faster than another: three quarters of its steps are shorter than three
    quarters of the other's. One step of each is compared as it is."""
    if min(len(faster_s), len(slower_s)) < 2:
        return statistics.median(faster_s) < statistics.median(slower_s)
    return statistics.quantiles(faster_s)[2] < statistics.quantiles(slower_s)[0]


def finalists(seen: Mapping[Candidate, Seen], accepted: Sequence[str]) -> list[Candidate]:
    """The choices that take further steps, in turns: the baseline first, DDP's own all-reduce in its best buckets, and
    the accepted ones that are NEAR to the fastest of them."""
    offs = [choice for choice in seen if choice.wire == OFF.wire]
    ours = sorted((choice for choice in seen if choice.wire in accepted), key=lambda choice: seen[choice].step_s)
    near = [choice for choice in ours if seen[choice].step_s <= NEAR * seen[ours[0]].step_s][:MAX_FINALISTS]
    best_off = min(offs, key=lambda choice: seen[choice].step_s)
    return list(dict.fromkeys([baseline_of(offs), *near, best_off]))


def baseline_of(found: Sequence[Candidate]) -> Candidate:
    """DDP's own all-reduce, with the bucket size nearest to DDP's default."""
    offs = [choice for choice in found if choice.wire == OFF.wire]
    return min(offs, key=lambda choice: abs((choice.bucket_mib or DEFAULT_CAP_MIB) - DEFAULT_CAP_MIB))


def recommend(
    seen: Mapping[Candidate, Seen], accepted: Sequence[str], alone_s: float, front_end: FrontEnd = DDP
) -> Recommendation:
    """Recommends the choice with the shortest median step whose wire is accepted, unless DDP's own all-reduce is as
    good. A choice whose steps overlap with another's is not faster.

    Args:
        seen: steps that the choices took in turns. DDP's own all-reduce is among them.
        accepted: wires that may be recommended.
        alone_s: seconds of a step without synchronization.
    """

    def is_faster(faster: Candidate, slower: Candidate) -> bool:
        few = seen[faster].step_s < (1 - MARGIN) * seen[slower].step_s
        return few and are_apart(seen[faster].steps_s, seen[slower].steps_s)

    baseline = baseline_of(list(seen))
    best_off = _best({choice: seen[choice].step_s for choice in seen if choice.wire == OFF.wire})
    ours = {choice: seen[choice].step_s for choice in seen if choice.wire in accepted}
    best = _best(ours) if ours else None
    if best is not None and is_faster(best, best_off):
        chosen, waits_s = best, max(0.0, seen[baseline].step_s - alone_s)
        saved_s = seen[baseline].step_s - seen[best].step_s
        reason = (
            f"of {ms(seen[baseline].step_s)} with {front_end.torchs_own}, {ms(waits_s)} are spent waiting for "
            f"{front_end.waits_for}; {ms(saved_s)} are saved"
        )
    else:
        # Another bucket size, too, has to be worth the change.
        chosen = best_off if is_faster(best_off, baseline) else baseline
        reason = _why_off(seen, best_off, best, alone_s)
    return Recommendation(chosen, baseline, reason, seen[chosen].step_s, seen[baseline].step_s)


def _why_off(seen: Mapping[Candidate, Seen], off: Candidate, best: Candidate | None, alone_s: float) -> str:
    """Why fusedcomm is better left off. Never empty. best: the best choice with an accepted wire, if any."""
    if best is None:
        return "no fusedcomm wire was accepted"
    off_s, best_s = seen[off].step_s, seen[best].step_s
    figures = f"{way_of(best)} {ms(best_s)}, off {ms(off_s)}"
    waits_s = max(0.0, off_s - alone_s)
    if best_s < (1 - MARGIN) * off_s:
        return f"the steps do not show that anything is saved, because they overlap: {figures}"
    if waits_s < MARGIN * off_s:
        return (
            f"communication is hidden behind the backward pass: a step waits {ms(waits_s)} of {ms(off_s)} for it, so "
            f"sending fewer bytes cannot make it shorter ({figures})"
        )
    return f"{'steps are longer' if best_s > off_s else 'too little is saved'}: {figures}"


def _best(steps_s: Mapping[Candidate, float]) -> Candidate:
    """The preferred one of the choices that are within AS_GOOD of the fastest."""
    limit_s = (1 + AS_GOOD) * min(steps_s.values())

    def preference(choice: Candidate) -> tuple:
        exactness = 0 if choice.wire == OFF.wire else _C.exactness(choice.wire)
        params = -_C.exactness(choice.params)
        return (-exactness, params, choice.sum != "auto", own_cap_mb(choice) is not None, steps_s[choice])

    return min((choice for choice in steps_s if steps_s[choice] <= limit_s), key=preference)


def ms(seconds: float) -> str:
    """The seconds in ms, with one decimal place."""
    return f"{seconds * 1e3:.1f} ms"
