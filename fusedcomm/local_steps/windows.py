"""Windows of time: when a merge begins, where `every` is a time."""

import math
import re
import time

from fusedcomm.ranks.peers import warn_alone

_ENOUGH = 3
"""Windows of a single step one after another, from which on a window is called shorter than a step."""


def seconds_of(every: str) -> float:
    """The time that `every` says. Raises ValueError if it says none."""
    seconds = float(every[:-1]) if re.fullmatch(r"[0-9]+(\.[0-9]+)?s", every) else 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f'every={every!r} is not possible: use steps, 1 or more, or a time above 0 like "20s"')
    return seconds


class Window:
    """The time since the last message arrived, at once on all ranks: windows begin together, though no clocks are
    compared, and one rank's next message is at most a step later than another's.

    Args:
        every: as LocalSteps got it.
        seconds: from one message to the next.
    """

    def __init__(self, every: str, seconds: float) -> None:
        self._every, self._seconds = every, seconds
        self._message = -1
        self._steps = self._num_single = 0
        self._began: float | None = None
        self.begin()

    def begin(self) -> None:
        """A window begins now."""
        self._began = time.monotonic()

    def wait_for(self, message: int, rank: int) -> None:
        """This rank sends a message: the next window begins when it arrives."""
        # In this order, so that an earlier message, which may arrive meanwhile on another thread, begins none.
        self._message, self._began = message, None
        self._num_single = self._num_single + 1 if self._steps == 1 else 0
        self._steps = 0
        if self._num_single == _ENOUGH:
            warn_alone(
                f"fusedcomm: every={self._every!r} leaves {self._seconds:.3g} s from one message to the next, and a "
                f"step of rank {rank} takes longer: each of its steps begins a merge. Use a longer time",
                stacklevel=6,
            )

    def arrived(self, message: int) -> None:
        """A message has arrived, or has failed, which its merge says. Any thread's."""
        if message == self._message:
            self.begin()

    def is_over(self) -> bool:
        """Whether the next message begins. Call it after each step."""
        self._steps += 1
        return self._began is not None and time.monotonic() - self._began >= self._seconds
