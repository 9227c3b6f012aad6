"""Joins the ranks that torchrun started, or starts two on this machine to show what the probe does."""

import dataclasses
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from fusedcomm import env
from fusedcomm.ranks import groups
from fusedcomm.tools import local_ranks
from fusedcomm.tools.errors import ProbeError, ScriptError
from fusedcomm.tools.probe import report
from fusedcomm.tools.probe.run import Findings, Settings, probe

LOCAL_RANKS = 2
"""Ranks to start without torchrun."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    settings: Settings
    json: Path
    """The file for all findings."""
    began: float
    """When the command began, by time.monotonic()."""


def launch(options: Options) -> int:
    """Runs the probe to its end. Returns the exit status; errors have been printed."""
    if env.launched_world_size() is not None:
        device = _device()
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return _run(options, device)
    print(
        f"fusedcomm probe: {LOCAL_RANKS} ranks on this machine's loopback, where bytes are nearly free. For a cluster, "
        "run the same line on every host:\n  torchrun --nnodes … --nproc-per-node … --rdzv-backend c10d --rdzv-id "
        "probe --rdzv-endpoint … -m fusedcomm probe",
        flush=True,
    )
    return local_ranks.run("probe", LOCAL_RANKS, _run_local_rank, options)


def _device() -> torch.device:
    """The CPU, or with CUDA this rank's device, which becomes the current one. Ranks of a host take them in turn."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _run_local_rank(options: Options) -> int:
    torch.set_num_threads(max(1, torch.get_num_threads() // LOCAL_RANKS))
    return _run(options, torch.device("cpu"))


def _run(options: Options, device: torch.device) -> int:
    """Runs the probe on one rank. Returns the exit status. Rank 0 prints, or the first rank whose script failed."""
    is_first = dist.get_rank() == 0
    try:
        findings = probe(options.settings, dist.group.WORLD, device, shows_progress=is_first, began=options.began)
    except ScriptError as error:
        _fail_alone(error)
    except ProbeError as error:
        if is_first:
            print(f"fusedcomm probe: {error}", file=sys.stderr, flush=True)
        dist.destroy_process_group()
        return local_ranks.REPORTED
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
    os._exit(local_ranks.REPORTED)


def _say(findings: Findings, options: Options) -> None:
    """Prints the report and writes the file."""
    print(report.text(findings))
    report.write_json(findings, options.json)
    print(f"Written: {options.json}", flush=True)
