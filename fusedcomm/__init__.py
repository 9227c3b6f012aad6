"""fusedcomm: fused gradient communication for PyTorch's DistributedDataParallel.

    comm = fusedcomm.attach(ddp, wire="bf16")

Names are loaded when first used, so that ``fusedcomm doctor`` can run where the extension is not built.
"""

import importlib
from typing import TYPE_CHECKING

from fusedcomm.version import __version__

if TYPE_CHECKING:
    from fusedcomm.autotune.search import Tuning
    from fusedcomm.config import SUMS, WIRES
    from fusedcomm.ddp.attach import attach
    from fusedcomm.ddp.comm_state import CommState, comm_hook
    from fusedcomm.ddp.handle import Handle
    from fusedcomm.session.stats import Stats
    from fusedcomm.simulation import Residuals, simulate

__all__ = [
    "SUMS",
    "WIRES",
    "CommState",
    "Handle",
    "Residuals",
    "Stats",
    "Tuning",
    "__version__",
    "attach",
    "comm_hook",
    "simulate",
]

_HOME = {
    "attach": "ddp.attach",
    "Handle": "ddp.handle",
    "CommState": "ddp.comm_state",
    "comm_hook": "ddp.comm_state",
    "WIRES": "config",
    "SUMS": "config",
    "Stats": "session.stats",
    "Tuning": "autotune.search",
    "Residuals": "simulation",
    "simulate": "simulation",
}


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'fusedcomm' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"fusedcomm.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
