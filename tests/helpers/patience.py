"""How long tests wait on a machine that is slow or busy with other programs."""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

HANG_S = 600
"""Seconds after which a wait counts as a hang. Only a failing test waits this long."""

# Turns of an empty loop, by which the machine's speed is measured.
_WORK = 2_000_000
_WORK_S = 0.15
"""Seconds that these turns take on an idle core of 2 GHz or more."""
# The largest slowness: no machine makes a test wait longer than this times its normal time.
_MOST = 12.0
_VARIABLE = "FUSEDCOMM_TESTS_SLOWNESS"


def measure_slowness() -> None:
    """Measures how slow this machine is. Every process that runs tests calls it once. The ranks that the process starts
    inherit the result, so that all wait equally long."""
    began = time.monotonic()
    for _ in range(_WORK):
        pass
    taken_s = time.monotonic() - began
    os.environ[_VARIABLE] = str(min(_MOST, max(1.0, taken_s / _WORK_S)))


def slowness() -> float:
    """How many times as long as on an idle core work takes here: from 1 to _MOST."""
    return float(os.environ[_VARIABLE])


def patient(seconds: float) -> int:
    """For tests of time limits: `seconds` times slowness(), rounded up to whole seconds."""
    return math.ceil(seconds * slowness())


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Waits until condition() holds. Raises TimeoutError, which says `what`, if it does not within HANG_S."""
    until = time.monotonic() + HANG_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"did not come to pass within {HANG_S} s: {what}")
        time.sleep(0.005)


def wait_for_words(words: str, log: Path) -> None:
    """Waits until the file `log` contains `words`."""
    wait_until(lambda: log.exists() and words in log.read_text(), f"{log} has {words!r}")
