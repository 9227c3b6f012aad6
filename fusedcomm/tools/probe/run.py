"""The probe on one rank: takes real steps with each choice, compares them, and recommends one."""

import dataclasses
import datetime
import platform
import statistics
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm.attaching import is_sharded
from fusedcomm.ranks import own_address
from fusedcomm.ranks.hosts import OwnHost, of_names
from fusedcomm.tools.arguments import ACCEPT, COMPARED
from fusedcomm.tools.errors import ProbeError
from fusedcomm.tools.probe.choices import (
    DDP,
    DEFAULT_CAP_MIB,
    FSDP2,
    OFF,
    Candidate,
    FrontEnd,
    Recommendation,
    Seen,
    choices,
    finalists,
    recommend,
)
from fusedcomm.tools.probe.progress import Progress
from fusedcomm.tools.probe.script import load, naming_the_line
from fusedcomm.tools.probe.steps import Task, alone, fsdp2_of, in_turns, synchronized
from fusedcomm.tools.probe.team import Team
from fusedcomm.tools.probe.workload import Synthetic, checked, synthetic, tune_backward

SHARES = {"alone": 0.1, "wires": 0.4, "buckets": 0.2, "finals": 0.3}
"""The stages of progress.STAGES in their order, with their shares of the time. A stage gets its share of the time that
is left, so a stage that takes less leaves more to the later ones, and one that takes more leaves less."""
MIN_SHARE = 0.7
"""Share of the given time that the steps have at least, however long starting the ranks took."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The user's choices for a probe."""

    script: str | None = None
    """PATH or PATH:FUNCTION. None: a synthetic step."""
    params: float = 25_000_000
    """Without a script: elements of the synthetic model."""
    backward_s: float = 0.0
    """Without a script: seconds of the synthetic model's backward pass."""
    seconds: float = 60.0
    """About how long the probe may take, with starting its ranks. Steps have at least MIN_SHARE of it."""
    wires: tuple[str, ...] = COMPARED
    accept: tuple[str, ...] = ACCEPT
    """The wires that may be recommended."""
    caps_mb: tuple[float, ...] = (5.0, 25.0, 100.0)
    """Values of bucket_cap_mb that are compared, in MiB."""


OPTIONS = {"backward_s": "--backward-ms (in seconds)", "caps_mb": "--caps"}
"""The options of settings that have another name."""


@dataclasses.dataclass(frozen=True)
class Findings:
    """The results of a probe. Equal on every rank except for rounding."""

    settings: Settings
    environment: dict
    numel: int
    """Elements of the model's gradients."""
    alone_s: float
    """Median step without synchronization, in seconds."""
    seen: Mapping[Candidate, Seen]
    """The latest steps of each choice."""
    not_tried: Sequence[Candidate]
    """Choices that there was no time for."""
    recommendation: Recommendation
    seconds: dict[str, float]
    """Seconds of "start", starting the ranks, and of "all"."""
    front_end: FrontEnd = DDP


def probe(
    settings: Settings,
    group: dist.ProcessGroup,
    device: torch.device,
    shows_progress: bool = False,
    began: float | None = None,
) -> Findings:
    """Takes steps, compares them and recommends a choice. A collective call of all ranks of `group`.

    Args:
        device: the gradients' device.
        began: since when `settings.seconds` count, by time.monotonic(); None: since the call.
        shows_progress: whether this rank shows how far the probe is.

    Raises:
        ProbeError: on every rank, if settings or models differ between ranks, if a rank cannot use the script or what
            it returns, or if ranks have different gradients after a backward pass.
        ScriptError: on this rank alone, if a later step of the script fails.
    """
    began = time.monotonic() if began is None else began
    team = Team(group, device)
    task = agreed_task(team, settings)
    # All ranks begin with rank 0's parameters, as with DDP. The first DDP of a process imports a large part of torch.
    baseline = Candidate("off", bucket_mib=DEFAULT_CAP_MIB)
    with synchronized(team, task[0], baseline, init_sync=True):
        pass
    (start_s,) = team.slowest([time.monotonic() - began])
    measuring_s = max(settings.seconds - start_s, MIN_SHARE * settings.seconds)
    progress = Progress(start_s, measuring_s, shows_progress)
    with naming_the_line(settings.script):
        findings = _Probe(team, settings, task, measuring_s, progress).run()
    return dataclasses.replace(findings, seconds={"start": start_s, "all": time.monotonic() - began})


class _Probe:
    """The stages of a probe. Every method is a collective call."""

    def __init__(self, team: Team, settings: Settings, task: Task, measuring_s: float, progress: Progress) -> None:
        self._team, self._settings, self._task, self._progress = team, settings, task, progress
        self._ends = time.monotonic() + measuring_s
        self._front_end = FSDP2 if task is not None and is_sharded(task[0]) else DDP
        self._own_host, self._by_host, self._uneven = hosts_of(team)
        self._seen: dict[Candidate, Seen] = {}
        self._not_tried: list[Candidate] = []

    def run(self) -> Findings:
        """Takes all steps."""
        settings, accept = self._settings, self._settings.accept
        alone_s = statistics.median(alone(self._team, self._task, self._budget_s("alone")))
        fsdp2 = fsdp2_of(self._task[0])
        usual = min(settings.caps_mb, key=lambda cap: abs(cap - DEFAULT_CAP_MIB)) if fsdp2 is None else None
        self._take("wires", choices(settings.wires, accept, self._by_host, usual, self._front_end))
        best = finalists(self._seen, accept)[:2]
        if fsdp2 is None:
            caps = [cap for cap in settings.caps_mb if cap != usual]
            others = [dataclasses.replace(choice, bucket_mib=cap) for cap in caps for choice in best]
        else:
            ours = [choice for choice in best if choice.wire != OFF.wire]
            wires = fsdp2.wires_of_params(self._task[0], accept)
            others = [dataclasses.replace(choice, params=wire) for wire in wires for choice in ours]
        self._take("buckets", [best[0], *others])
        finals = finalists(self._seen, accept)
        found = self._take("finals", finals)
        in_turns_s = found if len(found) > 1 else self._seen
        return Findings(
            settings,
            self._environment(),
            sum(parameter.numel() for parameter in self._task[0].parameters() if parameter.requires_grad),
            alone_s,
            self._seen,
            self._not_tried,
            recommend(in_turns_s, accept, alone_s, self._front_end),
            {},
            self._front_end,
        )

    def _budget_s(self, stage: str) -> float:
        """Begins a stage. Returns the seconds that it may take, which are equal on all ranks."""
        self._progress.begin(stage)
        (left_s,) = self._team.slowest([self._ends - time.monotonic()])
        later = list(SHARES)[list(SHARES).index(stage) :]
        return max(left_s, 0.0) * SHARES[stage] / sum(SHARES[name] for name in later)

    def _take(self, stage: str, wanted: Sequence[Candidate]) -> dict[Candidate, Seen]:
        """Steps with the choices, in turns; none if there is nothing to compare."""
        budget_s = self._budget_s(stage)
        # Later steps replace those of an earlier stage. Each stage compares with DDP's own all-reduce.
        found = in_turns(self._team, self._task, wanted, self._own_host, budget_s) if len(wanted) > 1 else {}
        self._seen |= found
        self._not_tried += [choice for choice in wanted if choice not in self._seen]
        return found

    def _environment(self) -> dict:
        """The versions, devices and hosts that the findings depend on."""
        return {
            "fusedcomm": fusedcomm.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "device": self._team.device.type,
            "world_size": self._team.world_size,
            "ranks_per_host": self._own_host.num_ranks,
            "by_host": self._by_host,
            "uneven_hosts": self._uneven,
            "torch_threads": torch.get_num_threads(),
        }


def agreed_task(team: Team, settings: Settings) -> Task:
    """The script's task, or a synthetic one. A collective call.

    Raises:
        ProbeError: on every rank, if settings or models differ, or if a rank cannot use its task.
    """
    record = dataclasses.asdict(settings)
    del record["script"]  # each host may have it elsewhere
    team.agree({OPTIONS.get(name, f"--{name}"): value for name, value in record.items()}, "give every host the same")
    error = ""
    try:
        if settings.script is not None:
            make = load(settings.script)
            with naming_the_line(settings.script):
                task = checked(make(), team.device)
        else:
            task = synthetic(int(settings.params), team.device)
    except ProbeError as problem:
        error = str(problem)
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    team.agree_on_errors(error)
    if settings.backward_s > 0 and isinstance(task[0], Synthetic):
        tune_backward(team, task, settings.backward_s)
    shapes = {name: p.shape for name, p in task[0].named_parameters() if p.requires_grad}
    team.agree({"parameters": shapes}, "the script has to make the same model on every rank")
    return task


def hosts_of(team: Team) -> tuple[OwnHost, bool, str]:
    """(this rank's host, of one rank if all are on one or hosts are uneven; whether sums can have two levels; why
    hosts are uneven, empty if they are not). A collective call."""
    names = team.gather(own_address.host_name())
    try:
        hosts = of_names(names)
    except ValueError as error:
        return OwnHost(), False, str(error)
    return OwnHost() if hosts.num_hosts == 1 else OwnHost.of(names, team.rank), not hosts.flat_reason, ""
