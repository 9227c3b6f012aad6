"""How much each rank's difference counts in a merge."""

from fusedcomm.literals import MergeWeights


class Weights:
    """What this rank has done since each fragment's last snapshot.

    Args:
        kind: "steps", or None: every rank counts alike.
        unit: the number of steps that has the weight 1, the same on every rank.
    """

    def __init__(self, kind: MergeWeights | None, unit: float, num_fragments: int) -> None:
        self._kind, self._unit = kind, unit
        self._done = 0
        self._before = [0] * num_fragments

    def step(self) -> None:
        """Counts a step."""
        self._done += 1

    def take(self, fragment: int) -> float:
        """This rank's weight at a snapshot of the fragment."""
        own = self._done - self._before[fragment]
        self._before[fragment] = self._done
        return 1.0 if self._kind is None else own / self._unit

    def state(self) -> dict[str, object]:
        """For a checkpoint."""
        return {"done": self._done, "before": list(self._before)}

    def load(self, state: dict) -> None:
        """Restores what state() returned."""
        self._done, self._before = state["done"], list(state["before"])
