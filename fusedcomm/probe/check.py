"""The prediction beside what is measured: real steps through DDP, by its own all-reduce and by what is recommended."""

import dataclasses
import statistics
import time
from collections.abc import Sequence

from torch.nn.parallel import DistributedDataParallel

from fusedcomm.cost_model import Cluster, Workload
from fusedcomm.handle import attach
from fusedcomm.probe.choices import OFF, Option, predict_option
from fusedcomm.probe.team import Team
from fusedcomm.probe.workload import Step, Task, measure_workload, synthetic

WARMUP_STEPS = 2
"""DDP cuts its buckets anew after the first step."""
MIN_STEPS, MAX_STEPS = 3, 30
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
    """A collective call. Where steps are too long for the budget they are those of a smaller, synthetic model."""
    share_s = budget_s / len(chosen)
    longest_s = max(option.prediction.step_s for option in chosen)
    fits = share_s / (WARMUP_STEPS + MIN_STEPS + 1)
    if longest_s > fits:
        numel = max(int(workload.numel * fits / longest_s), min(MIN_NUMEL, workload.numel))
        task = synthetic(numel, 0.0, team.device)
        workload = measure_workload(team, task, 0.1 * budget_s)
        chosen = [predict_option(workload, cluster, option.wire, option.sum, option.cap_mb) for option in chosen]
    return [_check(team, task, workload, option, share_s) for option in chosen]


def _check(team: Team, task: Task, workload: Workload, option: Option, budget_s: float) -> Check:
    seconds = measure_steps(team, task, option, budget_s)
    return Check(option, workload.numel, statistics.median(seconds), seconds)


def measure_steps(team: Team, task: Task, option: Option, budget_s: float) -> list[float]:
    """Seconds of steps of the slowest rank, after some that do not count. A collective call."""
    began = time.perf_counter()
    model, step, optimizer = task
    ddp = DistributedDataParallel(model, process_group=team.group, init_sync=False, bucket_cap_mb=_cap_mb(option))
    handle = None if option.wire == OFF else attach(ddp, wire=option.wire, sum=option.sum, quiet=True)
    try:
        *_, last_s = _steps(team, ddp, step, optimizer, WARMUP_STEPS)
        left_s = budget_s - (time.perf_counter() - began)
        (num_steps,) = team.slowest([min(max(left_s / last_s, MIN_STEPS), MAX_STEPS)])
        return _steps(team, ddp, step, optimizer, round(num_steps))
    finally:
        if handle is not None:
            handle.detach()
        model.zero_grad()
        del ddp  # and with it its hooks on the parameters


def _steps(team: Team, ddp: DistributedDataParallel, step: Step, optimizer, num_steps: int) -> list[float]:
    seconds = []
    for _ in range(num_steps):
        team.barrier()
        begin = time.perf_counter()
        ddp.zero_grad()
        step(ddp).backward()
        if optimizer is not None:
            optimizer.step()
        team.settle()
        seconds.append(time.perf_counter() - begin)
    return team.slowest(seconds)


def _cap_mb(option: Option) -> float | None:
    """None where it is DDP's own: only then its first bucket is a small one."""
    return None if option.cap_mb == 25 else option.cap_mb
