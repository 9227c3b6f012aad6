"""The collectives that return a handle, for hvd.poll() and hvd.synchronize(). Autograd sees none of them. ops.py has
those that can be differentiated, and tells the arguments and errors that all have in common.

Tensors must not change, and those of functions whose name ends with _ must not be read, until the handle is
synchronized."""

from collections.abc import Sequence

import torch

from fusedcomm.horovod.checks import Average, parse_op
from fusedcomm.horovod.operations import Call, begin
from fusedcomm.horovod.process_sets import ProcessSet, global_process_set

Tensors = Sequence[torch.Tensor]


def _reduction(
    average: bool | None,
    name: str | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    wire: str,
    is_group: bool = False,
) -> Call:
    how = dict(op=parse_op(op, average), prescale=prescale_factor, postscale=postscale_factor, wire=wire)
    return Call("allreduce", name, process_set, how, is_group)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    wire: str = "",
) -> int:
    """Begins allreduce(). The result is a new tensor. `wire`: in which the engine sums; see compression.py ("": none).

    Raises ValueError and HorovodInternalError as in ops.py."""
    call = _reduction(average, name, op, prescale_factor, postscale_factor, process_set, wire)
    return begin(call, tensor)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    wire: str = "",
) -> int:
    """As allreduce_async(), in place: the result is `tensor`."""
    call = _reduction(average, name, op, prescale_factor, postscale_factor, process_set, wire)
    return begin(call, tensor, in_place=True)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    wire: str = "",
) -> int:
    """As allreduce_async(), of several tensors as one operation: the result is a list of new tensors."""
    call = _reduction(average, name, op, prescale_factor, postscale_factor, process_set, wire, is_group=True)
    return begin(call, tensors)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    wire: str = "",
) -> int:
    """As grouped_allreduce_async(), in place: the result is the list of `tensors`."""
    call = _reduction(average, name, op, prescale_factor, postscale_factor, process_set, wire, is_group=True)
    return begin(call, tensors, in_place=True)


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begins allgather(). The result is a new tensor."""
    return begin(Call("allgather", name, process_set, {}), tensor)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins grouped_allgather(). The result is a list of new tensors."""
    return begin(Call("allgather", name, process_set, {}, is_group=True), tensors)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins broadcast(). The result is a new tensor."""
    return begin(Call("broadcast", name, process_set, dict(root_rank=root_rank)), tensor)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As broadcast_async(), in place: the result is `tensor`."""
    return begin(Call("broadcast", name, process_set, dict(root_rank=root_rank)), tensor, in_place=True)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins alltoall(). The result is a pair, also without `splits`: the received rows, a new tensor, and how many
    came from each rank, int32 of shape (ranks of the set,), on the device of `splits`. Where `splits` are wrong, this
    rank gets a ValueError, and the others a HorovodInternalError."""
    return begin(Call("alltoall", name, process_set, dict(splits=splits)), tensor)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begins reducescatter(). The result is a new tensor."""
    how = dict(op=op, prescale=prescale_factor, postscale=postscale_factor)
    return begin(Call("reducescatter", name, process_set, how), tensor)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begins grouped_reducescatter(). The result is a list of new tensors."""
    how = dict(op=op, prescale=prescale_factor, postscale=postscale_factor)
    return begin(Call("reducescatter", name, process_set, how, is_group=True), tensors)
