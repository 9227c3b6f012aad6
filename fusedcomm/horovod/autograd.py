"""Derivatives of the collectives. They are Horovod's, whose convention a model's results depend on.

An allreduce's gradient is reduced like its tensor. Gradients of allgather and broadcast are averaged over the ranks,
as the loss is taken to be. A reducescatter's gradient is gathered, times what the sum was scaled by.

`is_group`: whether the tensors are one grouped operation; else there is one tensor. Results are tuples.
"""

from typing import Any

import torch

import fusedcomm.horovod.async_ops as async_ops
from fusedcomm.horovod.checks import Average, Sum
from fusedcomm.horovod.handles import synchronize
from fusedcomm.horovod.process_sets import ProcessSet, member_of, root_in_set

Tensors = tuple[torch.Tensor, ...]


def allreduced(is_group: bool, tensors: Tensors, name: str | None, how: dict) -> Tensors:
    """Without a derivative. how: the other arguments of allreduce_async()."""
    if is_group:
        return tuple(synchronize(async_ops.grouped_allreduce_async(list(tensors), name=name, **how)))
    return (synchronize(async_ops.allreduce_async(tensors[0], name=name, **how)),)


def allgathered(is_group: bool, tensors: Tensors, name: str | None, process_set: ProcessSet) -> Tensors:
    """Without a derivative."""
    if is_group:
        return tuple(synchronize(async_ops.grouped_allgather_async(list(tensors), name, process_set)))
    return (synchronize(async_ops.allgather_async(tensors[0], name, process_set)),)


def scattered(is_group: bool, tensors: Tensors, name: str | None, how: dict) -> Tensors:
    """Without a derivative. how: the other arguments of reducescatter_async()."""
    if is_group:
        return tuple(synchronize(async_ops.grouped_reducescatter_async(list(tensors), name, **how)))
    return (synchronize(async_ops.reducescatter_async(tensors[0], name, **how)),)


class Allreduce(torch.autograd.Function):
    """`how`: the other arguments of allreduce_async(). Errors of both passes: those of the collectives."""

    @staticmethod
    def forward(ctx: Any, is_group: bool, name: str | None, how: dict, *tensors: torch.Tensor) -> Tensors:
        """The reduced tensors, new ones of the same shapes."""
        ctx.is_group, ctx.how = is_group, how
        return allreduced(is_group, tensors, name, how)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        """The reduced gradients, one for each tensor."""
        contiguous = tuple(grad.contiguous() for grad in grads)
        return None, None, None, *allreduced(ctx.is_group, contiguous, None, ctx.how)


class Allgather(torch.autograd.Function):
    """Tensors of shape (rows, …), where `rows` may differ from rank to rank."""

    @staticmethod
    def forward(ctx: Any, is_group: bool, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> Tensors:
        """Every rank's rows, in rank order."""
        ctx.num_rows, ctx.process_set = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors], process_set
        return allgathered(is_group, tensors, name, process_set)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        """The averages, narrowed to the rows that this rank gave."""
        _, rank = member_of(ctx.process_set)
        own = torch.tensor([ctx.num_rows], dtype=torch.int64)
        begins = synchronize(async_ops.allgather_async(own, process_set=ctx.process_set))[:rank].sum(0).tolist()
        how = dict(op=Average, process_set=ctx.process_set)
        handles = [async_ops.allreduce_async(grad.contiguous(), **how) for grad in grads]
        averages = [synchronize(handle) for handle in handles]
        narrowed = zip(averages, begins, ctx.num_rows, strict=True)
        return None, None, None, *(average.narrow(0, begin, rows) for average, begin, rows in narrowed)


class Broadcast(torch.autograd.Function):
    """`root_rank`: a rank of the job."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        """The root's tensor, as a new one."""
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(async_ops.broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        """The average on the root, zeros on other ranks."""
        average = synchronize(async_ops.allreduce_async(grad.contiguous(), op=Average, process_set=ctx.process_set))
        _, rank = member_of(ctx.process_set)
        if rank != root_in_set(ctx.process_set, ctx.root_rank):
            average.zero_()
        return average, None, None, None


class Alltoall(torch.autograd.Function):
    """`splits`: rows for each rank of the set, or None."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> tuple:
        """The received rows, and how many came from each rank: int32 of shape (ranks of the set,)."""
        output, received = synchronize(async_ops.alltoall_async(tensor, splits, name, process_set))
        ctx.received, ctx.process_set, ctx.num_rows = received.tolist(), process_set, tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple:
        """The gradient of the rows that this rank sent, and zeros for rows that were not sent."""
        handle = async_ops.alltoall_async(grad.contiguous(), ctx.received, process_set=ctx.process_set)
        own, _ = synchronize(handle)
        if own.shape[0] < ctx.num_rows:  # the rows that were not sent
            own = torch.cat([own, own.new_zeros(ctx.num_rows - own.shape[0], *own.shape[1:])])
        return own, None, None, None


class Reducescatter(torch.autograd.Function):
    """`how`: the other arguments of reducescatter_async(), with both factors."""

    @staticmethod
    def forward(ctx: Any, is_group: bool, name: str | None, how: dict, *tensors: torch.Tensor) -> Tensors:
        """This rank's share of the rows of each result."""
        ctx.how = how
        return scattered(is_group, tensors, name, how)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        """The gathered gradients, of the given tensors' shapes."""
        process_set = ctx.how["process_set"]
        factor = ctx.how["prescale_factor"] * ctx.how["postscale_factor"]
        if ctx.how["op"] == Sum:
            factor *= len(process_set.ranks)
        scaled = [grad.contiguous() * factor if factor != 1 else grad.contiguous() for grad in grads]
        handles = [async_ops.allgather_async(grad, process_set=process_set) for grad in scaled]
        return None, None, None, *(synchronize(handle) for handle in handles)
