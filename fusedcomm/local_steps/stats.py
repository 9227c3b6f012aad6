"""What LocalSteps has done, and how far the ranks are apart."""

import dataclasses

from fusedcomm.local_steps.merges import Merges
from fusedcomm.session.stats import Stats


@dataclasses.dataclass(frozen=True)
class LocalStats:
    """What this rank has done since LocalSteps was made. Times are in milliseconds."""

    steps: int = 0
    merges: int = 0
    under_way: int = 0
    """1 while a message is under way."""
    sent_nbytes: int = 0
    sent_between_hosts_nbytes: int = 0
    waited_ms: float = 0.0
    """For messages that had not arrived when their merge was due."""
    drift: float | None = None
    """See :class:`fusedcomm.local_steps.messages.Spread`. The last merge's; None before the first."""
    agreement: float | None = None
    nonfinite: int = 0
    """Elements of this rank's differences that were NaN or Inf. A merge brings them to every rank."""

    def scalars(self) -> dict[str, float]:
        """The numbers, for TensorBoard or Prometheus; without those that are None."""
        values = {name: value for name, value in vars(self).items() if isinstance(value, int | float)}
        return {name: float(value) for name, value in values.items()}

    def __str__(self) -> str:
        return "\n".join(f"  {name:<26} {value}" for name, value in dataclasses.asdict(self).items())


def collect(of: Merges, counts: Stats) -> LocalStats:
    """See :meth:`fusedcomm.LocalSteps.stats`. counts: of the session."""
    last = of.spread
    return LocalStats(
        steps=of.steps,
        merges=of.num_begun - (of.under_way is not None),
        under_way=int(of.under_way is not None),
        sent_nbytes=counts.sent_nbytes,
        sent_between_hosts_nbytes=counts.sent_between_hosts_nbytes,
        waited_ms=1e3 * of.messages.waited_s,
        drift=None if last is None else last.drift,
        agreement=None if last is None else last.agreement,
        nonfinite=counts.nonfinite,
    )
