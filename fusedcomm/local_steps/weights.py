"""How much each rank's difference counts in a merge."""

from fusedcomm.literals import MergeWeights
from fusedcomm.session.session import Session
from fusedcomm.session.weights import checked


class Weights:
    """What this rank has done since each fragment's last snapshot.

    Args:
        kind: "steps", "given", or None: every rank counts alike.
        every: the unit of steps.
        unit: of given weights; None: that of the largest of the first ones.
    """

    def __init__(self, kind: MergeWeights | None, every: int, num_fragments: int, unit: float | None = None) -> None:
        self._kind = kind
        self._done = 0.0
        self._before = [0.0] * num_fragments
        self._unit = float(every) if kind == "steps" else unit or 0.0

    def add(self, amount: object) -> None:
        """Counts what was done. Raises ValueError or TypeError if it is no number of at least 0."""
        if self._kind != "given":
            raise ValueError(
                f"fusedcomm: weights={self._kind!r}, so add_weight() would do nothing: use LocalSteps(weights='given')"
            )
        number, problem = checked(amount)
        if problem:
            raise ValueError(f"fusedcomm: add_weight({problem}) is not possible: use a finite number, 0 or more")
        self._done += number

    def step(self) -> None:
        """Counts a step."""
        if self._kind == "steps":
            self._done += 1

    def take(self, fragment: int, session: Session) -> float:
        """This rank's weight at a snapshot of the fragment, in a unit that all ranks share. The first call of given
        weights is collective: it finds the unit."""
        if self._kind is None:
            return 1.0
        own = self._done - self._before[fragment]
        self._before[fragment] = self._done
        if self._unit == 0:
            self._unit = session.max_over_ranks(own, "the first merge of LocalSteps")
        return own / self._unit if self._unit else 0.0

    def state(self) -> dict[str, object]:
        """For a checkpoint."""
        return {"done": self._done, "before": list(self._before), "unit": self._unit}

    def load(self, state: dict) -> None:
        """Restores what state() returned."""
        self._done, self._before, self._unit = state["done"], list(state["before"]), state["unit"]
