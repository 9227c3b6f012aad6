"""Predictions beside real steps through DDP, by its own all-reduce and by what may be recommended."""

import dataclasses
import statistics
import time
from collections.abc import Sequence

from fusedcomm.cost_model import Cluster, Workload
from fusedcomm.probe.choices import Option, predict_option
from fusedcomm.probe.steps import WARMUP_STEPS, synchronised, take_steps
from fusedcomm.probe.team import Team
from fusedcomm.probe.workload import Task, measure_workload, synthetic

PASSES = 2
MIN_STEPS, MAX_STEPS = 3, 30
"""Of one choice in one pass."""
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
    first two and of a smaller, synthetic model: there bytes take most of the time, which a model can tell."""
    longest_s = max(option.prediction.step_s for option in chosen)
    fits = budget_s / len(chosen) / PASSES / (WARMUP_STEPS + MIN_STEPS + 1)
    if longest_s > fits:
        chosen = chosen[:2]
        fits *= PASSES
        numel = max(int(workload.numel * fits / longest_s), min(MIN_NUMEL, workload.numel))
        task = synthetic(numel, 0.0, team.device)
        workload = measure_workload(team, task, 0.1 * budget_s)
        chosen = [
            predict_option(workload, cluster, option.wire, option.sum, option.cap_mb, option.hosts) for option in chosen
        ]
    seconds: dict[Option, list[float]] = {option: [] for option in chosen}
    for _ in range(PASSES):
        for option, taken in seconds.items():
            taken += measure_steps(team, task, option, budget_s / len(chosen) / PASSES)
    return [Check(option, workload.numel, statistics.median(taken), taken) for option, taken in seconds.items()]


def measure_steps(team: Team, task: Task, option: Option, budget_s: float) -> list[float]:
    """Seconds of steps of the slowest rank, after some that do not count. A collective call."""
    began = time.perf_counter()
    with synchronised(team, task[0], option.wire, option.sum, _cap_mb(option), option.hosts) as ddp:
        *_, last_s = take_steps(team, ddp, task, WARMUP_STEPS)
        left_s = budget_s - (time.perf_counter() - began)
        (num_steps,) = team.slowest([min(max(left_s / last_s, MIN_STEPS), MAX_STEPS)])
        return take_steps(team, ddp, task, round(num_steps))


def _cap_mb(option: Option) -> float | None:
    """None where it is DDP's own: only then its first bucket is a small one."""
    return None if option.cap_mb == 25 else option.cap_mb
