"""The collectives that wait for their result. Those that return a new tensor can be differentiated; see autograd.py.

`process_set`: the ranks that take part. `name`: the operation's name on every rank; without one, all ranks must
call unnamed operations of a kind in the same order. `compression`: how gradients travel; see compression.py."""

from collections.abc import Sequence
from typing import Any

import torch

import fusedcomm.horovod.async_ops as async_ops
import fusedcomm.horovod.autograd as autograd
from fusedcomm.horovod.checks import REDUCED, Average, check_group, parse_op
from fusedcomm.horovod.compression import Compression, check_compression, wire_of
from fusedcomm.horovod.handles import joined, submit, synchronize
from fusedcomm.horovod.process_sets import ProcessSet, global_process_set, member_of
from fusedcomm.horovod.world import world

Tensors = Sequence[torch.Tensor]


def _is_differentiated(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in tensors)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduces tensors of one shape and dtype over the ranks into a new tensor."""
    how = dict(op=parse_op(op, average), prescale_factor=prescale_factor, postscale_factor=postscale_factor,
               process_set=process_set)  # fmt: skip
    if wire := wire_of(check_compression(compression), tensor):
        return _allreduce(tensor, name, {**how, "wire": wire})
    compressed, context = compression.compress(tensor)
    return compression.decompress(_allreduce(compressed, name, how), context)


def _allreduce(tensor: torch.Tensor, name: str | None, how: dict) -> torch.Tensor:
    if _is_differentiated(tensor):
        return autograd.Allreduce.apply(tensor, name, how)
    return synchronize(async_ops.allreduce_async(tensor, name=name, **how))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Like allreduce(), in place. Returns `tensor`."""
    return synchronize(async_ops.allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor,
                                                  process_set))  # fmt: skip


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduces several tensors as one operation into new tensors."""
    how = dict(op=parse_op(op, average), prescale_factor=prescale_factor, postscale_factor=postscale_factor,
               process_set=process_set)  # fmt: skip
    tensors = check_group("allreduce", tensors, REDUCED)
    if wire := wire_of(check_compression(compression), tensors[0]):
        return _grouped_allreduce(tensors, name, {**how, "wire": wire})
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = _grouped_allreduce([compressed for compressed, _ in pairs], name, how)
    return [compression.decompress(each, context) for each, (_, context) in zip(reduced, pairs, strict=True)]


def _grouped_allreduce(tensors: Tensors, name: str | None, how: dict) -> list[torch.Tensor]:
    if _is_differentiated(*tensors):
        return list(autograd.GroupedAllreduce.apply(name, how, *tensors))
    return synchronize(async_ops.grouped_allreduce_async(tensors, name=name, **how))


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Like grouped_allreduce(), in place. Returns the tensors."""
    return synchronize(async_ops.grouped_allreduce_async_(tensors, average, name, op, prescale_factor,
                                                          postscale_factor, process_set))  # fmt: skip


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenates the ranks' tensors along the first dimension, in which they may differ, in rank order."""
    if _is_differentiated(tensor):
        return autograd.Allgather.apply(tensor, name, process_set)
    return synchronize(async_ops.allgather_async(tensor, name, process_set))


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Gathers several tensors as one operation."""
    if _is_differentiated(*tensors):
        return list(autograd.GroupedAllgather.apply(name, process_set, *tensors))
    return synchronize(async_ops.grouped_allgather_async(tensors, name, process_set))


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Copies the root's tensor into a new one on every rank. `root_rank`: a rank of the job, also in a process set."""
    if _is_differentiated(tensor):
        return autograd.Broadcast.apply(tensor, root_rank, name, process_set)
    return synchronize(async_ops.broadcast_async(tensor, root_rank, name, process_set))


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Like broadcast(), in place. Returns `tensor`."""
    return synchronize(async_ops.broadcast_async_(tensor, root_rank, name, process_set))


def alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends splits[r] rows to rank r of the set. Returns the received rows in rank order; if `splits` are given, as a
    pair with how many came from each rank, int32 of shape (ranks of the set,)."""
    if _is_differentiated(tensor):
        output, received = autograd.Alltoall.apply(tensor, splits, name, process_set)
    else:
        output, received = synchronize(async_ops.alltoall_async(tensor, splits, name, process_set))
    return output if splits is None else (output, received)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Sums tensors of one shape; each rank keeps its share of the rows. The first `rows % ranks` ranks get one more."""
    how = dict(op=op, prescale_factor=prescale_factor, postscale_factor=postscale_factor, process_set=process_set)
    compressed, context = check_compression(compression).compress(tensor)
    if _is_differentiated(compressed):
        reduced = autograd.Reducescatter.apply(compressed, name, how)
    else:
        reduced = synchronize(async_ops.reducescatter_async(compressed, name, **how))
    return compression.decompress(reduced, context)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Scatters several sums as one operation."""
    how = dict(op=op, prescale_factor=prescale_factor, postscale_factor=postscale_factor, process_set=process_set)
    check_compression(compression)
    pairs = [compression.compress(tensor) for tensor in tensors]
    compressed = [each for each, _ in pairs]
    if _is_differentiated(*compressed):
        reduced = list(autograd.GroupedReducescatter.apply(name, how, *compressed))
    else:
        reduced = synchronize(async_ops.grouped_reducescatter_async(compressed, name, **how))
    return [compression.decompress(each, context) for each, (_, context) in zip(reduced, pairs, strict=True)]


def join(device: int = -1) -> int:
    """Tells the others that this rank has no more data, and waits until every rank has joined. Until then this rank
    adds nothing to the others' allreduces; Average divides by all ranks still. Returns the rank that joined last, the
    same on every rank. `device` is accepted for Horovod's sake and has no effect."""
    found = world()
    number = synchronize(submit(found, kind="join", name="noname", inputs=[], outputs=[],
                                finish=lambda result: result.number))  # fmt: skip
    joined()
    return number


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank of the set has called it. Operations under way do not hold it up."""
    found, _ = member_of(process_set)
    synchronize(submit(found, kind="barrier", name="noname", inputs=[], outputs=[], finish=lambda _: None,
                       set_id=process_set.process_set_id))  # fmt: skip
