"""The engines that sum in a wire: one for each process set and wire, opened when the first operation needs it."""

import datetime
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fusedcomm.config import LocalOptions
from fusedcomm.horovod.compression import config_of
from fusedcomm.native import _C
from fusedcomm.ranks.own_group import OwnGroup
from fusedcomm.session.session import Session

if TYPE_CHECKING:
    from fusedcomm.horovod.world import World

_NO_TIMEOUT = datetime.timedelta(days=365)
"""A slow rank is no error: rank 0 reports stalls, and lost ranks are noticed."""


def open_sums(world: "World", set_id: int, wire: str) -> "_C.FusedSum":
    """Opens the engine of a process set for a wire. Every member of the set calls it, in the same order.

    Raises RuntimeError, with the same text on every member, if one of them cannot open it.
    """
    of_set, config = world.members[set_id].group, config_of(wire)
    store = dist.PrefixStore(f"engines/{set_id}", world.store)
    backends = {"cpu": of_set.backends["cpu"]}
    group = OwnGroup(store, of_set.group_rank, of_set.group_size, _NO_TIMEOUT, backends, world.rank)
    # Rank 0's negotiator looks for stalls, and knows the names of operations.
    session = Session(config, group, None, LocalOptions(), torch.device("cpu"), watched=False)
    if config.name_patterns:
        session.synchronizer.choose_wires(
            # It reads only the dimensions.
            lambda name, num_dims: config.wire_number(name, torch.empty([0] * num_dims, dtype=torch.float32)),
        )
    world.sessions.append(session)
    return _C.FusedSum(session.synchronizer)
