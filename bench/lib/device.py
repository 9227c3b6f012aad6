"""The GPU that benchmarks measure on, and a replacement for dry runs on a CPU.

A dry run executes the same code: the kernels under Triton's interpreter, on CPU tensors, timed by the host's clock. Its
times mean nothing.
"""

import gc
import os
import sys
import time
from collections.abc import Callable

import torch

from lib.common import REPOSITORY, in_turn

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel's module is imported

SLEEP_CYCLES_PER_S = 2e9
"""GPU cycles that Device.sleep counts for a second. Data center GPUs have no faster clock, so there a sleep is never
shorter than requested."""
# Seconds that Device.time first lets the device sleep, and at most.
FIRST_SLEEP_S, MAX_SLEEP_S = 200e-6, 0.2


class HostEvent:
    """In place of torch.cuda.Event in dry runs, where enqueued work is done at once."""

    def record(self, stream: object = None) -> None:
        self.time_s = time.perf_counter()

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: "HostEvent") -> float:
        return (later.time_s - self.time_s) * 1e3


class Device:
    def __init__(self, dry_run: bool) -> None:
        self.dry_run = dry_run
        if dry_run:
            sys.path.append(str(REPOSITORY / "tests" / "helpers"))
            import interpreter

            interpreter.mend()
            self.name, self.num_sms, self.l2_nbytes = "cpu", 2, 1 << 16
            torch.set_num_threads(1)
        else:
            properties = torch.cuda.get_device_properties(0)
            self.name, self.num_sms = "cuda", properties.multi_processor_count
            self.l2_nbytes = properties.L2_cache_size
        self._sleep_s: dict[str, float] = {}
        self.host_bound: set[str] = set()

    def event(self) -> "torch.cuda.Event | HostEvent":
        return HostEvent() if self.dry_run else torch.cuda.Event(enable_timing=True)

    def sleep(self, seconds: float) -> None:
        """Occupies the current stream (and one thread of one SM). Does nothing in a dry run."""
        if not self.dry_run and seconds > 0:
            torch.cuda._sleep(int(seconds * SLEEP_CYCLES_PER_S))

    def synchronize(self) -> None:
        if not self.dry_run:
            torch.cuda.synchronize()

    def num_sets(self, nbytes: int) -> int:
        """How many sets of `nbytes` to use in turn, so that a set is no longer in the L2 cache when its turn comes
        again: four times the cache, and at least 3 sets."""
        return max(3, -(-4 * self.l2_nbytes // nbytes))

    def time(self, key: str, function: Callable[[], object]) -> float:
        """Device seconds of the work that `function` enqueues on the current stream, without the host's time: the
        device sleeps until all of it is enqueued. How long it must sleep is learned and kept by `key`.

        If the host cannot enqueue the work in MAX_SLEEP_S, the result includes the host's time, and `key` is added to
        `host_bound`.
        """
        sleep_s = self._sleep_s.get(key, FIRST_SLEEP_S)
        while True:
            begin, end = self.event(), self.event()
            self.sleep(sleep_s)
            begin.record()
            started = time.perf_counter()
            function()
            end.record()
            in_time = not begin.query()
            host_s = time.perf_counter() - started
            end.synchronize()
            if in_time or key in self.host_bound:
                self._sleep_s[key] = sleep_s
                return begin.elapsed_time(end) / 1e3
            if sleep_s < MAX_SLEEP_S:
                sleep_s = min(MAX_SLEEP_S, max(2 * sleep_s, 1.5 * host_s))
            else:
                self.host_bound.add(key)
                sleep_s = 0.0

    def interleave(
        self, functions: dict[str, Callable[[int], object]], rounds: int, calls: int, warmup_s: float = 0.03
    ) -> dict[str, list[float]]:
        """Device seconds of one call of each function, a value for each of `rounds` rounds: the mean of `calls` calls.

        Every function runs in every round, in another order each time. A function's argument counts its calls.
        Afterward `host_bound` has the names of the functions whose times include the host's time.
        """
        seconds: dict[str, list[float]] = {name: [] for name in functions}
        turns = dict.fromkeys(functions, 0)
        self._sleep_s.clear()
        self.host_bound.clear()

        def run(name: str) -> None:
            for _ in range(calls):
                functions[name](turns[name])
                turns[name] += 1

        enabled = gc.isenabled()
        gc.disable()
        try:
            # A GPU that has waited for the host runs at a low clock, which takes a while to rise.
            index, started = -1, time.perf_counter()
            while index < rounds:
                for name in in_turn(functions, index):
                    elapsed = self.time(name, lambda name=name: run(name)) / calls
                    if index >= 0:
                        seconds[name].append(elapsed)
                if index >= 0 or self.dry_run or time.perf_counter() - started >= warmup_s:
                    index += 1
        finally:
            if enabled:
                gc.enable()
        return seconds


def have_gpu() -> bool:
    return torch.cuda.is_available()
