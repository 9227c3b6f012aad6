"""Horovod's calls on fusedcomm's engine.

    import fusedcomm.horovod as hvd

    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

The names are those of `horovod.torch`, with what it does wrong done right. What the arguments of all collectives mean,
and what they raise, stands in ops.py.
"""

import fusedcomm.horovod.elastic as elastic
from fusedcomm.horovod.checks import Average, Max, Min, Product, Sum
from fusedcomm.horovod.compression import Compression
from fusedcomm.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from fusedcomm.horovod.handles import poll, synchronize
from fusedcomm.horovod.objects import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from fusedcomm.horovod.ops import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    reducescatter,
    reducescatter_async,
)
from fusedcomm.horovod.optimizer import DistributedOptimizer
from fusedcomm.horovod.process_sets import ProcessSet, global_process_set
from fusedcomm.horovod.sparse import sparse_allreduce_async
from fusedcomm.horovod.state import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from fusedcomm.horovod.sync_batch_norm import SyncBatchNorm
from fusedcomm.horovod.timeline import start_timeline, stop_timeline

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "install",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]


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
