"""Starts the ranks of the demo, or joins those that torchrun started."""

import dataclasses
import importlib.util
from pathlib import Path

import torch.distributed as dist

from fusedcomm import env
from fusedcomm.ranks import groups
from fusedcomm.tools import local_ranks
from fusedcomm.tools.arguments import WIRES
from fusedcomm.tools.demo import MAX_RANKS
from fusedcomm.tools.errors import UsageError

_DEFAULT_RANKS = 2


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    steps: int  # of each run
    seeds: int  # how many
    wires: tuple[str, ...] | None  # None: all
    ranks: int | None  # None: torchrun's world size, or _DEFAULT_RANKS without torchrun
    out: Path  # the folder for demo.json and demo.png; it exists


def launch(options: Options) -> int:
    """Runs the demo to its end. Returns the exit status; errors have been printed.

    Raises:
        UsageError: an option is impossible.
        ImportError: a package is not installed.
    """
    _check_packages()
    options = dataclasses.replace(options, wires=options.wires or WIRES)
    world_size = env.launched_world_size()
    if world_size is None:
        return local_ranks.run("demo", options.ranks or _DEFAULT_RANKS, _train_and_report, options)
    if options.ranks not in (None, world_size):
        raise UsageError(f"--ranks {options.ranks}, but torchrun started {world_size}: leave --ranks out")
    if not 2 <= world_size <= MAX_RANKS:
        raise UsageError(
            f"torchrun started {world_size} ranks, which is not possible: start 2 to {MAX_RANKS} "
            "(--nproc-per-node), which share 1257 training digits"
        )
    dist.init_process_group("gloo")
    return _train_and_report(options)


def _train_and_report(options: Options) -> int:
    """Runs on every rank; rank 0 reports. Ends the process group. Returns the exit status."""
    from fusedcomm.tools.demo.report import report
    from fusedcomm.tools.demo.training import run_specs, train

    results = train(run_specs(options.seeds, options.wires), options.steps)
    try:
        if dist.get_rank() == 0:
            report(results, options.out)
    finally:
        groups.end_together()
    return 0


def _check_packages() -> None:
    """Raises ImportError that names all missing packages."""
    wanted = {"sklearn": "scikit-learn", "matplotlib": "matplotlib", "tqdm": "tqdm", "numpy": "numpy"}
    missing = [package for module, package in wanted.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ImportError(
            f"the demo needs {', '.join(missing)}, which this Python lacks: pip install {' '.join(missing)}"
        )
