"""Joins the ranks that torchrun started, or starts two on this machine to show what the probe does."""

import dataclasses
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fusedcomm.config import WIRES
from fusedcomm.ranks import groups
from fusedcomm.tools import output
from fusedcomm.tools.errors import UsageError
from fusedcomm.tools.probe import plot, report
from fusedcomm.tools.probe.run import Findings, Settings, probe
from fusedcomm.tools.probe.team import ProbeError
from fusedcomm.tools.probe.workload import script_path

# Ranks to start without torchrun.
LOCAL_RANKS = 2
# The smallest --seconds.
MIN_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    settings: Settings
    json: Path
    plot: Path | None
    """None: no picture is wanted."""


def launch(options: Options) -> int:
    """Runs the probe to its end. Returns the exit status; errors have been printed.

    Raises:
        UsageError: an option is impossible.
    """
    check(options.settings)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if int(os.environ["WORLD_SIZE"]) == 1:
            raise UsageError(
                "torchrun started one rank, which cannot send gradients to another: start at least two (--nnodes, "
                "--nproc-per-node), or run the probe without torchrun, which starts two on this machine"
            )
        if os.environ["RANK"] == "0":  # only rank 0 writes
            output.check(options.json, options.plot)
        device = _device()
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return _run(options, device)
    output.check(options.json, options.plot)
    try:
        if options.settings.script is not None:
            script_path(options.settings.script)
    except ProbeError as error:
        raise UsageError(str(error)) from None
    print(
        f"fusedcomm probe: {LOCAL_RANKS} ranks on this machine's loopback, where bytes are nearly free. For a cluster, "
        "run the same line on every host:\n  torchrun --nnodes … --nproc-per-node … --rdzv-backend c10d --rdzv-id "
        "probe --rdzv-endpoint … -m fusedcomm probe",
        flush=True,
    )
    # This process serves the store, on a free port that the system chooses, so no other program can take it first.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        mp.spawn(_run_local_rank, args=(store.port, options), nprocs=LOCAL_RANKS)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        if getattr(error, "exit_code", None) != 2:  # with 2 the rank has printed why
            print(f"fusedcomm probe: rank {error.error_index} failed; the others were ended: {error}", file=sys.stderr)
            return 1
        return 2
    return 0


def check(settings: Settings) -> None:
    """Raises UsageError for impossible settings, before any rank is started."""
    for name, wires in (("--wires", settings.wires), ("--accept", settings.accept)):
        for wire in wires:
            if wire not in WIRES:
                raise UsageError(f"{name} {wire}: no such wire; use some of {', '.join(WIRES)}")
    # These conditions are written so that NaN does not pass.
    if not MIN_SECONDS <= settings.seconds < math.inf:
        raise UsageError(f"--seconds {settings.seconds:g} is not possible: use at least {MIN_SECONDS:g}")
    if not 1 <= settings.params < math.inf or not 0 <= settings.backward_s < math.inf:
        raise UsageError("--params must be at least 1, --backward-ms at least 0, and neither infinite")
    if not settings.caps_mb or not all(0 < cap_mb < math.inf for cap_mb in settings.caps_mb):
        raise UsageError(f"--caps {' '.join(map(str, settings.caps_mb))}: bucket sizes are numbers of MiB above 0")
    if settings.cores is not None and not 0 < settings.cores < math.inf:
        raise UsageError(f"--cores {settings.cores:g} is not possible: use the cores of each rank, more than 0")


def _device() -> torch.device:
    """The CPU, or with CUDA this rank's device, which becomes the current one. Ranks of a host take them in turn."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _run_local_rank(rank: int, port: int, options: Options) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(LOCAL_RANKS)
    torch.set_num_threads(max(1, torch.get_num_threads() // LOCAL_RANKS))
    if sys.platform == "linux":
        # Without this, gloo looks up this machine's host name, which does not always resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=LOCAL_RANKS)
    status = _run(options, torch.device("cpu"))
    if status:
        sys.exit(status)


def _run(options: Options, device: torch.device) -> int:
    """Runs the probe on one rank. Returns the exit status. Only rank 0 prints."""
    is_first = dist.get_rank() == 0
    try:
        findings = probe(options.settings, dist.group.WORLD, device)
    except ProbeError as error:
        if is_first:
            print(f"fusedcomm probe: {error}", file=sys.stderr, flush=True)
        dist.destroy_process_group()
        return 2
    try:
        if is_first:
            _say(findings, options)
    finally:
        groups.end_together()
    return 0


def _say(findings: Findings, options: Options) -> None:
    """Prints the report and writes the files."""
    print(report.text(findings))
    report.write_json(findings, options.json)
    written = [str(options.json)]
    if options.plot is not None:
        try:
            plot.picture(findings, options.plot)
            written.append(str(options.plot))
        except ImportError as error:
            print(f"no picture: {error}")
    print(f"Written: {' and '.join(written)}", flush=True)
