"""The measuring loop of ``config="auto"`` and of ``fusedcomm probe``. No ranks, no clock, no engine."""

import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

MARGIN = 0.03
"""Share of a step by which a candidate must be faster than those before it."""


class Turns(Generic[K]):
    """Lets candidates take steps in turns, so a disturbance of seconds affects all of them alike.

    Take `num_steps` steps with `candidate`, then record the last `timed` of them; until `finished`. Each turn begins
    with another candidate.

    Args:
        num_turns: turns of each candidate.
        timed: steps of a turn that count.
        untimed: steps before them, because the candidate before has left other data in the caches.
        untimed_first: the same in a candidate's first turn. None: as many.
    """

    def __init__(
        self, candidates: Sequence[K], num_turns: int, timed: int, untimed: int = 1, untimed_first: int | None = None
    ) -> None:
        self.timed = timed
        self._untimed, self._untimed_first = untimed, untimed if untimed_first is None else untimed_first
        count = len(candidates)
        self._order = [candidates[(turn + each) % count] for turn in range(num_turns) for each in range(count)]
        self._at = 0
        self.seen: dict[K, list[list[float]]] = {candidate: [] for candidate in candidates}
        """The times that were recorded, by candidate and turn."""

    @property
    def finished(self) -> bool:
        """Whether every candidate has had all its turns."""
        return self._at == len(self._order)

    @property
    def candidate(self) -> K:
        """The one that takes the next steps. Only until `finished`."""
        return self._order[self._at]

    @property
    def num_steps(self) -> int:
        """Steps of this turn of the candidate."""
        return self.timed + (self._untimed if self.seen[self.candidate] else self._untimed_first)

    def record(self, steps: Sequence[float]) -> None:
        """Records how long the candidate's timed steps took, and goes on to the next one."""
        self.seen[self.candidate].append(list(steps))
        self._at += 1

    def medians(self) -> dict[K, float]:
        """The median over turns of a turn's mean step; only of candidates that had one."""
        return {
            candidate: statistics.median(statistics.mean(turn) for turn in turns)
            for candidate, turns in self.seen.items()
            if turns
        }


def preferred(step: Mapping[K, float]) -> K:
    """The first of the candidates that none beats by more than MARGIN. step: the time of each one's step, in order."""
    enough = min(step.values()) / (1 - MARGIN)
    return next(candidate for candidate, time in step.items() if time <= enough)
