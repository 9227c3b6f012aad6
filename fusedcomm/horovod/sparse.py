"""Sums of sparse tensors: their indices and values are gathered from every rank."""

from collections.abc import Callable

import torch

from fusedcomm.horovod.checks import Average, Sum
from fusedcomm.horovod.operations import Call, begin, told_to_others
from fusedcomm.horovod.order import synchronize
from fusedcomm.horovod.process_sets import ProcessSet, global_process_set


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Starts the sum of sparse COO tensors of one shape. Returns a function that waits for it and returns it,
    coalesced.

    Each rank's tensor is coalesced first, so an index travels once from each rank. Raises ValueError unless `tensor` is
    sparse and `op` is Average or Sum.
    """
    call: Call[list[torch.Tensor]] = Call("allgather", None, name, process_set, is_group=True)
    with told_to_others(call):
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
            what = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ValueError(f"sparse_allreduce_async: expected a tensor of layout torch.sparse_coo, got {what}")
        if op not in (Average, Sum):
            raise ValueError("sparse_allreduce_async: op must be hvd.Average or hvd.Sum")
        own = tensor.detach().coalesce()
        # Indices of shape (entries, sparse dimensions), so that ranks may differ in the first dimension.
        call.given = [own.indices().t().contiguous(), own.values().contiguous()]
    handle = begin(call)

    def wait() -> torch.Tensor:
        all_indices, all_values = synchronize(handle)
        if op == Average:
            all_values = all_values / len(process_set.ranks)
        summed = torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape, check_invariants=False)
        return summed.coalesce()

    return wait
