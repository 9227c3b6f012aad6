"""How long tests wait on a machine that is slow, or busy with other things."""

import math
import os
import time

HANG_S = 600
"""What only a test that fails waits for: it ends a hang."""

_WORK = 2_000_000
_WORK_S = 0.15
"""What so many turns of an empty loop take an idle core of 2 GHz or more."""
_MOST = 12.0
_VARIABLE = "FUSEDCOMM_TESTS_SLOWNESS"


def measure_slowness() -> None:
    """Called once by each process that runs tests. The ranks that it starts inherit the result, so that all wait
    equally long."""
    began = time.monotonic()
    for _ in range(_WORK):
        pass
    taken_s = time.monotonic() - began
    os.environ[_VARIABLE] = str(min(_MOST, max(1.0, taken_s / _WORK_S)))


def slowness() -> float:
    """How many times as long as on an idle core work takes here, at least 1."""
    return float(os.environ[_VARIABLE])


def patient(seconds: float) -> int:
    """For a test about time itself: so many seconds on an idle machine, and in proportion on others; whole ones."""
    return math.ceil(seconds * slowness())
