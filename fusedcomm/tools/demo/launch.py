"""Starts the ranks of the demo."""

import importlib.util
from pathlib import Path

import torch.distributed as dist

from fusedcomm import env
from fusedcomm.ranks import groups
from fusedcomm.tools import local_ranks
from fusedcomm.tools.errors import UsageError

_PACKAGES = {"sklearn": "scikit-learn", "tqdm": "tqdm", "numpy": "numpy"}


def launch(num_steps: int, num_seeds: int, wires: tuple[str, ...], num_ranks: int, out: Path) -> int:
    """Runs the demo to its end. Returns the exit status; errors have been printed.

    out: the folder for demo.json; it exists.

    Raises:
        UsageError: torchrun has started this process.
        ImportError: names all packages that are not installed.
    """
    missing = [package for module, package in _PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ImportError(
            f"the demo needs {', '.join(missing)}, which this Python lacks: pip install {' '.join(missing)}"
        )
    if env.launched_world_size() is not None:
        raise UsageError("the demo starts its ranks by itself: run it without torchrun")
    return local_ranks.run("demo", num_ranks, _train_and_report, num_steps, num_seeds, wires, out)


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
