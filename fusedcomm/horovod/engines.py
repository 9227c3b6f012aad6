"""The engines that sum in a wire: one for each process set and wire, opened when the first operation needs it."""

import torch

from fusedcomm.config import LocalOptions
from fusedcomm.horovod.compression import config_of
from fusedcomm.horovod.process_sets import ProcessSet
from fusedcomm.horovod.step_reducer import group_for
from fusedcomm.horovod.world import World
from fusedcomm.native import _C
from fusedcomm.session.session import Session


def open_sums(world: World, process_set: ProcessSet, wire: str) -> "_C.FusedSum":
    """Opens the engine of a process set for a wire. Every member of the set calls it, in the same order.

    Raises RuntimeError, with the same text on every member, if one of them cannot open it.
    """
    config, device = config_of(wire), torch.device("cpu")
    group = group_for(world, process_set, device, "sums")
    # Rank 0's negotiator looks for stalls, and knows the names of operations.
    session = Session(config, group, None, LocalOptions(), device, watched=False)
    if config.name_patterns:
        session.synchronizer.choose_wires(
            # It reads only the dimensions.
            lambda name, num_dims: config.wire_number(name, torch.empty([0] * num_dims, dtype=torch.float32)),
        )
    world.sessions.append(session)
    return _C.FusedSum(session.synchronizer)
