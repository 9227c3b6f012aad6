"""Horovod's calls on fusedcomm's engine.

    import fusedcomm.horovod as hvd

    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

The names are those of `horovod.torch`, with what it does wrong done right. What the arguments of all collectives mean,
and what they raise, stands in ops.py.
"""

import types

from fusedcomm.horovod import elastic as elastic
from fusedcomm.horovod.checks import Average as Average
from fusedcomm.horovod.checks import Max as Max
from fusedcomm.horovod.checks import Min as Min
from fusedcomm.horovod.checks import Product as Product
from fusedcomm.horovod.checks import Sum as Sum
from fusedcomm.horovod.compression import Compression as Compression
from fusedcomm.horovod.errors import HorovodInternalError as HorovodInternalError
from fusedcomm.horovod.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from fusedcomm.horovod.objects import allgather_object as allgather_object
from fusedcomm.horovod.objects import broadcast_object as broadcast_object
from fusedcomm.horovod.objects import broadcast_optimizer_state as broadcast_optimizer_state
from fusedcomm.horovod.objects import broadcast_parameters as broadcast_parameters
from fusedcomm.horovod.ops import allgather as allgather
from fusedcomm.horovod.ops import allgather_async as allgather_async
from fusedcomm.horovod.ops import allreduce as allreduce
from fusedcomm.horovod.ops import allreduce_ as allreduce_
from fusedcomm.horovod.ops import allreduce_async as allreduce_async
from fusedcomm.horovod.ops import allreduce_async_ as allreduce_async_
from fusedcomm.horovod.ops import alltoall as alltoall
from fusedcomm.horovod.ops import alltoall_async as alltoall_async
from fusedcomm.horovod.ops import barrier as barrier
from fusedcomm.horovod.ops import broadcast as broadcast
from fusedcomm.horovod.ops import broadcast_ as broadcast_
from fusedcomm.horovod.ops import broadcast_async as broadcast_async
from fusedcomm.horovod.ops import broadcast_async_ as broadcast_async_
from fusedcomm.horovod.ops import grouped_allgather as grouped_allgather
from fusedcomm.horovod.ops import grouped_allgather_async as grouped_allgather_async
from fusedcomm.horovod.ops import grouped_allreduce as grouped_allreduce
from fusedcomm.horovod.ops import grouped_allreduce_ as grouped_allreduce_
from fusedcomm.horovod.ops import grouped_allreduce_async as grouped_allreduce_async
from fusedcomm.horovod.ops import grouped_allreduce_async_ as grouped_allreduce_async_
from fusedcomm.horovod.ops import grouped_reducescatter as grouped_reducescatter
from fusedcomm.horovod.ops import grouped_reducescatter_async as grouped_reducescatter_async
from fusedcomm.horovod.ops import join as join
from fusedcomm.horovod.ops import reducescatter as reducescatter
from fusedcomm.horovod.ops import reducescatter_async as reducescatter_async
from fusedcomm.horovod.optimizer import DistributedOptimizer as DistributedOptimizer
from fusedcomm.horovod.order import poll as poll
from fusedcomm.horovod.order import synchronize as synchronize
from fusedcomm.horovod.process_sets import ProcessSet as ProcessSet
from fusedcomm.horovod.process_sets import global_process_set as global_process_set
from fusedcomm.horovod.sparse import sparse_allreduce_async as sparse_allreduce_async
from fusedcomm.horovod.state import ccl_built as ccl_built
from fusedcomm.horovod.state import cross_rank as cross_rank
from fusedcomm.horovod.state import cross_size as cross_size
from fusedcomm.horovod.state import cuda_built as cuda_built
from fusedcomm.horovod.state import ddl_built as ddl_built
from fusedcomm.horovod.state import gloo_built as gloo_built
from fusedcomm.horovod.state import gloo_enabled as gloo_enabled
from fusedcomm.horovod.state import init as init
from fusedcomm.horovod.state import is_homogeneous as is_homogeneous
from fusedcomm.horovod.state import is_initialized as is_initialized
from fusedcomm.horovod.state import local_rank as local_rank
from fusedcomm.horovod.state import local_size as local_size
from fusedcomm.horovod.state import mpi_built as mpi_built
from fusedcomm.horovod.state import mpi_enabled as mpi_enabled
from fusedcomm.horovod.state import mpi_threads_supported as mpi_threads_supported
from fusedcomm.horovod.state import nccl_built as nccl_built
from fusedcomm.horovod.state import rank as rank
from fusedcomm.horovod.state import rocm_built as rocm_built
from fusedcomm.horovod.state import shutdown as shutdown
from fusedcomm.horovod.state import size as size
from fusedcomm.horovod.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from fusedcomm.horovod.timeline import start_timeline as start_timeline
from fusedcomm.horovod.timeline import stop_timeline as stop_timeline


def __getattr__(name: str) -> object:
    if name in ("add_process_set", "remove_process_set"):
        raise AttributeError(f"fusedcomm.horovod has no {name}: give hvd.init(process_sets=[…]) every set of the job")
    if name == "Adasum":
        raise AttributeError(
            "fusedcomm.horovod has no op Adasum: use hvd.Average, with a learning rate for the batch of all ranks"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def install() -> None:
    """Puts this package into sys.modules as `horovod.torch`, for scripts that import that. See stand_in.py."""
    from fusedcomm.horovod.stand_in import put_in_place

    put_in_place()


# Without it, `from horovod.torch import *` would bring modules of ours, such as `state`.
__all__ = [
    name
    for name, value in globals().items()
    if not name.startswith("_") and (name == "elastic" or not isinstance(value, types.ModuleType))
]
