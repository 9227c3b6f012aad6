"""Derivatives of the collectives. They are Horovod's, whose convention a model's results depend on.

An allreduce's gradient is reduced like its tensor. Gradients of allgather and broadcast are averaged over the ranks,
as the loss is taken to be. A reducescatter's gradient is gathered, times what the sum was scaled by.
"""

from typing import Any

import torch

import fusedcomm.horovod.async_ops as async_ops
from fusedcomm.horovod.checks import Average, Sum
from fusedcomm.horovod.handles import synchronize
from fusedcomm.horovod.process_sets import ProcessSet, member_of, root_in_set


class Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, how: dict) -> torch.Tensor:
        ctx.how = how
        return synchronize(async_ops.allreduce_async(tensor, name=name, **how))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return synchronize(async_ops.allreduce_async(grad.contiguous(), **ctx.how)), None, None


class GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, how: dict, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.how = how
        return tuple(synchronize(async_ops.grouped_allreduce_async(tensors, name=name, **how)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        contiguous = [grad.contiguous() for grad in grads]
        return None, None, *synchronize(async_ops.grouped_allreduce_async(contiguous, **ctx.how))


def _own_rows(grads: list[torch.Tensor], num_rows: list[int], process_set: ProcessSet) -> list[torch.Tensor]:
    """The averages of gradients of gathered tensors, narrowed to the rows that this rank gave. `num_rows`: of each."""
    _, rank = member_of(process_set)
    counts = synchronize(
        async_ops.allgather_async(torch.tensor([num_rows], dtype=torch.int64), process_set=process_set)
    )
    begins = counts[:rank].sum(0).tolist()
    handles = [async_ops.allreduce_async(grad.contiguous(), op=Average, process_set=process_set) for grad in grads]
    averages = [synchronize(handle) for handle in handles]
    return [average.narrow(0, begin, rows) for average, begin, rows in zip(averages, begins, num_rows, strict=True)]


class Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        ctx.num_rows, ctx.process_set = [tensor.shape[0]] if tensor.dim() else [0], process_set
        return synchronize(async_ops.allgather_async(tensor, name, process_set))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return _own_rows([grad], ctx.num_rows, ctx.process_set)[0], None, None


class GroupedAllgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> tuple:
        ctx.num_rows, ctx.process_set = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors], process_set
        return tuple(synchronize(async_ops.grouped_allgather_async(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        return None, None, *_own_rows(list(grads), ctx.num_rows, ctx.process_set)


class Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(async_ops.broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        average = synchronize(async_ops.allreduce_async(grad.contiguous(), op=Average, process_set=ctx.process_set))
        _, rank = member_of(ctx.process_set)
        if rank != root_in_set(ctx.process_set, ctx.root_rank):
            average.zero_()
        return average, None, None, None


class Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> tuple:
        output, received = synchronize(async_ops.alltoall_async(tensor, splits, name, process_set))
        ctx.received, ctx.process_set, ctx.num_rows = received.tolist(), process_set, tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple:
        handle = async_ops.alltoall_async(grad.contiguous(), ctx.received, process_set=ctx.process_set)
        own, _ = synchronize(handle)
        if own.shape[0] < ctx.num_rows:  # the rows that were not sent
            own = torch.cat([own, own.new_zeros(ctx.num_rows - own.shape[0], *own.shape[1:])])
        return own, None, None, None


def _scattered_back(grads: tuple[torch.Tensor, ...], how: dict) -> list[torch.Tensor]:
    process_set = how["process_set"]
    factor = how["prescale_factor"] * how["postscale_factor"]
    if how["op"] == Sum:
        factor *= len(process_set.ranks)
    scaled = [grad.contiguous() * factor if factor != 1 else grad.contiguous() for grad in grads]
    handles = [async_ops.allgather_async(grad, process_set=process_set) for grad in scaled]
    return [synchronize(handle) for handle in handles]


class Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, how: dict) -> torch.Tensor:
        ctx.how = how
        return synchronize(async_ops.reducescatter_async(tensor, name, **how))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return _scattered_back((grad,), ctx.how)[0], None, None


class GroupedReducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, how: dict, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.how = how
        return tuple(synchronize(async_ops.grouped_reducescatter_async(tensors, name, **how)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        return None, None, *_scattered_back(grads, ctx.how)
