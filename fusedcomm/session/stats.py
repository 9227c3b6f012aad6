"""Statistics of the engine, for people and logs."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fusedcomm.native import _C

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Milliseconds of the last 512 steps: the last one's, the median, and the 95th percentile, which is the least time
    that at least 95% of the steps do not exceed. None before the first step."""

    last: float | None = None
    p50: float | None = None
    p95: float | None = None


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """A rank's count of NaN and Inf in the gradients of one parameter."""

    rank: int
    bucket: str
    """The bucket that holds the parameter now; empty if none does."""
    parameter: str
    count: int
    """Elements that were NaN or Inf, since attach."""


@dataclasses.dataclass(frozen=True)
class Change:
    """Another view of a :class:`fusedcomm.Members` began on this rank."""

    view: int
    """The number of the view that began."""
    step: int
    """The first step that it ends."""
    size: int
    """Its number of ranks."""
    lost: tuple[str, ...]
    joined: tuple[str, ...]
    """Addresses of the members that went and came."""
    pause_s: float
    """Seconds that this rank's training waited for the new view, from the failure or the boundary on."""


@dataclasses.dataclass(frozen=True, repr=False)
class Stats:
    """Statistics of this rank since attach. Times are in milliseconds. ``print(stats)`` shows them as a table, and
    :meth:`scalars` has them as numbers for TensorBoard or Prometheus.

    A step ends with the last bucket of a backward pass. `buckets` counts sparse and float64 buckets, but no bytes are
    counted for them.
    """

    steps: int = 0
    buckets: int = 0
    grad_nbytes: int = 0
    """Gradient bytes handed to the hook."""
    sent_nbytes: int = 0
    """Bytes that this rank gave to the transport to send."""
    sent_between_hosts_nbytes: int = 0
    """The sent bytes that go to other hosts; 0 if all ranks share one. Hosts are those of `Config.hosts`, or known by
    their names. If these have different numbers of ranks, every rank counts as a host. An all-reduce counts as a ring
    that leaves each host once."""
    wire_ratio: float | None = None
    """sent_nbytes divided by the bytes of an all-reduce of the gradients in their own dtype. None if that is 0."""
    exposed_ms: StepTimes = StepTimes()
    """From handing over the last bucket to its completion: what the step waits for."""
    busy_ms: StepTimes = StepTimes()
    """The time of a step during which at least one bucket was under way."""
    overlap: float | None = None
    """Share of the busy time that the backward pass hid. None before the first step."""
    nonfinite: int = 0
    """Elements of local gradients that were NaN or Inf when packed."""
    nonfinite_by_parameter: dict[str, int] = dataclasses.field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    """With members: the changes of who trains together, oldest first."""
    off: bool = False
    """Whether gradients go through DDP's own all-reduce now: with "off", or if "auto" tries it or has chosen
    it. Nothing is counted then."""

    @property
    def exposed_ms_p50(self) -> float | None:
        """The median of `exposed_ms`."""
        return self.exposed_ms.p50

    def scalars(self, separator: str = "/") -> dict[str, float]:
        """Returns the numbers by name, for ``SummaryWriter.add_scalar`` or a gauge of Prometheus.

        Names have small letters, digits and underscores, and "/" before the last part of some. Prometheus allows no
        "/": ``scalars("_")`` has "_" instead. A name keeps its meaning. A number that is not known yet is left out:
        those marked * before the first step, + where nothing is sent.

            steps, nonfinite                    counts since attach
            off                                 1 while gradients go through DDP's own all-reduce, else 0
            buckets_per_step *                  mean since attach
            grad_nbytes_per_step *              mean since attach
            wire_nbytes_per_step *              mean since attach: bytes that this rank sends
            between_hosts_nbytes_per_step *     mean since attach: those of them that go to other hosts
            wire_ratio +                        see the attribute
            overlap *                           see the attribute
            exposed_ms/last, p50, p95 *         see :class:`StepTimes`
            busy_ms/last, p50, p95 *            see :class:`StepTimes`

        All are finite.
        """
        per_step = {
            "buckets_per_step": self.buckets,
            "grad_nbytes_per_step": self.grad_nbytes,
            "wire_nbytes_per_step": self.sent_nbytes,
            "between_hosts_nbytes_per_step": self.sent_between_hosts_nbytes,
        }
        found: dict[str, float | None] = {"steps": self.steps, "nonfinite": self.nonfinite, "off": self.off}
        found |= {name: total / self.steps if self.steps else None for name, total in per_step.items()}
        found |= {"wire_ratio": self.wire_ratio, "overlap": self.overlap}
        for name, times in (("exposed_ms", self.exposed_ms), ("busy_ms", self.busy_ms)):
            found |= {f"{name}/{which}": value for which, value in dataclasses.asdict(times).items()}
        return {name.replace("/", separator): float(value) for name, value in found.items() if value is not None}

    def __repr__(self) -> str:
        """One line: ``Stats(steps=10, sent_nbytes=…, exposed_ms_p50=1.5)``, the fields that matter most."""
        parts = [f"steps={self.steps}", *(["off=True"] if self.off else [f"sent_nbytes={self.sent_nbytes}"])]
        measured = {"wire_ratio": self.wire_ratio, "exposed_ms_p50": self.exposed_ms_p50}
        parts += [f"{name}={value:.4g}" for name, value in measured.items() if value is not None]
        parts += [f"nonfinite={self.nonfinite}"] if self.nonfinite else []
        return f"Stats({', '.join(parts)})"

    def __str__(self) -> str:
        """A table for people, a name and a value in each line."""
        return "\n".join([f"fusedcomm: {self._head()}", *(f"  {name:<14} {value}" for name, value in self._rows())])

    def _head(self) -> str:
        if self.off:
            return "off, DDP's own all-reduce, which is not counted"
        return f"{self.steps} steps of this rank" if self.steps else "no step has ended yet"

    def _rows(self) -> list[tuple[str, str]]:
        rows = []
        if self.steps:
            sent, between = (n / self.steps / _MIB for n in (self.sent_nbytes, self.sent_between_hosts_nbytes))
            ratio = "" if self.wire_ratio is None else f", {self.wire_ratio:.3f} of an uncompressed all-reduce"
            rows.append(("sent", f"{sent:.3f} MiB a step{ratio}"))
            rows.append(("between hosts", f"{between:.3f} MiB a step"))
        for name, times in (("exposed", self.exposed_ms), ("busy", self.busy_ms)):
            if times.last is not None:
                rows.append((name, f"{times.p50:.2f} ms a step, p95 {times.p95:.2f} ms, last {times.last:.2f} ms"))
        if self.overlap is not None:
            rows.append(("overlap", f"{self.overlap:.0%} of the busy time"))
        if self.nonfinite:
            worst = sorted(self.nonfinite_by_parameter.items(), key=lambda pair: -pair[1])
            named = f", most in {worst[0][0]}" if worst else ""
            rows.append(("NaN or Inf", f"{self.nonfinite} elements of gradients{named}"))
        return rows


COUNTS = tuple(field.name for field in dataclasses.fields(Stats) if field.type is int)
"""The fields that count. The engine counts each under the same name, in csrc/engine/stats.h."""


def collect(synchronizer: "_C.Synchronizer", world_size: int) -> Stats:
    """The statistics of this rank's engine. Waits for the device if that keeps the counts."""
    native = synchronizer.stats()
    counts: dict[str, Any] = native.counts
    exposed, busy = native.recent_exposed_ms, native.recent_busy_ms
    newest = (native.num_timed_steps - 1) % len(exposed) if exposed else 0
    uncompressed = 2 * counts["grad_nbytes"] * (world_size - 1) / world_size
    return Stats(
        **{name: counts[name] for name in COUNTS},
        wire_ratio=counts["sent_nbytes"] / uncompressed if uncompressed else None,
        exposed_ms=step_times(exposed, newest),
        busy_ms=step_times(busy, newest),
        overlap=1 - sum(exposed) / sum(busy) if busy and sum(busy) > 0 else None,
        nonfinite_by_parameter=synchronizer.nonfinite_by_parameter(),
    )


def together(found: Sequence[Stats]) -> Stats:
    """The statistics of several engines of this rank: the counts of all, and the steps and times of the first."""
    first = found[0]
    if len(found) == 1:
        return first
    uncompressed = sum(each.sent_nbytes / each.wire_ratio for each in found if each.wire_ratio)
    return dataclasses.replace(
        first,
        **{name: sum(getattr(each, name) for each in found) for name in COUNTS if name != "steps"},
        wire_ratio=sum(each.sent_nbytes for each in found) / uncompressed if uncompressed else None,
        nonfinite_by_parameter={k: v for each in found for k, v in each.nonfinite_by_parameter.items()},
    )


def step_times(recent: Sequence[float], newest: int) -> StepTimes:
    """`newest`: the index of the last step in `recent`, which may be empty."""
    if not recent:
        return StepTimes()
    p95 = sorted(recent)[math.ceil(0.95 * len(recent)) - 1]
    return StepTimes(recent[newest], statistics.median(recent), p95)


def nonfinite_of_all(own: Iterable[NonFinite], gather: Callable[[str, object, str], list]) -> list[NonFinite]:
    """The rows of all ranks, the greatest counts first. A collective call. gather: a session's."""
    of_all = gather("nonfinite", [dataclasses.astuple(row) for row in own], "nonfinite_report()")
    rows = [NonFinite(*row) for rows in of_all for row in rows]
    return sorted(rows, key=lambda row: (-row.count, row.rank, row.parameter))


def nonfinite_rows(synchronizer: "_C.Synchronizer", rank: int) -> list[NonFinite]:
    """This rank's rows of a report: one for each parameter that has had NaN or Inf gradients."""
    bucket_of = {name: bucket.label for bucket in synchronizer.buckets() for name in bucket.parameters}
    counts = synchronizer.nonfinite_by_parameter()
    return [NonFinite(rank, bucket_of.get(name, ""), name, count) for name, count in counts.items()]
