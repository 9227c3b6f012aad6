"""Predictions beside real steps through DDP, by its own all-reduce and by what may be recommended."""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Sequence

from fusedcomm.tools.cluster import Cluster
from fusedcomm.tools.cost_model import Workload
from fusedcomm.tools.probe.choices import OFF, Option, predict_option
from fusedcomm.tools.probe.steps import WARMUP_STEPS, synchronised, take_steps
from fusedcomm.tools.probe.team import Team
from fusedcomm.tools.probe.workload import Task, measure_workload, synthetic

STEPS_OF_A_TURN = 2
"""After one that does not count: the choice before has left other things in the caches."""
MIN_TURNS, MAX_TURNS = 2, 30
MAX_BUCKETS_NBYTES = 2 << 30
"""Of the buckets that DDP makes for choices which take turns: each has its own."""
MIN_NUMEL = 1 << 20
WARN_ERROR = 0.15
"""A prediction that is further off is not to be relied on."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One choice's step as it was predicted and as it was."""

    option: Option
    numel: int
    measured_s: float
    steps_s: list[float]

    @property
    def ratio(self) -> float:
        """Of the predicted step to the measured one."""
        return self.option.prediction.step_s / self.measured_s


def check(
    team: Team, task: Task, workload: Workload, cluster: Cluster, chosen: Sequence[Option], budget_s: float
) -> list[Check]:
    """Real steps of each, in turns; a collective call. Where steps are too long for the budget they are those of the
    first and of the first of ours, and where these are, too, of a smaller, synthetic model: there bytes take most of
    the time, which a model can tell."""

    def longest_and_fitting_s() -> tuple[float, float]:
        """Of the chosen's steps the longest as predicted, and the longest for which there is time."""
        num_steps = WARMUP_STEPS + MIN_TURNS * (1 + STEPS_OF_A_TURN)
        return max(option.prediction.step_s for option in chosen), budget_s / len(chosen) / num_steps

    longest_s, fits = longest_and_fitting_s()
    if longest_s > fits:
        baseline, *others = chosen
        chosen = [baseline, *sorted(others, key=lambda option: option.wire == OFF)[:1]]
        longest_s, fits = longest_and_fitting_s()
    if longest_s > fits:
        numel = max(int(workload.numel * fits / longest_s), min(MIN_NUMEL, workload.numel))
        task = synthetic(numel, 0.0, team.device)
        workload = measure_workload(team, task, 0.1 * budget_s)
        chosen = [predict_option(workload, cluster, option.way, option.cap_mb) for option in chosen]
    together = max(1, MAX_BUCKETS_NBYTES // (4 * workload.numel))
    seconds: dict[Option, list[float]] = {}
    for first in range(0, len(chosen), together):
        group = chosen[first : first + together]
        seconds.update(zip(group, in_turns(team, task, group, budget_s * len(group) / len(chosen)), strict=True))
    return [Check(option, workload.numel, statistics.median(taken), taken) for option, taken in seconds.items()]


def in_turns(team: Team, task: Task, chosen: Sequence[Option], budget_s: float) -> list[list[float]]:
    """Seconds of steps of the slowest rank, by choice. A collective call.

    Every choice has a DDP of its own around the same module: what a machine does for seconds meets all of them alike.
    DDP's hooks on parameters do nothing unless it was its own forward pass that came before.
    """
    began = time.perf_counter()
    taken: list[list[float]] = [[] for _ in chosen]
    with contextlib.ExitStack() as stack:
        modules = [stack.enter_context(synchronised(team, task[0], option.way, option.own_cap_mb)) for option in chosen]
        of_a_round_s = 0.0
        for ddp in modules:
            *_, last_s = take_steps(team, ddp, task, WARMUP_STEPS)
            of_a_round_s += (1 + STEPS_OF_A_TURN) * last_s
        left_s = budget_s - (time.perf_counter() - began)
        (num_turns,) = team.slowest([min(max(left_s / of_a_round_s, MIN_TURNS), MAX_TURNS)])
        for turn in range(round(num_turns)):
            for index in range(len(modules)):
                index = (index + turn) % len(modules)
                taken[index] += take_steps(team, modules[index], task, 1 + STEPS_OF_A_TURN)[1:]
    return taken
