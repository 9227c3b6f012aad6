"""Compares predictions with real steps through DDP, for its own all-reduce and the choices that may be recommended."""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Sequence

from fusedcomm.tools.cluster import Cluster
from fusedcomm.tools.cost_model import Workload
from fusedcomm.tools.probe.choices import OFF, Option, Recommendation, are_apart, ms, predict_option
from fusedcomm.tools.probe.steps import WARMUP_STEPS, synchronised, take_steps
from fusedcomm.tools.probe.team import Team
from fusedcomm.tools.probe.workload import Task, measure_workload, synthetic

STEPS_OF_A_TURN = 2
"""Steps that count in a turn. One step before them does not count, because the previous choice has left other data in
the caches."""
# Turns of each choice.
MIN_TURNS, MAX_TURNS = 2, 30
MAX_BUCKETS_NBYTES = 2 << 30
"""Limit for the buckets of all choices that take turns together: each choice has a DDP with its own buckets."""
SURE_SHARE = 0.7
"""Share of the budget that predicted steps may fill. Real steps may take longer, with fewer cores than ranks by 1.7
times."""
# Elements of the smallest synthetic model that takes the place of a model whose steps are too long.
MIN_NUMEL = 1 << 20
WARN_ERROR = 0.15
"""Relative error of a prediction above which the report warns against relying on it."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One choice's predicted and measured step."""

    option: Option
    # Elements of the model that took the steps.
    numel: int
    # The median of steps_s.
    measured_s: float
    # Each step on the slowest rank.
    steps_s: list[float]

    @property
    def ratio(self) -> float:
        """The predicted step, divided by the measured one."""
        return self.option.prediction.step_s / self.measured_s


def check(
    team: Team, task: Task, workload: Workload, cluster: Cluster, chosen: Sequence[Option], budget_s: float
) -> list[Check]:
    """Takes real steps with each of the `chosen`, in turns. A collective call.

    If these steps do not fit the budget, only the first choice and the first fusedcomm choice are checked. If those two
    do not fit either, a smaller synthetic model takes their place. Bytes take most of the time of its steps, which the
    cost model predicts well.

    Args:
        chosen: the baseline first.
    """

    def longest_and_fitting_s() -> tuple[float, float]:
        """(the longest predicted step of the chosen, the longest step that fits the budget)"""
        num_steps = WARMUP_STEPS + MIN_TURNS * (1 + STEPS_OF_A_TURN)
        return max(option.prediction.step_s for option in chosen), SURE_SHARE * budget_s / len(chosen) / num_steps

    longest_s, fits = longest_and_fitting_s()
    if longest_s > fits:
        baseline, *others = chosen
        chosen = [baseline, *sorted(others, key=lambda option: option.wire == OFF)[:1]]
        longest_s, fits = longest_and_fitting_s()
    if longest_s > fits:
        numel = max(int(workload.numel * fits / longest_s), min(MIN_NUMEL, workload.numel))
        task = synthetic(numel, team.device)
        workload = measure_workload(team, task, 0.1 * budget_s)
        chosen = [predict_option(workload, cluster, option.way, option.cap_mb) for option in chosen]
    together = max(1, MAX_BUCKETS_NBYTES // (4 * workload.numel))
    seconds: dict[Option, list[float]] = {}
    for first in range(0, len(chosen), together):
        group = chosen[first : first + together]
        seconds.update(zip(group, in_turns(team, task, group, budget_s * len(group) / len(chosen)), strict=True))
    return [Check(option, workload.numel, statistics.median(taken), taken) for option, taken in seconds.items()]


def borne_out(recommendation: Recommendation, checks: Sequence[Check]) -> Recommendation:
    """The predicted `recommendation`, unless a smaller model's steps contradict it: to leave fusedcomm off if they do
    not show the recommended choice to be faster.

    Args:
        checks: steps of the smaller model, the baseline's first.
    """
    wanted, (off, *others) = recommendation.option, checks
    ours = next((c for c in others if (c.option.way, c.option.cap_mb) == (wanted.way, wanted.cap_mb)), None)
    if ours is None or are_apart(ours.steps_s, off.steps_s):
        return recommendation
    seen = "took longer" if ours.measured_s > off.measured_s else "overlap"
    return dataclasses.replace(
        recommendation,
        option=recommendation.baseline,
        reason=f"{wanted.name} was predicted to be faster, but real steps {seen}: {wanted.name} {ms(ours.measured_s)}, "
        f"off {ms(off.measured_s)} (with {ours.numel:,} parameters, to save time)",
        faster=None,
        step_s=recommendation.baseline_s,
    )


def in_turns(team: Team, task: Task, chosen: Sequence[Option], budget_s: float) -> list[list[float]]:
    """Seconds of steps on the slowest rank, for each choice. A collective call.

    Every choice has its own DDP around the same module. The choices take turns, so a disturbance of seconds affects all
    of them alike. A DDP's hooks on parameters do nothing unless the last forward pass was its own.
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
