"""How long the steps of a search take, as a test says."""

import functools
import random
import types

from fusedcomm.session.handle import CommHandle


class StepClock:
    """Sets how long a step takes; call it before each step. Time is the test's own clock, so that the search makes the
    same choice on a busy machine.

    ms: milliseconds of a step by wire and by "off". Each rank adds a random time below 0.1 ms.
    """

    def __init__(self, comm: CommHandle, rank: int, **ms: float) -> None:
        self._runs, self._ms, self._chance = comm.runs, ms, random.Random(rank)
        self._ends_ms = [0.0]  # when each step ends, including the step that has just begun
        target = self._runs._target
        take_pass_ends = functools.partial(self._by_own_clock, target.observer.take_pass_ends)
        observer = types.SimpleNamespace(take_pass_ends=take_pass_ends, unwatch=target.observer.unwatch)
        self._runs._target = types.SimpleNamespace(observer=observer, set=target.set)

    def __call__(self) -> None:
        self._ends_ms.append(self._ends_ms[-1] + self.step_ms())

    def step_ms(self) -> float:
        """Of the step that begins. The candidate may change at its beginning, so it is the one before that decides;
        steps to warm up are not timed."""
        session = self._runs.session
        wire = "off" if session.is_off else session.config.wire
        return self._ms[wire] + 0.1 * self._chance.random()

    def _by_own_clock(self, take_pass_ends) -> list[float]:
        """The ends of as many passes, by the test's clock."""
        return self._ends_ms[-1 - len(take_pass_ends()) : -1]
