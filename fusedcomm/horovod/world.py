"""The result of hvd.init(), where every module of fusedcomm.horovod finds it."""

import collections
import dataclasses
import datetime
from typing import Any

import torch.distributed as dist

from fusedcomm.horovod.environment import Settings
from fusedcomm.horovod.errors import NOT_INITIALISED


@dataclasses.dataclass
class World:
    """The result of one hvd.init(). `store` belongs to this init alone. `hosts`: the host name of each rank. `token`:
    rank 0's random name for this init. `sockets`: the coordinator's, as file descriptors."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hosts: list[str]
    token: str
    store: dist.Store
    timeout: datetime.timedelta
    settings: Settings
    asked_for: tuple
    sockets: list[int]
    coordinator: Any = None
    # Process sets by id; 0 is every rank. Their backends must live as long as the coordinator.
    sets: dict[int, Any] = dataclasses.field(default_factory=dict)
    backends: dict[int, dist.Backend] = dataclasses.field(default_factory=dict)
    # NCCL over the ranks of a set, by purpose and set; made when the first tensor on cuda needs it.
    nccl: dict[str, dist.Backend] = dataclasses.field(default_factory=dict)
    num_sets_made: int = 1
    # Objects sent so far, by call, members and name: a signed one belongs in one place of this order.
    num_objects: collections.Counter = dataclasses.field(default_factory=collections.Counter)


class Ended:
    """Stands in a coordinator's place after shutdown(), for handles that have not been synchronized, and in a child of
    fork(), which has no part in its parent's job."""

    def __init__(self, failure: str) -> None:
        self.failure = failure or "fusedcomm.horovod was shut down"

    def submit(self, *_: Any) -> int:
        """Raises RuntimeError that says why the job has ended."""
        raise RuntimeError(self.failure)

    def poll(self, handle: int) -> bool:
        """True: there is nothing left to wait for."""
        return True

    def wait(self, handle: int) -> Any:
        """Raises RuntimeError that says why the job has ended."""
        raise RuntimeError(self.failure)


_world: World | None = None


def world() -> World:
    """Raises ValueError before hvd.init()."""
    if _world is None:
        raise ValueError(NOT_INITIALISED)
    return _world


def world_if_any() -> World | None:
    """None before hvd.init()."""
    return _world


def set_world(new: World | None) -> None:
    """Makes `new` what world() returns. None: hvd.shutdown() was called."""
    global _world
    _world = new
