"""Starts the ranks of the demo, or joins those that torchrun started."""

import dataclasses
import importlib.util
import os
import sys
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

import fusedcomm
from fusedcomm.ranks import groups
from fusedcomm.tools import output
from fusedcomm.tools.arguments import refuse_off
from fusedcomm.tools.errors import UsageError

_DEFAULT_RANKS = 2
_MAX_RANKS = 64  # a rank then has 19 of the 1257 training digits, a little more than half a batch


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    steps: int  # of each run
    seeds: int  # how many
    wires: tuple[str, ...] | None  # None: all
    ranks: int | None  # None: torchrun's world size, or _DEFAULT_RANKS without torchrun
    out: Path  # the folder for demo.json and demo.png


def launch(options: Options) -> int:
    """Runs the demo to its end. Returns the exit status; errors have been printed.

    Raises:
        UsageError: an option is impossible.
        ImportError: a package is not installed.
    """
    _check_packages()
    options = dataclasses.replace(options, wires=_checked_wires(options.wires))
    output.check(options.out / "demo.json", options.out / "demo.png", ("--out", "--out"))
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _join_torchrun(options)
    return _start_ranks(dataclasses.replace(options, ranks=_checked_ranks(options.ranks or _DEFAULT_RANKS)))


def _join_torchrun(options: Options) -> int:
    world_size = int(os.environ["WORLD_SIZE"])
    if options.ranks not in (None, world_size):
        raise UsageError(f"--ranks {options.ranks}, but torchrun started {world_size}: leave --ranks out")
    _checked_ranks(world_size)
    dist.init_process_group("gloo")
    _train_and_report(options)
    return 0


def _start_ranks(options: Options) -> int:
    # This process serves the store, on a free port that the system chooses, so no other program can take it first.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        mp.spawn(_run_rank, args=(store.port, options), nprocs=options.ranks)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        print(f"fusedcomm demo: rank {error.error_index} failed; the others were ended: {error}", file=sys.stderr)
        return 1
    return 0


def _run_rank(rank: int, port: int, options: Options) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(options.ranks)
    if sys.platform == "linux":
        # Without this, gloo looks up this machine's host name, which does not always resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    _train_and_report(options)


def _train_and_report(options: Options) -> None:
    """Runs on every rank; rank 0 reports. Ends the process group."""
    from fusedcomm.tools.demo.report import report
    from fusedcomm.tools.demo.training import run_specs, train

    results = train(run_specs(options.seeds, options.wires), options.steps)
    try:
        if dist.get_rank() == 0:
            report(results, options.out)
    finally:
        groups.end_together()


def _check_packages() -> None:
    """Raises ImportError that names all missing packages."""
    wanted = {"sklearn": "scikit-learn", "matplotlib": "matplotlib", "tqdm": "tqdm", "numpy": "numpy"}
    missing = [package for module, package in wanted.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ImportError(
            f"the demo needs {', '.join(missing)}, which this Python lacks: pip install {' '.join(missing)}"
        )


def _checked_wires(wires: tuple[str, ...] | None) -> tuple[str, ...]:
    if wires is None:
        return fusedcomm.WIRES
    refuse_off(wires)
    for wire in wires:
        if wire not in fusedcomm.WIRES:
            raise UsageError(f"--wires {wire}: no such wire; use some of {', '.join(fusedcomm.WIRES)}")
    return tuple(dict.fromkeys(wires))


def _checked_ranks(ranks: int) -> int:
    if not 2 <= ranks <= _MAX_RANKS:
        raise UsageError(f"{ranks} ranks are not possible: use 2 to {_MAX_RANKS}, which share 1257 training digits")
    return ranks
