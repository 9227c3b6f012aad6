"""Joins the ranks that torchrun started, or starts two on this machine to show what the probe does."""

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from fusedcomm import env
from fusedcomm.ranks import groups
from fusedcomm.tools.errors import ProbeError, ScriptError
from fusedcomm.tools.probe import report
from fusedcomm.tools.probe.run import Findings, Settings, probe
from fusedcomm.tools.run import Job, carry_out
from fusedcomm.tools.workers import Worker

LOCAL_RANKS = 2
"""Ranks to start without torchrun."""
REPORTED = 2
"""Exit status of a rank that has printed why it failed."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    settings: Settings
    json: Path
    """The file for all findings."""
    began: float
    """When the command began, by time.monotonic()."""
    given: Sequence[str]
    """The words after "fusedcomm"."""


def launch(options: Options) -> int:
    """Runs the probe to its end. Returns the exit status; errors have been printed."""
    if env.launched_world_size() is not None:
        return _run(options)
    print(
        f"fusedcomm probe: {LOCAL_RANKS} ranks on this machine's loopback, where bytes are nearly free. For a cluster, "
        "run the same line on every host:\n  torchrun --nnodes … --nproc-per-node … --rdzv-backend c10d --rdzv-id "
        "probe --rdzv-endpoint … -m fusedcomm probe",
        flush=True,
    )
    return carry_out(_RanksHere(options.given))


class _RanksHere(Job):
    """The same command as ranks on this machine's CPU."""

    command, reported = "probe", REPORTED

    def __init__(self, given: Sequence[str]) -> None:
        program = [sys.executable, "-m", "fusedcomm", *given]
        super().__init__(argparse.Namespace(hosts=None, program=program), ["localhost"] * LOCAL_RANKS)
        threads = max(1, torch.get_num_threads() // LOCAL_RANKS)
        self.where |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads)}

    def start(self, host: str, variables: dict[str, str], name: str) -> Worker:
        """See Workers. A Ctrl-C is for this process, which ends the ranks: each would print a traceback."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a process that starts inherits it
        try:
            return super().start(host, variables, name)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _device() -> torch.device:
    """The CPU, or with CUDA this rank's device, which becomes the current one. Ranks of a host take them in turn."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _run(options: Options) -> int:
    """Runs the probe on one rank. Returns the exit status. Rank 0 prints, or the first rank whose script failed."""
    device = _device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    is_first = dist.get_rank() == 0
    try:
        findings = probe(options.settings, dist.group.WORLD, device, shows_progress=is_first, began=options.began)
    except ScriptError as error:
        _fail_alone(error)
    except ProbeError as error:
        if is_first:
            print(f"fusedcomm probe: {error}", file=sys.stderr, flush=True)
        dist.destroy_process_group()
        return REPORTED
    try:
        if is_first:
            _say(findings, options)
    finally:
        groups.end_together()
    return 0


def _fail_alone(error: ScriptError) -> None:
    """Ends this rank, whose script failed while other ranks wait for it. The first rank that fails says why."""
    if dist.distributed_c10d._get_default_store().add("fusedcomm probe: a script failed", 1) == 1:
        print(f"fusedcomm probe: on rank {dist.get_rank()}: {error}", file=sys.stderr, flush=True)
    os._exit(REPORTED)


def _say(findings: Findings, options: Options) -> None:
    """Prints the report and writes the file."""
    print(report.text(findings))
    report.write_json(findings, options.json)
    print(f"Written: {options.json}", flush=True)
