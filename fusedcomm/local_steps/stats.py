"""What LocalSteps has done, and how far the ranks are apart."""

import collections
import dataclasses
import statistics
import time
from typing import TYPE_CHECKING

from fusedcomm.local_steps.messages import Spread
from fusedcomm.ranks.peers import warn_alone
from fusedcomm.session.stats import Change

if TYPE_CHECKING:
    from fusedcomm.local_steps.local_steps import LocalSteps

GROWTH = 4.0
"""The drift of a merge, as a multiple of its median before, from which on there is a warning."""
_KEPT, _ENOUGH = 20, 10
_KEPT_STEPS = 64


@dataclasses.dataclass(frozen=True)
class LocalStats:
    """What this rank has done since LocalSteps was made. Times are in milliseconds."""

    steps: int = 0
    merges: int = 0
    """Of fragments."""
    under_way: int = 0
    sent_nbytes: int = 0
    sent_between_hosts_nbytes: int = 0
    waited_ms: float = 0.0
    """For messages that had not arrived when their merge was due."""
    step_ms: float | None = None
    """Median time from one step to the next, without what was waited for messages. None before the second step."""
    drift: float | None = None
    """See :class:`fusedcomm.local_steps.messages.Spread`. Of the last merge; None before the first."""
    agreement: float | None = None
    nonfinite: int = 0
    """Elements of this rank's differences that were NaN or Inf. A merge brings them to every rank."""
    missed: int = 0
    """Merges without this rank, which was late; see `quorum`."""
    changes: tuple[Change, ...] = ()
    """Of the ranks, with `members`."""

    def scalars(self) -> dict[str, float]:
        """The numbers, for TensorBoard or Prometheus; without those that are None."""
        values = {name: value for name, value in vars(self).items() if isinstance(value, int | float)}
        return {name: float(value) for name, value in values.items()}

    def __str__(self) -> str:
        return "\n".join(f"  {name:<26} {value}" for name, value in dataclasses.asdict(self).items())


def collect(of: "LocalSteps") -> LocalStats:
    """See :meth:`fusedcomm.LocalSteps.stats`."""
    counts, step_s, last = of.session.stats(), of.timer.step_s, of.drift.last
    return LocalStats(
        steps=of.steps,
        merges=sum(of.merges) - len(of.under_way),
        under_way=len(of.under_way),
        sent_nbytes=counts.sent_nbytes,
        sent_between_hosts_nbytes=counts.sent_between_hosts_nbytes,
        waited_ms=1e3 * of.messages.waited_s,
        step_ms=None if step_s is None else 1e3 * step_s,
        drift=None if last is None else last.drift,
        agreement=None if last is None else last.agreement,
        nonfinite=counts.nonfinite,
        missed=of.num_missed,
        changes=() if of.merging is None else of.merging.changes,
    )


class Drift:
    """Watches how far the ranks are apart, and warns once if that grows at a leap."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._seen: dict[int, collections.deque[float]] = {}
        self._has_warned = False
        self.last: Spread | None = None

    def add(self, fragment: int, spread: Spread) -> None:
        """Call for each merge."""
        self.last = spread
        seen = self._seen.setdefault(fragment, collections.deque(maxlen=_KEPT))
        usual = statistics.median(seen) if len(seen) >= _ENOUGH else None
        seen.append(spread.drift)
        # The same on every rank, so one of them says it. A NaN has grown, too.
        if usual is None or spread.drift <= GROWTH * usual or self._has_warned:
            return
        self._has_warned = True
        if self._rank == 0:
            warn_alone(
                f"fusedcomm: the ranks drift apart: at a merge of fragment {fragment} they were {spread.drift:.3g} of "
                f"the parameters' norm from their mean, and {usual:.3g} in the {_KEPT} merges before (median). Lower "
                "the learning rate or every=…, if the loss rises. Later growth is not reported",
                stacklevel=6,
            )


class StepTimer:
    """The time from one step to the next, without what was waited for messages."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._intervals: collections.deque[float] = collections.deque(maxlen=_KEPT_STEPS)

    def step(self, waited_s: float) -> None:
        """Call it after each step. waited_s: seconds that it has waited."""
        now = time.perf_counter()
        if self._last is not None:
            self._intervals.append(now - self._last - waited_s)
        self._last = now

    @property
    def step_s(self) -> float | None:
        """The median; None before the second step."""
        return statistics.median(self._intervals) if self._intervals else None
