"""The probe on one rank: measures, predicts, recommends, checks."""

import dataclasses
import datetime
import platform
import socket
import time

import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm import chunks
from fusedcomm.config import Config
from fusedcomm.ranks.hosts import Hosts, of_names
from fusedcomm.tools.arguments import ACCEPT
from fusedcomm.tools.cluster import Cluster
from fusedcomm.tools.cost_model import Workload
from fusedcomm.tools.probe.check import Check, check
from fusedcomm.tools.probe.choices import OFF, Option, Recommendation, crossover_bytes_s, finalists, options, recommend
from fusedcomm.tools.probe.local import MeasuredLocal, measure_local
from fusedcomm.tools.probe.network import ON_ONE_LEVEL, MeasuredNetwork, measure_network
from fusedcomm.tools.probe.speed import Speed, speed_of
from fusedcomm.tools.probe.steps import with_cpu_of_steps
from fusedcomm.tools.probe.team import ProbeError, Team
from fusedcomm.tools.probe.workload import Task, checked, load, measure_workload, synthetic

SHARES = {"network": 0.4, "local": 0.12, "cpu": 0.1, "workload": 0.12, "check": 0.26}
"""Each part's share of the given time. The check also gets the time that other parts leave over."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the user asked for."""

    # PATH or PATH:FUNCTION; None: a synthetic step.
    script: str | None = None
    # Without a script: elements of the synthetic model.
    params: float = 25_000_000
    backward_s: float = 0.0
    """Without a script: seconds of the synthetic model's backward pass."""
    # About how long the probe may take.
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
    """Seconds that each part took, and "all" of them."""


def probe(settings: Settings, group: dist.ProcessGroup, device: torch.device, task: Task | None = None) -> Findings:
    """Measures, predicts, recommends and checks. A collective call of all ranks of `group`.

    Args:
        device: the gradients' device.
        task: takes the place of a script.

    Raises:
        ProbeError: on every rank, if settings or models differ between ranks, or if a rank cannot use the script or
            what it returns.
    """
    began = time.perf_counter()
    team = Team(group, device)
    task = agreed_task(team, settings, task)
    budget_s = {part: share * settings.seconds for part, share in SHARES.items()}
    took_s = {}

    def timed(part: str, function, *arguments):
        before = time.perf_counter()
        result = function(*arguments)
        took_s[part] = took_s.get(part, 0.0) + time.perf_counter() - before
        return result

    def steps_alone() -> Workload:
        return timed("workload", measure_workload, team, task, budget_s["workload"] / 3)

    # Three measurements. The fastest counts, because a disturbance makes steps longer, never shorter.
    workloads = [steps_alone()]
    hosts, uneven = hosts_of(team)
    network = timed("network", measure_network, team, budget_s["network"], hosts)
    # Sums on two levels have another wire within a host.
    wires = settings.wires if hosts is None else tuple(dict.fromkeys((*settings.wires, Config().local_wire)))
    local = timed("local", measure_local, team, wires, budget_s["local"], settings.cores, network.s_per_byte)
    workloads.append(steps_alone())
    cluster = _cluster(team.world_size, network, local)
    if local.cores is not None:
        cluster = _of_rank_0(team, cluster)
        cluster = timed("cpu", with_cpu_of_steps, team, cluster, settings.wires, budget_s["cpu"])
    workload = min([*workloads, steps_alone()], key=lambda workload: workload.compute_s)
    # Times are the slowest rank's, so ranks agree on them except for rounding and each rank's own core time.
    cluster, workload = _of_rank_0(team, (cluster, workload))
    found = options(workload, cluster, settings.wires, settings.caps_mb)
    recommendation = recommend(found, settings.accept)
    left_s = max(settings.seconds - (time.perf_counter() - began), 0.5 * budget_s["check"])
    left_s = _of_rank_0(team, left_s)
    chosen = finalists(found, recommendation, settings.accept)
    checks = timed("check", check, team, task, workload, cluster, chosen, left_s)
    speed, in_steps = Speed(), (workload, cluster)
    if all(check.option in chosen for check in checks):
        # These are steps of the model itself: they decide instead of predictions, and show how fast the cores are.
        speed = speed_of(workload, cluster, checks)
        in_steps = speed.of(workload, cluster)
        found = options(*in_steps, settings.wires, settings.caps_mb)
        measured_s = {(check.option.way, check.option.cap_mb): check.measured_s for check in checks}
        by_key = {(option.way, option.cap_mb): option for option in found}
        recommendation = recommend(found, settings.accept, {by_key[key]: taken for key, taken in measured_s.items()})
    crossovers = _crossovers(found, recommendation.option.cap_mb, in_steps)
    took_s["all"] = time.perf_counter() - began
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
        took_s,
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
                    f"the ranks' command lines differ: {name} is {value} on rank 0 and {theirs[name]} on rank {rank}; "
                    "give every host the same"
                )


def agreed_task(team: Team, settings: Settings, task: Task | None) -> Task:
    """The given task, the script's, or a synthetic one.

    Raises:
        ProbeError: on every rank, if settings or models differ, or if a rank cannot use its task.
    """
    _agree_on_settings(team, settings)
    error, what = "", "" if settings.script is None else f"--script {settings.script}: "
    try:
        if task is None and settings.script is not None:
            task = load(settings.script)()
        if task is None:
            task = synthetic(int(settings.params), settings.backward_s, team.device)
        else:
            task = checked(task, team.device)
    except ProbeError as problem:
        error = str(problem)
    except Exception as problem:
        error = f"{what}{type(problem).__name__}: {problem}"
    team.agree_on_errors(error)
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
