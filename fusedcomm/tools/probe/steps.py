"""Real steps through DDP: what predictions are checked by, and what moving bytes takes of the cores meanwhile."""

import contextlib
import copy
import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusedcomm.tools.cluster import Cluster, Cost, Network, TwoLevels
from fusedcomm.tools.probe.choices import OFF, Way, predict_option
from fusedcomm.tools.probe.fit import theil_sen
from fusedcomm.tools.probe.team import Team, cpu_s
from fusedcomm.tools.probe.workload import Task, measure_workload, synthetic

WARMUP_STEPS = 2
"""DDP cuts its buckets anew after the first step."""
MAX_CPU_NUMEL, MIN_CPU_NUMEL = 8_000_000, 1_000_000
MIN_CPU_ROUNDS, MAX_CPU_ROUNDS, CPU_STEPS = 4, 16, 2
CPU_CHOICES = {
    "all_reduce": (Way(OFF),),
    "direct": (Way("bf16", sum="direct"),),
    "exchange": (Way("bf16"), Way("int8"), Way("int4")),
}
"""What tells the CPU time of a kind of collective; exchanges of several sizes tell what bytes take from what elements
take."""
MOST_TIMES = 3.0
"""What a collective takes in a step is at most so many times what it takes by itself, and at least so small a part of
it: more or less would be something else."""
LEAST_USE = 0.85
"""Of the cores, by steps that keep them busy. The rest is taken for them by the kernel, or lost where one rank waits
for another's core, of which a ring's all-reduce has more than an all-to-all."""


@contextlib.contextmanager
def synchronised(team: Team, model: nn.Module, way: Way, cap_mb: float | None) -> Iterator[nn.Module]:
    """The model in DDP, its gradients synchronised that way. cap_mb: None for DDP's own. A collective call."""
    ddp = DistributedDataParallel(model, process_group=team.group, init_sync=False, bucket_cap_mb=cap_mb)
    handle = way.attach(ddp)
    try:
        yield ddp
    finally:
        if handle is not None:
            handle.detach()
        model.zero_grad()
        del ddp  # and with it its hooks on the parameters


def take_steps(team: Team, module: nn.Module, task: Task, num_steps: int) -> list[float]:
    """Seconds of steps, of the rank for which that is most; all begin together. A collective call."""
    _, step, optimizer = task
    seconds = []
    for _ in range(num_steps):
        team.barrier()
        begin = time.perf_counter()
        module.zero_grad()
        step(module).backward()
        if optimizer is not None:
            optimizer.step()
        team.settle()
        seconds.append(time.perf_counter() - begin)
    return team.slowest(seconds)


# ---- what of a core it takes


@dataclasses.dataclass(frozen=True)
class CpuOfSteps:
    """Of one choice's steps of a model of which so many elements are synchronised."""

    kind: str
    sent_nbytes: float
    """By a rank; where hosts have several, its share of what its host sends."""
    extra_s: float
    """Of a core, beyond the same step alone, DDP's copies and the codec."""


def with_cpu_of_steps(team: Team, cluster: Cluster, wires: Sequence[str], budget_s: float) -> Cluster:
    """The cluster with copies and collectives that take as much of a core as they do in a step. A collective call.

    By themselves they take more or less: in a step buffers have left the caches, and threads hand over to each other.
    A step of a synthetic model takes x · elements + y · bytes beyond the same step alone, DDP's copies and the codec: x
    is put on the copies, y is the collective's. Telling them apart takes exchanges of more and of fewer bytes: unless
    int8 and bf16 are among the `wires`, whose codecs have been measured, the cluster is returned as it is.
    """
    if not {"int8", "bf16"} <= set(wires):
        return cluster
    choices = [(kind, way) for kind, ways in CPU_CHOICES.items() for way in ways if way.wire in (OFF, *wires)]
    numel = _numel_for(cluster, budget_s / len(choices))
    began = time.perf_counter()
    task = synthetic(numel, 0.0, team.device)
    workload = measure_workload(team, task, 0.0)
    steps = [_Steps() for _ in choices]
    alone = _Steps()
    with contextlib.ExitStack() as stack:
        # All at hand, to take turns: a machine's moods change more than what is looked for.
        modules = [stack.enter_context(synchronised(team, copy.deepcopy(task[0]), way, None)) for _, way in choices]
        for module in modules:
            take_steps(team, module, task, WARMUP_STEPS)

        def round_s() -> float:
            before = time.perf_counter()
            for module, taken in zip([task[0], *modules], [alone, *steps], strict=True):
                taken.take(team, module, task)
            return time.perf_counter() - before

        of_a_round_s = max(round_s() for _ in range(MIN_CPU_ROUNDS))
        left_s = budget_s - (time.perf_counter() - began)
        (more,) = team.slowest([min(max(left_s / of_a_round_s, 0.0), MAX_CPU_ROUNDS - MIN_CPU_ROUNDS)])
        for _ in range(int(more)):
            round_s()
    (alone_s, _), *found = (taken.medians() for taken in (alone, *steps))
    measured = []
    for (kind, way), (cpu, wall) in zip(choices, found, strict=True):
        use = min(max(LEAST_USE, cpu / (wall * cluster.cores)), 1.0)
        sent_nbytes = predict_option(workload, cluster, way, 25).prediction.sent_nbytes
        known_s = alone_s + 8 * numel * cluster.copy_s_per_byte + _codec_s(cluster, way, numel)
        measured.append(CpuOfSteps(kind, sent_nbytes / cluster.ranks_per_host, cpu / use - known_s))
    return attributed(cluster, numel, measured)


def attributed(cluster: Cluster, numel: int, measured: Sequence[CpuOfSteps]) -> Cluster:
    """See above; of steps that synchronise `numel` elements, exchanges of at least two sizes among them."""
    network = cluster.network

    def bounded(kind: str, per_byte_s: float) -> Cost:
        cost = getattr(network, kind)
        least_s, most_s = cost.cpu_s_per_unit / MOST_TIMES, cost.cpu_s_per_unit * MOST_TIMES
        return dataclasses.replace(cost, cpu_s_per_unit=min(max(per_byte_s, least_s), most_s))

    exchanges = [step for step in measured if step.kind == "exchange"]
    line = theil_sen([(step.sent_nbytes, step.extra_s) for step in exchanges])
    costs = {"exchange": bounded("exchange", line.per_unit_s)}
    of_bytes_s = costs["exchange"].cpu_s_per_unit
    of_elements_s = max(0.0, statistics.median(step.extra_s - of_bytes_s * step.sent_nbytes for step in exchanges))
    for step in measured:
        if step.kind != "exchange":
            costs[step.kind] = bounded(step.kind, (step.extra_s - of_elements_s) / step.sent_nbytes)
    copy_s_per_byte = min(cluster.copy_s_per_byte + of_elements_s / (8 * numel), MOST_TIMES * cluster.copy_s_per_byte)
    two_levels = cluster.two_levels
    if two_levels is not None:
        # As much more or less than by themselves as those of all ranks.
        ratio = of_bytes_s / network.exchange.cpu_s_per_unit

        def exchanging(level: Network) -> Network:
            exchange = dataclasses.replace(level.exchange, cpu_s_per_unit=ratio * level.exchange.cpu_s_per_unit)
            return dataclasses.replace(level, exchange=exchange)

        two_levels = TwoLevels(exchanging(two_levels.network), exchanging(two_levels.local))
    network = dataclasses.replace(network, **costs)
    return dataclasses.replace(cluster, network=network, two_levels=two_levels, copy_s_per_byte=copy_s_per_byte)


class _Steps:
    """Of one choice: what its steps take of a core and of the clock, by turns."""

    def __init__(self) -> None:
        self._cpu_s: list[float] = []
        self._wall_s: list[float] = []

    def take(self, team: Team, module: nn.Module, task: Task) -> None:
        """A collective call."""
        take_steps(team, module, task, 1)
        before = cpu_s()
        self._wall_s += take_steps(team, module, task, CPU_STEPS)
        (taken_s,) = team.mean([(cpu_s() - before) / CPU_STEPS])
        self._cpu_s.append(taken_s)

    def medians(self) -> tuple[float, float]:
        """(core, clock), seconds of a step."""
        return statistics.median(self._cpu_s), statistics.median(self._wall_s)


def _codec_s(cluster: Cluster, way: Way, numel: int) -> float:
    config = way.config
    if config is None:
        return 0.0
    return cluster.codecs[way.wire].whole_s(config.plan_of_large_buckets(cluster.world_size), numel)


def _numel_for(cluster: Cluster, budget_s: float) -> int:
    """Such that the steps fit the budget."""
    slowest_s = cluster.network.all_reduce.per_unit_s
    fits = budget_s / (WARMUP_STEPS + MIN_CPU_ROUNDS * (1 + CPU_STEPS)) / (8 * slowest_s)
    return int(min(max(fits, MIN_CPU_NUMEL), MAX_CPU_NUMEL))
