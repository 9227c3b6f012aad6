"""What LocalSteps has done, and how far the ranks are apart."""

import collections
import dataclasses
import statistics

from fusedcomm.local_steps.messages import Spread
from fusedcomm.ranks.peers import warn_alone

GROWTH = 4.0
"""The drift of a merge, as a multiple of its median before, from which on there is a warning."""
_KEPT, _ENOUGH = 20, 10


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

    def scalars(self) -> dict[str, float]:
        """The numbers, for TensorBoard or Prometheus; without those that are None."""
        return {name: float(value) for name, value in dataclasses.asdict(self).items() if value is not None}

    def __str__(self) -> str:
        return "\n".join(f"  {name:<26} {value}" for name, value in dataclasses.asdict(self).items())


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
