"""Shows how far the probe is: a bar on a terminal if tqdm is installed, else a line for each stage."""

import contextlib
import sys
import time

from fusedcomm.tools import output

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
        self._seconds, self._shown, self._bar = start_s + measuring_s, shown, None
        if shown:
            print(
                f"about {self._seconds:.0f} s: starting took {start_s:.0f} s, measuring takes {measuring_s:.0f} s",
                file=sys.stderr,
                flush=True,
            )
        if shown and sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                form = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f} of {total:.0f} s"
                self._bar = output.bar(total=self._seconds, leave=False, bar_format=form)

    def begin(self, stage: str) -> None:
        """Says that `stage`, a key of STAGES, begins."""
        if self._bar is not None:
            self._bar.set_description_str(STAGES[stage], refresh=False)
            self.tick()
        elif self._shown:
            elapsed = time.monotonic() - self._began
            print(f"{elapsed:4.0f} of {self._seconds:.0f} s: {STAGES[stage]}", file=sys.stderr, flush=True)

    def tick(self) -> None:
        """Moves the bar to the present time."""
        if self._bar is not None:
            elapsed = min(time.monotonic() - self._began, self._seconds)
            self._bar.update(elapsed - self._bar.n)

    def end(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
