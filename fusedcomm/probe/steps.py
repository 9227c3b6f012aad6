"""Real steps through DDP: what predictions are checked by, and what moving bytes takes of the cores meanwhile."""

import contextlib
import dataclasses
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusedcomm.cost_model import Cluster, Cost
from fusedcomm.handle import attach
from fusedcomm.probe.choices import OFF, predict_option
from fusedcomm.probe.team import Team
from fusedcomm.probe.workload import Task, measure_workload, synthetic

WARMUP_STEPS = 2
"""DDP cuts its buckets anew after the first step."""
MAX_CPU_NUMEL, MIN_CPU_NUMEL = 12_000_000, 1_000_000
CPU_STEPS = 8
CPU_CHOICES = {
    "few": ("int8", "two-shot"),
    "exchange": ("bf16", "two-shot"),
    "all_reduce": (OFF, "auto"),
    "direct": ("bf16", "direct"),
}
"""(wire, sum) that tell the CPU time of a kind of collective; "few" is an exchange of fewer bytes."""
MOST_TIMES = 3.0
"""What a collective takes in a step, of what it takes by itself, at most: more would be something else."""


@contextlib.contextmanager
def synchronised(team: Team, model: nn.Module, wire: str, sum: str, cap_mb: float | None) -> Iterator[nn.Module]:
    """The model in DDP, its gradients summed by `wire`. cap_mb: None for DDP's own. A collective call."""
    ddp = DistributedDataParallel(model, process_group=team.group, init_sync=False, bucket_cap_mb=cap_mb)
    handle = None if wire == OFF else attach(ddp, wire=wire, sum=sum, quiet=True)
    try:
        yield ddp
    finally:
        if handle is not None:
            handle.detach()
        model.zero_grad()
        del ddp  # and with it its hooks on the parameters


def take_steps(
    team: Team, module: nn.Module, task: Task, num_steps: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Seconds of steps, by `clock`, of the rank for which that is most; all begin together. A collective call."""
    _, step, optimizer = task
    seconds = []
    for _ in range(num_steps):
        team.barrier()
        begin = clock()
        module.zero_grad()
        step(module).backward()
        if optimizer is not None:
            optimizer.step()
        team.settle()
        seconds.append(clock() - begin)
    return team.slowest(seconds)


def cpu_s() -> float:
    """Of all threads of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# ---- what of a core it takes


def with_cpu_of_steps(team: Team, cluster: Cluster, wires: Sequence[str], budget_s: float) -> Cluster:
    """The cluster with copies and collectives that take as much of a core as they do in a step. A collective call.

    By themselves they take less: in a step buffers have left the caches, and threads hand over to each other. A step of
    a synthetic model takes x · elements + y · bytes beyond the same step alone, DDP's copies and the codec: x is put on
    the copies, y is the collective's. Telling them apart takes exchanges of more and of fewer bytes: unless int8 and
    bf16 are among the `wires`, whose codecs have been measured, the cluster is returned as it is.
    """
    if not {"int8", "bf16"} <= set(wires):
        return cluster
    numel = _numel_for(cluster, budget_s / len(CPU_CHOICES))
    task = synthetic(numel, 0.0, team.device)
    workload = measure_workload(team, task, 0.0)
    alone_s = _cpu_of_a_step(team, task[0], task)
    extra_s, sent = {}, {}
    for kind, (wire, sum) in CPU_CHOICES.items():
        with synchronised(team, task[0], wire, sum, None) as ddp:
            step_s = _cpu_of_a_step(team, ddp, task)
        sent[kind] = predict_option(workload, cluster, wire, sum, 25).prediction.sent_nbytes
        extra_s[kind] = step_s - alone_s - 8 * numel * cluster.copy_s_per_byte - _codec_s(cluster, wire, numel)
    return attributed(cluster, numel, extra_s, sent)


def attributed(cluster: Cluster, numel: int, extra_s: dict[str, float], sent: dict[str, float]) -> Cluster:
    """See above; by the kinds of CPU_CHOICES."""
    network = cluster.network

    def bounded(kind: str, per_byte_s: float) -> Cost:
        cost = getattr(network, kind)
        least_s = cost.cpu_s_per_unit
        return dataclasses.replace(cost, cpu_s_per_unit=min(max(per_byte_s, least_s), MOST_TIMES * least_s))

    exchange = bounded("exchange", (extra_s["exchange"] - extra_s["few"]) / (sent["exchange"] - sent["few"]))
    of_elements_s = max(0.0, extra_s["few"] - exchange.cpu_s_per_unit * sent["few"])
    costs = {kind: bounded(kind, (extra_s[kind] - of_elements_s) / sent[kind]) for kind in ("all_reduce", "direct")}
    copy_s_per_byte = min(cluster.copy_s_per_byte + of_elements_s / (8 * numel), MOST_TIMES * cluster.copy_s_per_byte)
    network = dataclasses.replace(network, exchange=exchange, **costs)
    return dataclasses.replace(cluster, network=network, copy_s_per_byte=copy_s_per_byte)


def _codec_s(cluster: Cluster, wire: str, numel: int) -> float:
    if wire == OFF:
        return 0.0
    codec = cluster.codecs[wire]
    return codec.pack(numel) + codec.reduce(numel) + codec.unpack(numel)


def _numel_for(cluster: Cluster, budget_s: float) -> int:
    """Such that the steps fit the budget."""
    slowest_s = cluster.network.all_reduce.per_unit_s
    fits = budget_s / (CPU_STEPS + WARMUP_STEPS) / (8 * slowest_s)
    return int(min(max(fits, MIN_CPU_NUMEL), MAX_CPU_NUMEL))


def _cpu_of_a_step(team: Team, module: nn.Module, task: Task) -> float:
    """Of the rank that takes most."""
    take_steps(team, module, task, WARMUP_STEPS)
    return statistics.median(take_steps(team, module, task, CPU_STEPS, clock=cpu_s))
