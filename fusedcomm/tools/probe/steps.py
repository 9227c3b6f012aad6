"""Real steps through DDP. They check predictions, and show how much core time communication takes in a step."""

import contextlib
import copy
import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusedcomm.tools.cluster import Cluster, Cost, Network, TwoLevels
from fusedcomm.tools.cost_model import Gradient, Workload
from fusedcomm.tools.probe.choices import OFF, Way, predict_option
from fusedcomm.tools.probe.fit import theil_sen
from fusedcomm.tools.probe.team import Team, cpu_s
from fusedcomm.tools.probe.workload import Task, measure_workload, synthetic

WARMUP_STEPS = 2
"""DDP rebuilds its buckets after the first step."""
# Elements of the model whose steps show core time: at most, and fewest with which they show it.
MAX_CPU_NUMEL, MIN_CPU_NUMEL = 8_000_000, 500_000
MIN_CPU_ROUNDS, MAX_CPU_ROUNDS, CPU_STEPS = 4, 16, 2
"""Rounds over all choices: as many as fit the budget. The model is small enough for MIN_CPU_ROUNDS if predictions are
right. The last number is the steps of a choice that count in a round."""
CPU_CHOICES = {
    "all_reduce": (Way(OFF),),
    "direct": (Way("bf16", sum="direct"),),
    "exchange": (Way("bf16"), Way("int8"), Way("int4")),
}
"""The ways whose steps show the core time of each kind of collective. Exchanges of several sizes separate the core time
of bytes from that of elements."""
MAX_DEVIATION = 3.0
"""A collective's core time within a step is trusted only within this factor of what it takes alone. A larger deviation
has another cause."""
MIN_CORE_USE = 0.85
"""The smallest share of the cores that a step is taken to use. The rest is the kernel's time for the step, or is lost
where one rank waits for another's core. A ring's all-reduce loses more than an all-to-all."""


@contextlib.contextmanager
def synchronised(team: Team, model: nn.Module, way: Way, cap_mb: float | None) -> Iterator[nn.Module]:
    """The model in DDP, with gradients synchronized this way. cap_mb: None for DDP's default. A collective call."""
    ddp = DistributedDataParallel(model, process_group=team.group, init_sync=False, bucket_cap_mb=cap_mb)
    handle = way.attach(ddp)
    try:
        yield ddp
    finally:
        if handle is not None:
            handle.detach()
        model.zero_grad()
        del ddp  # this removes its hooks on the parameters, too


def take_steps(team: Team, module: nn.Module, task: Task, num_steps: int) -> list[float]:
    """Seconds of each step on the slowest rank. All ranks begin a step together. A collective call."""
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


# ---- core time of communication


@dataclasses.dataclass(frozen=True)
class CpuOfSteps:
    """The core time of one choice's steps."""

    # The kind of collective, a key of CPU_CHOICES.
    kind: str
    sent_nbytes: float
    """Bytes that a rank sends in a step; where hosts have several ranks, its share of its host's bytes."""
    extra_s: float
    """Core seconds of a step beyond the same step without synchronization, DDP's copies and the codec."""


def with_cpu_of_steps(team: Team, cluster: Cluster, wires: Sequence[str], budget_s: float) -> Cluster:
    """`cluster` with the core time that copies and collectives take in a step. A collective call.

    Alone they take more or less: in a step buffers have left the caches, and threads hand work over to each other. A
    step of a synthetic model takes x · elements + y · bytes of core time beyond the step without synchronization, DDP's
    copies and the codec. x is added to the copies, y is the collective's.

    Separating x from y takes exchanges of more and of fewer bytes. If int8 or bf16 is not among the `wires`, whose
    codecs have been measured, on accelerators, or if the budget is too small, the cluster is returned unchanged.
    """
    if cluster.cores is None or not {"int8", "bf16"} <= set(wires):
        return cluster
    choices = [(kind, way) for kind, ways in CPU_CHOICES.items() for way in ways if way.wire in (OFF, *wires)]
    numel = _numel_for(cluster, [way for _, way in choices], budget_s)
    if numel < MIN_CPU_NUMEL:
        return cluster
    began = time.perf_counter()
    task = synthetic(numel, team.device)
    workload = measure_workload(team, task, 0.0)
    steps = [_Steps() for _ in choices]
    alone = _Steps()
    with contextlib.ExitStack() as stack:
        # All choices exist at once and take turns: a machine's speed varies more than the differences to be measured.
        modules = [stack.enter_context(synchronised(team, copy.deepcopy(task[0]), way, None)) for _, way in choices]
        for module in modules:
            take_steps(team, module, task, WARMUP_STEPS)

        of_a_round_s = 0.0
        for number in range(MAX_CPU_ROUNDS):
            (left_s,) = team.slowest([budget_s - (time.perf_counter() - began)])
            if number and left_s < of_a_round_s:
                break
            before = time.perf_counter()
            for module, taken in zip([task[0], *modules], [alone, *steps], strict=True):
                taken.take(team, module, task)
            (of_a_round_s,) = team.slowest([time.perf_counter() - before])
    (alone_s, _), *found = (taken.medians() for taken in (alone, *steps))
    measured = []
    for (kind, way), (cpu, wall) in zip(choices, found, strict=True):
        use = min(max(MIN_CORE_USE, cpu / (wall * cluster.cores)), 1.0)
        sent_nbytes = predict_option(workload, cluster, way, 25).prediction.sent_nbytes
        known_s = alone_s + 8 * numel * cluster.copy_s_per_byte + _codec_s(cluster, way, numel)
        measured.append(CpuOfSteps(kind, sent_nbytes / cluster.ranks_per_host, cpu / use - known_s))
    return attributed(cluster, numel, measured)


def attributed(cluster: Cluster, numel: int, measured: Sequence[CpuOfSteps]) -> Cluster:
    """`cluster` with the core time of the measured steps, see :func:`with_cpu_of_steps`.

    Args:
        numel: elements that each step synchronizes.
        measured: among others, exchanges of at least two sizes.
    """
    network = cluster.network

    def bounded(kind: str, per_byte_s: float) -> Cost:
        cost = getattr(network, kind)
        least_s, most_s = cost.cpu_s_per_unit / MAX_DEVIATION, cost.cpu_s_per_unit * MAX_DEVIATION
        return dataclasses.replace(cost, cpu_s_per_unit=min(max(per_byte_s, least_s), most_s))

    exchanges = [step for step in measured if step.kind == "exchange"]
    line = theil_sen([(step.sent_nbytes, step.extra_s) for step in exchanges])
    costs = {"exchange": bounded("exchange", line.per_unit_s)}
    of_bytes_s = costs["exchange"].cpu_s_per_unit
    of_elements_s = max(0.0, statistics.median(step.extra_s - of_bytes_s * step.sent_nbytes for step in exchanges))
    for step in measured:
        if step.kind != "exchange":
            costs[step.kind] = bounded(step.kind, (step.extra_s - of_elements_s) / step.sent_nbytes)
    copy_s_per_byte = min(
        cluster.copy_s_per_byte + of_elements_s / (8 * numel), MAX_DEVIATION * cluster.copy_s_per_byte
    )
    two_levels = cluster.two_levels
    if two_levels is not None:
        # Exchanges on two levels change by the same factor as those among all ranks.
        ratio = of_bytes_s / network.exchange.cpu_s_per_unit

        def exchanging(level: Network) -> Network:
            exchange = dataclasses.replace(level.exchange, cpu_s_per_unit=ratio * level.exchange.cpu_s_per_unit)
            return dataclasses.replace(level, exchange=exchange)

        two_levels = TwoLevels(exchanging(two_levels.network), exchanging(two_levels.local))
    network = dataclasses.replace(network, **costs)
    return dataclasses.replace(cluster, network=network, two_levels=two_levels, copy_s_per_byte=copy_s_per_byte)


class _Steps:
    """Core time and time of one choice's steps, taken in turns with other choices."""

    def __init__(self) -> None:
        self._cpu_s: list[float] = []
        self._wall_s: list[float] = []

    def take(self, team: Team, module: nn.Module, task: Task) -> None:
        """One turn. A collective call."""
        take_steps(team, module, task, 1)
        before = cpu_s()
        self._wall_s += take_steps(team, module, task, CPU_STEPS)
        (taken_s,) = team.mean([(cpu_s() - before) / CPU_STEPS])
        self._cpu_s.append(taken_s)

    def medians(self) -> tuple[float, float]:
        """(core seconds, seconds) of a step."""
        return statistics.median(self._cpu_s), statistics.median(self._wall_s)


def _codec_s(cluster: Cluster, way: Way, numel: int) -> float:
    """Core seconds of all codec stages of a step."""
    config = way.config
    if config is None:
        return 0.0
    return cluster.codecs[way.wire].whole_s(config.plan_of_large_buckets(cluster.world_size), numel)


def _numel_for(cluster: Cluster, ways: Sequence[Way], budget_s: float) -> int:
    """Elements of a model for which steps with all of these ways fit the budget."""
    workload = Workload(0.0, 0.0, 0.0, [Gradient(MAX_CPU_NUMEL, 0.0)])
    steps_s = sum(predict_option(workload, cluster, way, 25).prediction.step_s for way in ways)
    num_steps = WARMUP_STEPS + MIN_CPU_ROUNDS * (1 + CPU_STEPS)
    return int(MAX_CPU_NUMEL * min(1.0, budget_s / (num_steps * steps_s)))
