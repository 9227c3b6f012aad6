"""The collectives that return a handle, for hvd.poll() and hvd.synchronize(). Autograd sees none of them. ops.py has
those that can be differentiated, and tells the arguments and errors that all have in common.

Every function checks its arguments, gives the operation a name that all ranks share, and hands it to the coordinator.
Tensors must not change, and those of functions whose name ends with _ must not be read, until the handle is
synchronized."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusedcomm.horovod.checks import (
    MOVED,
    REDUCED,
    Average,
    check_group,
    check_has_rows,
    check_scattered_op,
    check_tensor,
    parse_op,
    parse_splits,
)
from fusedcomm.horovod.handles import next_name, refuse, submit
from fusedcomm.horovod.process_sets import ProcessSet, global_process_set, member_of, root_in_set
from fusedcomm.horovod.world import World
from fusedcomm.native import _C

Tensors = Sequence[torch.Tensor]


def _begin(
    kind: str, given: Any, dtypes: frozenset[torch.dtype], name: str | None, process_set: ProcessSet, is_group: bool
) -> tuple[World, list[torch.Tensor], str]:
    """The world, the checked tensors, and the operation's name. `given`: a tensor, or a list if it is a group, whose
    names are kept apart from those of single tensors."""
    found, _ = member_of(process_set)
    if is_group:
        tensors = check_group(kind, given, dtypes)
    else:
        check_tensor(kind, given, dtypes)
        tensors = [given]
    if name is None:
        name = next_name(process_set.process_set_id, f"grouped {kind}" if is_group else kind)
    return found, tensors, f"grouped.{name}" if is_group else name


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)


def _allreduce(
    given: Any,
    average: bool | None,
    name: str | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    wire: str,
    *,
    in_place: bool,
    is_group: bool = False,
) -> int:
    found, inputs, name = _begin("allreduce", given, REDUCED, name, process_set, is_group)
    op = parse_op(op, average)
    outputs = inputs if in_place else [_empty_like(tensor) for tensor in inputs]
    result = outputs if is_group else outputs[0]
    signature = _C.CollectiveSignature(
        kind="allreduce", name=name, op=op, prescale=prescale_factor, postscale=postscale_factor, wire=wire
    )
    written = inputs if in_place else ()
    return submit(found, signature, inputs, outputs, lambda _: result, written, process_set.process_set_id)


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
    return _allreduce(tensor, average, name, op, prescale_factor, postscale_factor, process_set, wire, in_place=False)


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
    return _allreduce(tensor, average, name, op, prescale_factor, postscale_factor, process_set, wire, in_place=True)


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
    return _allreduce(tensors, average, name, op, prescale_factor, postscale_factor, process_set, wire,
                      in_place=False, is_group=True)  # fmt: skip


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
    return _allreduce(tensors, average, name, op, prescale_factor, postscale_factor, process_set, wire,
                      in_place=True, is_group=True)  # fmt: skip


def _as_moved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as one that backends can move: bools as bytes, in the same memory."""
    return tensor.detach().view(torch.uint8) if tensor.dtype is torch.bool else tensor


def _allgather(given: Any, name: str | None, process_set: ProcessSet, *, is_group: bool) -> int:
    found, tensors, name = _begin("allgather", given, MOVED, name, process_set, is_group)
    for tensor in tensors:
        check_has_rows("allgather", tensor)
    dtypes = [tensor.dtype for tensor in tensors]

    def finish(result: Any) -> Any:
        gathered = [out.view(dtype) if dtype is torch.bool else out
                    for out, dtype in zip(result.outputs, dtypes, strict=True)]  # fmt: skip
        return gathered if is_group else gathered[0]

    inputs = [_as_moved(tensor) for tensor in tensors]
    signature = _C.CollectiveSignature(kind="allgather", name=name)
    return submit(found, signature, inputs, [], finish, set_id=process_set.process_set_id)


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begins allgather(). The result is a new tensor."""
    return _allgather(tensor, name, process_set, is_group=False)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins grouped_allgather(). The result is a list of new tensors."""
    return _allgather(tensors, name, process_set, is_group=True)


def _broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, in_place: bool
) -> int:
    found, _, name = _begin("broadcast", tensor, MOVED, name, process_set, is_group=False)
    output = tensor if in_place else _empty_like(tensor)
    signature = _C.CollectiveSignature(kind="broadcast", name=name, root=root_in_set(process_set, root_rank))
    written = [output] if in_place else []
    return submit(found, signature, [_as_moved(tensor)], [_as_moved(output)], lambda _: output, written,
                  process_set.process_set_id)  # fmt: skip


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begins broadcast(). The result is a new tensor."""
    return _broadcast(tensor, root_rank, name, process_set, in_place=False)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As broadcast_async(), in place: the result is `tensor`."""
    return _broadcast(tensor, root_rank, name, process_set, in_place=True)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins alltoall(). The result is a pair, also without `splits`: the received rows, a new tensor, and how many
    came from each rank, int32 of shape (ranks of the set,), on the device of `splits`. Where `splits` are wrong, this
    rank gets a ValueError, and the others a HorovodInternalError."""
    found, _, name = _begin("alltoall", tensor, MOVED, name, process_set, is_group=False)
    check_has_rows("alltoall", tensor)
    try:
        parsed = parse_splits(splits, tensor.shape[0], len(process_set.ranks))
    except ValueError as error:
        refuse(found, "alltoall", name, str(error), process_set.process_set_id)
        raise
    device = splits.device if isinstance(splits, torch.Tensor) else "cpu"

    def finish(result: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output = result.outputs[0]
        output = output.view(torch.bool) if tensor.dtype is torch.bool else output
        return output, torch.tensor(result.received_splits[0], dtype=torch.int32, device=device)

    rows = _as_moved(tensor)[: sum(parsed)]
    signature = _C.CollectiveSignature(kind="alltoall", name=name, splits=parsed)
    return submit(found, signature, [rows], [], finish, set_id=process_set.process_set_id)


def _reducescatter(
    given: Any,
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
    *,
    is_group: bool,
) -> int:
    found, tensors, name = _begin("reducescatter", given, REDUCED, name, process_set, is_group)
    check_scattered_op(op)
    for tensor in tensors:
        check_has_rows("reducescatter", tensor)
    finish: Callable[[Any], Any] = lambda result: list(result.outputs) if is_group else result.outputs[0]  # noqa: E731
    signature = _C.CollectiveSignature(
        kind="reducescatter", name=name, op=op, prescale=prescale_factor, postscale=postscale_factor
    )
    return submit(found, signature, tensors, [], finish, set_id=process_set.process_set_id)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begins reducescatter(). The result is a new tensor."""
    return _reducescatter(tensor, name, op, process_set, prescale_factor, postscale_factor, is_group=False)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begins grouped_reducescatter(). The result is a list of new tensors."""
    return _reducescatter(tensors, name, op, process_set, prescale_factor, postscale_factor, is_group=True)
