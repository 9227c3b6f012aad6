"""fusedcomm: fused gradient communication for PyTorch.

    comm = fusedcomm.attach(ddp, "bf16")  # a DistributedDataParallel, or a model of FSDP2

Four front ends send gradients: ``attach`` for DistributedDataParallel (``comm_hook`` where a trainer registers hooks),
``attach`` for FSDP2, ``DataParallel`` with its ``GradReducer`` for any module, and ``fusedcomm.horovod`` for Horovod's
scripts.

Names are imported on first use, so that ``fusedcomm doctor`` also runs where the extension is not built.
"""

import importlib
from typing import TYPE_CHECKING

from fusedcomm.version import __version__

if TYPE_CHECKING:
    from fusedcomm.attaching import attach
    from fusedcomm.config import (
        SUMS,
        WIRES,
        Chunks,
        Config,
        Feedback,
        LocalOptions,
        Sum,
        TwoLevels,
        Wire,
    )
    from fusedcomm.ddp.comm_state import CommState, comm_hook
    from fusedcomm.ddp.handle import Handle
    from fusedcomm.local_steps.local_steps import LocalSteps
    from fusedcomm.members.errors import (
        DamagedError,
        ExpelledError,
        JoinRefusedError,
        MinorityError,
        TooFewRanksError,
    )
    from fusedcomm.members.members import Members
    from fusedcomm.members.training.sampler import MembersSampler
    from fusedcomm.optimizer.sharded import ShardedOptimizer
    from fusedcomm.reducer.data_parallel import DataParallel
    from fusedcomm.reducer.reducer import GradReducer
    from fusedcomm.session.plan import Tuning
    from fusedcomm.session.stats import Stats
    from fusedcomm.simulation import Residuals, simulate

__all__ = [
    "SUMS",
    "WIRES",
    "Chunks",
    "CommState",
    "Config",
    "DamagedError",
    "DataParallel",
    "ExpelledError",
    "Feedback",
    "GradReducer",
    "Handle",
    "JoinRefusedError",
    "LocalOptions",
    "LocalSteps",
    "Members",
    "MembersSampler",
    "MinorityError",
    "Residuals",
    "ShardedOptimizer",
    "Stats",
    "Sum",
    "TooFewRanksError",
    "Tuning",
    "TwoLevels",
    "Wire",
    "__version__",
    "attach",
    "comm_hook",
    "simulate",
]

# The submodule that defines each public name.
_HOME = {
    "attach": "attaching",
    "Handle": "ddp.handle",
    "GradReducer": "reducer.reducer",
    "DataParallel": "reducer.data_parallel",
    "Members": "members.members",
    "DamagedError": "members.errors",
    "ExpelledError": "members.errors",
    "JoinRefusedError": "members.errors",
    "MinorityError": "members.errors",
    "TooFewRanksError": "members.errors",
    "MembersSampler": "members.training.sampler",
    "CommState": "ddp.comm_state",
    "comm_hook": "ddp.comm_state",
    "Tuning": "session.plan",
    "LocalSteps": "local_steps.local_steps",
    "ShardedOptimizer": "optimizer.sharded",
    "Stats": "session.stats",
    "Residuals": "simulation",
    "simulate": "simulation",
    "SUMS": "config",
    "WIRES": "config",
    "Chunks": "config",
    "Config": "config",
    "Feedback": "config",
    "LocalOptions": "config",
    "Sum": "config",
    "TwoLevels": "config",
    "Wire": "config",
}


if not TYPE_CHECKING:  # a type checker would take every name for known

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module 'fusedcomm' has no attribute '{name}'")
        value = getattr(importlib.import_module(f"fusedcomm.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "__file__", "__name__", "__path__"])
