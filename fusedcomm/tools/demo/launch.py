"""Starts the ranks of the demo, or joins those that torchrun started."""

import importlib.util
from pathlib import Path

import torch.distributed as dist

from fusedcomm import env
from fusedcomm.ranks import groups
from fusedcomm.tools import local_ranks
from fusedcomm.tools.demo import MAX_RANKS
from fusedcomm.tools.errors import UsageError

_DEFAULT_RANKS = 2
_PACKAGES = {"sklearn": "scikit-learn", "tqdm": "tqdm", "numpy": "numpy"}


def launch(num_steps: int, num_seeds: int, wires: tuple[str, ...], num_ranks: int | None, out: Path) -> int:
    """Runs the demo to its end. Returns the exit status; errors have been printed.

    Args:
        num_ranks: None: torchrun's world size, or _DEFAULT_RANKS without torchrun.
        out: the folder for demo.json; it exists.

    Raises:
        UsageError: an option is impossible.
        ImportError: names all packages that are not installed.
    """
    missing = [package for module, package in _PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ImportError(
            f"the demo needs {', '.join(missing)}, which this Python lacks: pip install {' '.join(missing)}"
        )
    arguments = (num_steps, num_seeds, wires, out)
    world_size = env.launched_world_size()
    if world_size is None:
        return local_ranks.run("demo", num_ranks or _DEFAULT_RANKS, _train_and_report, *arguments)
    if num_ranks not in (None, world_size):
        raise UsageError(f"--ranks {num_ranks}, but torchrun started {world_size}: leave --ranks out")
    if not 2 <= world_size <= MAX_RANKS:
        raise UsageError(
            f"torchrun started {world_size} ranks, which is not possible: start 2 to {MAX_RANKS} "
            "(--nproc-per-node), which share 1257 training digits"
        )
    dist.init_process_group("gloo")
    return _train_and_report(*arguments)


def _train_and_report(num_steps: int, num_seeds: int, wires: tuple[str, ...], out: Path) -> int:
    """Runs on every rank; rank 0 reports. Ends the process group. Returns the exit status."""
    from fusedcomm.tools.demo.report import report
    from fusedcomm.tools.demo.training import train

    results = train(num_steps, num_seeds, wires)
    try:
        if dist.get_rank() == 0:
            report(results, out)
    finally:
        groups.end_together()
    return 0
