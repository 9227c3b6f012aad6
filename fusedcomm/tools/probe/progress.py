"""Says how far the probe is: a line for each stage."""

import sys
import time

STAGES = {
    "alone": "the step without synchronization",
    "wires": "real steps with each wire",
    "buckets": "real steps with other bucket sizes, or with FSDP2's parameters in codes",
    "finals": "the fastest choices, in turns",
}
"""The stages, with what is measured in each."""


class Progress:
    """The stages so far. Does nothing unless `shown`. First says how long the whole takes, and why.

    Args:
        start_s: seconds that starting the ranks took.
        measuring_s: seconds that the stages may take.
        shown: whether this rank shows them.
    """

    def __init__(self, start_s: float, measuring_s: float, shown: bool) -> None:
        self._began = time.monotonic() - start_s
        self._seconds, self._shown = start_s + measuring_s, shown
        self._say(f"about {self._seconds:.0f} s: starting took {start_s:.0f} s, measuring takes {measuring_s:.0f} s")

    def begin(self, stage: str) -> None:
        """Says that `stage`, a key of STAGES, begins."""
        elapsed = time.monotonic() - self._began
        self._say(f"{elapsed:4.0f} of {self._seconds:.0f} s: {STAGES[stage]}")

    def _say(self, text: str) -> None:
        if self._shown:
            print(text, file=sys.stderr, flush=True)
