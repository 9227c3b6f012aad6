"""The probe on one rank: measures, predicts, recommends, checks."""

import dataclasses
import datetime
import platform
import socket
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm import chunks
from fusedcomm.config import Config
from fusedcomm.ranks.hosts import Hosts, of_names
from fusedcomm.tools.arguments import ACCEPT
from fusedcomm.tools.cluster import Cluster
from fusedcomm.tools.cost_model import Workload
from fusedcomm.tools.errors import ProbeError
from fusedcomm.tools.probe.check import Check, borne_out, check
from fusedcomm.tools.probe.choices import (
    OFF,
    Option,
    Recommendation,
    Way,
    crossover_bytes_s,
    finalists,
    options,
    recommend,
)
from fusedcomm.tools.probe.local import MeasuredLocal, measure_local
from fusedcomm.tools.probe.network import ON_ONE_LEVEL, MeasuredNetwork, measure_network
from fusedcomm.tools.probe.progress import Progress
from fusedcomm.tools.probe.script import load, naming_the_line
from fusedcomm.tools.probe.speed import Speed, speed_of
from fusedcomm.tools.probe.steps import synchronised, with_cpu_of_steps
from fusedcomm.tools.probe.team import Team
from fusedcomm.tools.probe.workload import Synthetic, Task, checked, measure_workload, synthetic, tune_backward

PARTS = (
    ("workload", 0.04),
    ("network", 0.38),
    ("local", 0.12),
    ("workload", 0.04),
    ("cpu", 0.1),
    ("workload", 0.04),
    ("check", 0.24),
    ("report", 0.04),
)
"""The parts of the probe in their order, with their shares of the given time. A part gets its share of the time that is
left, so a part that takes less leaves more to the later ones, and a part that takes more leaves less."""


MIN_SHARE = 0.7
"""Share of the given time that the measurements have at least, however long starting the ranks took."""


class Budget:
    """Divides the given time among PARTS, and measures what they take.

    Args:
        team: its ranks agree on every part's time.
        seconds: what all parts may take.
    """

    def __init__(self, team: Team, seconds: float, progress: Progress) -> None:
        self._team, self._seconds, self._progress = team, seconds, progress
        self._began = time.perf_counter()
        self._left = list(PARTS)
        self.took_s: dict[str, float] = {}

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._began

    def run(self, part: str, function: Callable, *arguments: object) -> object:
        """Calls `function` with the arguments and the seconds that it may take, which are equal on all ranks. `part` is
        the next one of PARTS. A collective call."""
        shares = sum(share for _, share in self._left)
        name, share = self._left.pop(0)
        assert name == part, f"{part} is not the next part: {name} is"
        (left_s,) = self._team.slowest([self._seconds - self.elapsed_s()])
        budget_s = max(left_s, 0.0) * share / shares
        self._progress.begin(part)
        before = time.perf_counter()
        result = function(*arguments, budget_s)
        taken_s = time.perf_counter() - before
        self.took_s[part] = self.took_s.get(part, 0.0) + taken_s
        return result


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the user asked for."""

    # PATH or PATH:FUNCTION; None: a synthetic step.
    script: str | None = None
    # Without a script: elements of the synthetic model.
    params: float = 25_000_000
    backward_s: float = 0.0
    """Without a script: seconds of the synthetic model's backward pass."""
    # About how long the probe may take, with starting its ranks. Measuring has at least MIN_SHARE of it.
    seconds: float = 60.0
    wires: tuple[str, ...] = ("bf16", "int8", "fp8", "int4")
    accept: tuple[str, ...] = ACCEPT
    """The wires that may be recommended."""
    caps_mb: tuple[float, ...] = (5.0, 25.0, 100.0)
    # Cores of this rank; None: they are counted.
    cores: float | None = None


@dataclasses.dataclass(frozen=True)
class Findings:
    """Everything to report. The same on every rank, except times that each rank measures for itself."""

    settings: Settings
    environment: dict
    network: MeasuredNetwork
    local: MeasuredLocal
    cluster: Cluster
    workload: Workload
    options: list[Option]
    recommendation: Recommendation
    crossovers: dict[str, float | None]
    """By an option's name: the link up to which its wire pays, see :func:`crossover_bytes_s`."""
    checks: list[Check]
    """Real steps, with the predictions that were made before them."""
    speed: Speed
    """How much longer things take in these steps. `options` are predicted with it."""
    seconds: dict[str, float]
    """Seconds that each part took, "start" before them, and "all" of these."""


def probe(
    settings: Settings,
    group: dist.ProcessGroup,
    device: torch.device,
    task: Task | None = None,
    shows_progress: bool = False,
    began: float | None = None,
) -> Findings:
    """Measures, predicts, recommends and checks. A collective call of all ranks of `group`.

    Args:
        device: the gradients' device.
        task: takes the place of a script.
        began: since when `settings.seconds` count, by time.monotonic(); None: since the call.
        shows_progress: whether this rank shows how far the probe is.

    Raises:
        ProbeError: on every rank, if settings or models differ between ranks, or if a rank cannot use the script or
            what it returns.
        ScriptError: on this rank alone, if a later step of the script fails.
    """
    began = time.monotonic() if began is None else began
    team = Team(group, device)
    task = agreed_task(team, settings, task)
    # The first DDP of a process imports a large part of torch, for seconds.
    with synchronised(team, torch.nn.Linear(1, 1, dtype=torch.float32, device=device), Way("bf16"), None):
        pass
    (start_s,) = team.slowest([time.monotonic() - began])
    measuring_s = max(settings.seconds - start_s, MIN_SHARE * settings.seconds)
    progress = Progress(start_s, measuring_s, shows_progress)
    team.on_barrier = progress.tick
    try:
        with naming_the_line(settings.script):
            findings = _probe(team, settings, task, Budget(team, measuring_s, progress))
    finally:
        progress.end()
    seconds = {"start": start_s, **findings.seconds, "all": start_s + findings.seconds["all"]}
    return dataclasses.replace(findings, seconds=seconds)


def _probe(team: Team, settings: Settings, task: Task, budget: Budget) -> Findings:
    def steps_alone() -> Workload:
        return budget.run("workload", measure_workload, team, task)

    # Three measurements. The fastest counts, because a disturbance makes steps longer, never shorter.
    workloads = [steps_alone()]
    hosts, uneven = hosts_of(team)
    network = budget.run("network", measure_network, team, hosts)
    # Sums on two levels have another wire within a host.
    wires = settings.wires if hosts is None else tuple(dict.fromkeys((*settings.wires, Config().local_wire)))
    local = budget.run("local", measure_local, team, wires, settings.cores, network.s_per_byte)
    workloads.append(steps_alone())
    cluster = _cluster(team.world_size, network, local)
    if local.cores is not None:
        cluster = _of_rank_0(team, cluster)
    cluster = budget.run("cpu", with_cpu_of_steps, team, cluster, settings.wires)
    workload = min([*workloads, steps_alone()], key=lambda workload: workload.compute_s)
    # Times are the slowest rank's, so ranks agree on them except for rounding and each rank's own core time.
    cluster, workload = _of_rank_0(team, (cluster, workload))
    found = options(workload, cluster, settings.wires, settings.caps_mb)
    recommendation = recommend(found, settings.accept)
    chosen = finalists(found, recommendation, settings.accept)
    checks = budget.run("check", check, team, task, workload, cluster, chosen)
    speed, in_steps = Speed(), (workload, cluster)
    if all(check.option in chosen for check in checks):
        # These are steps of the model itself: they decide instead of predictions, and show how fast the cores are.
        speed = speed_of(workload, cluster, checks)
        in_steps = speed.of(workload, cluster)
        found = options(*in_steps, settings.wires, settings.caps_mb)
        steps_s = {(check.option.way, check.option.cap_mb): check.steps_s for check in checks}
        by_key = {(option.way, option.cap_mb): option for option in found}
        recommendation = recommend(found, settings.accept, {by_key[key]: taken for key, taken in steps_s.items()})
    else:
        recommendation = borne_out(recommendation, checks)
    crossovers = _crossovers(found, recommendation.option.cap_mb, in_steps)
    environment = describe(team, local, network, uneven)
    return Findings(
        settings,
        environment,
        network,
        local,
        cluster,
        workload,
        found,
        recommendation,
        crossovers,
        checks,
        speed,
        budget.took_s | {"all": budget.elapsed_s()},
    )


def _cluster(world_size: int, network: MeasuredNetwork, local: MeasuredLocal) -> Cluster:
    return Cluster(
        world_size,
        network.network,
        local.codecs,
        local.copy_s_per_byte,
        local.cores,
        network.s_per_byte,
        network.ranks_per_host,
        network.local,
        network.two_levels,
        link_bytes_s=max(map(network.carried_bytes_s, ON_ONE_LEVEL)),
    )


def _crossovers(found: list[Option], cap_mb: float, in_steps: tuple[Workload, Cluster]) -> dict[str, float | None]:
    """By name of the fusedcomm options with this bucket cap and sum="auto": see crossover_bytes_s."""
    return {
        option.name: crossover_bytes_s(*in_steps, option.way, cap_mb)
        for option in found
        if option.cap_mb == cap_mb and option.wire != OFF and option.way.sum == "auto"
    }


OPTIONS = {"backward_s": "--backward-ms (in seconds)", "caps_mb": "--caps"}
"""The options of settings that have another name."""


def _agree_on_settings(team: Team, settings: Settings) -> None:
    """Raises ProbeError on every rank if settings differ. Only `script` and `cores` may differ."""
    if team.device.type != "cpu" and any(team.gather(settings.cores is not None)):
        raise ProbeError("--cores has no effect on an accelerator: leave it out")
    own = {name: value for name, value in dataclasses.asdict(settings).items() if name not in ("script", "cores")}
    everybodys = team.gather(own)
    for name, value in everybodys[0].items():
        for rank, theirs in enumerate(everybodys):
            if theirs[name] != value:
                raise ProbeError(
                    f"the ranks' command lines differ: {OPTIONS.get(name, '--' + name)} is {value} on rank 0 and "
                    f"{theirs[name]} on rank {rank}; give every host the same"
                )


def agreed_task(team: Team, settings: Settings, task: Task | None) -> Task:
    """The given task, the script's, or a synthetic one.

    Raises:
        ProbeError: on every rank, if settings or models differ, or if a rank cannot use its task.
    """
    _agree_on_settings(team, settings)
    error = ""
    try:
        if task is None and settings.script is not None:
            make = load(settings.script)
            with naming_the_line(settings.script):
                task = checked(make(), team.device)
        elif task is not None:
            task = checked(task, team.device)
        else:
            task = synthetic(int(settings.params), team.device)
    except ProbeError as problem:
        error = str(problem)
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    team.agree_on_errors(error)
    if settings.script is None and settings.backward_s > 0 and isinstance(task[0], Synthetic):
        tune_backward(team, task, settings.backward_s)
    shapes = [tuple(parameter.shape) for parameter in task[0].parameters() if parameter.requires_grad]
    everybodys = team.gather(shapes)
    different = [rank for rank, theirs in enumerate(everybodys) if theirs != everybodys[0]]
    if different:
        raise ProbeError(f"the ranks' models differ: rank {different[0]} has other parameters than rank 0")
    return task


def _of_rank_0(team: Team, value: object) -> object:
    """Rank 0's value, on every rank. A collective call."""
    return team.gather(value)[0]


def hosts_of(team: Team) -> tuple[Hosts | None, str]:
    """(the hosts on which sums can have two levels, or None; why hosts are uneven, empty if they are not).

    A collective call.
    """
    try:
        hosts = of_names(team.gather(socket.gethostname()))
    except ValueError as error:
        return None, str(error)
    return None if hosts.flat_reason else hosts, ""


def describe(team: Team, local: MeasuredLocal, network: MeasuredNetwork, uneven: str) -> dict:
    """The environment that the findings depend on."""
    config = chunks.resolved(Config(), team.world_size, team.device.type, network.s_per_byte)
    return {
        "fusedcomm": fusedcomm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": team.device.type,
        "world_size": team.world_size,
        "ranks_per_host": network.ranks_per_host,
        "uneven_hosts": uneven,
        "torch_threads": torch.get_num_threads(),
        "codec": local.codec,
        "cores_of_a_rank": local.cores,
        "chunk_nbytes": config.chunks.nbytes,
        "chunks_in_flight": config.chunks.in_flight,
    }
