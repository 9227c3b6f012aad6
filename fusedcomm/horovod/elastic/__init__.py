"""Elastic training: the job goes on when workers are lost or added.

    state = hvd.elastic.TorchState(model, optimizer, epoch=0, sampler=sampler)

    @hvd.elastic.run
    def train(state): ...; state.commit()

A worker that catches a lost rank's error restores the committed state from its memory, and goes on with the others.
"""

from fusedcomm.horovod.elastic.run import run as run
from fusedcomm.horovod.elastic.sampler import ElasticSampler as ElasticSampler
from fusedcomm.horovod.elastic.state import ObjectState as ObjectState
from fusedcomm.horovod.elastic.state import State as State
from fusedcomm.horovod.elastic.state import TorchState as TorchState
from fusedcomm.horovod.errors import HorovodInternalError as HorovodInternalError
from fusedcomm.horovod.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from fusedcomm.horovod.state import init as init
from fusedcomm.horovod.state import shutdown as shutdown
