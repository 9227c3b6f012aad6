"""Elastic training: the job goes on when workers are lost or added.

    state = hvd.elastic.TorchState(model, optimizer, epoch=0, sampler=sampler)

    @hvd.elastic.run
    def train(state): ...; state.commit()

A worker that catches a lost rank's error restores the committed state from its memory, and goes on with the others.
"""

from fusedcomm.horovod.elastic.handlers import (
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)
from fusedcomm.horovod.elastic.run import run
from fusedcomm.horovod.elastic.sampler import ElasticSampler
from fusedcomm.horovod.elastic.state import ObjectState, State, TorchState
from fusedcomm.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from fusedcomm.horovod.state import init, shutdown

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "init",
    "run",
    "set_handler_registry",
    "shutdown",
]
