"""The result of hvd.init(), where every module of fusedcomm.horovod finds it."""

import dataclasses
import datetime
from typing import Any

import torch.distributed as dist

from fusedcomm.horovod.environment import Settings
from fusedcomm.horovod.errors import NOT_INITIALISED


@dataclasses.dataclass
class World:
    """The result of one hvd.init().

    store: of this init alone. meeting: how often the ranks have met before.
    hosts: the host name of each rank.
    order: the agreement with the other ranks.
    sockets: of that agreement, as file descriptors.
    sets: process sets by id; 0 is every rank. members: of those that have this rank.
    timeline: that which rank 0 writes; None: it writes none.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hosts: list[str]
    store: dist.Store
    timeout: datetime.timedelta
    settings: Settings
    meeting: int
    order: Any = None
    sockets: list[int] = dataclasses.field(default_factory=list)
    sets: dict[int, Any] = dataclasses.field(default_factory=dict)
    members: dict[int, Any] = dataclasses.field(default_factory=dict)
    timeline: Any = None

    def end_timeline(self) -> None:
        """Completes the timeline's file, if there is one."""
        ended, self.timeline = self.timeline, None
        if ended is not None:
            ended.end()


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
