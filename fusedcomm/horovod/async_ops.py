"""The collectives that return a handle. None of them is seen by autograd; see ops.py for those that are.

Every function checks its arguments, gives the operation a name that all ranks share, and hands it to the coordinator.
`process_set`: the ranks that take part. `name`: the operation's name on every rank; without one, all ranks must call
unnamed operations of a kind in the same order."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusedcomm.horovod.checks import (
    MOVED,
    REDUCED,
    Average,
    check_adasum,
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

Tensors = Sequence[torch.Tensor]


def _one(result: Any) -> torch.Tensor:
    return result.outputs[0]


def _many(result: Any) -> list[torch.Tensor]:
    return list(result.outputs)


def _reduce(
    found: World,
    inputs: list[torch.Tensor],
    name: str,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    wire: str,
    *,
    in_place: bool,
    is_group: bool = False,
) -> int:
    check_adasum(op, process_set, found.size)
    outputs = inputs if in_place else [_empty_like(tensor) for tensor in inputs]
    result = outputs if is_group else outputs[0]
    return submit(
        found,
        kind="allreduce",
        name=name,
        inputs=inputs,
        outputs=outputs,
        finish=lambda _: result,
        written=inputs if in_place else [],
        op=op,
        prescale=prescale_factor,
        postscale=postscale_factor,
        set_id=process_set.process_set_id,
        wire=wire,
    )


def _name(name: str | None, kind: str, process_set: ProcessSet) -> str:
    return next_name(process_set.process_set_id, kind) if name is None else name


def _group_name(name: str | None, kind: str, process_set: ProcessSet) -> str:
    """A group's name, kept apart from those of single tensors."""
    return f"grouped.{_name(name, 'grouped ' + kind, process_set)}"


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)


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
    """Reduces tensors of one shape and dtype over the ranks. The result is a new tensor. `wire`: see compression.py."""
    found, _ = member_of(process_set)
    check_tensor("allreduce", tensor, REDUCED)
    return _reduce(found, [tensor], _name(name, "allreduce", process_set), parse_op(op, average), prescale_factor,
                   postscale_factor, process_set, wire, in_place=False)  # fmt: skip


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
    """Like allreduce_async(), in place: `tensor` must not be used until the handle is synchronised."""
    found, _ = member_of(process_set)
    check_tensor("allreduce", tensor, REDUCED)
    return _reduce(found, [tensor], _name(name, "allreduce", process_set), parse_op(op, average), prescale_factor,
                   postscale_factor, process_set, wire, in_place=True)  # fmt: skip


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
    """Reduces several tensors as one operation, with one handle and a list as its result."""
    found, _ = member_of(process_set)
    inputs = check_group("allreduce", tensors, REDUCED)
    return _reduce(found, inputs, _group_name(name, "allreduce", process_set), parse_op(op, average), prescale_factor,
                   postscale_factor, process_set, wire, in_place=False, is_group=True)  # fmt: skip


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
    """Like grouped_allreduce_async(), in place."""
    found, _ = member_of(process_set)
    inputs = check_group("allreduce", tensors, REDUCED)
    return _reduce(found, inputs, _group_name(name, "allreduce", process_set), parse_op(op, average), prescale_factor,
                   postscale_factor, process_set, wire, in_place=True, is_group=True)  # fmt: skip


def _as_moved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as one that backends can move: bools as bytes, in the same memory."""
    return tensor.detach().view(torch.uint8) if tensor.dtype is torch.bool else tensor


def _gather(
    found: World,
    tensors: list[torch.Tensor],
    name: str,
    finish: Callable[[list[torch.Tensor]], Any],
    process_set: ProcessSet,
) -> int:
    for tensor in tensors:
        check_has_rows("allgather", tensor)
    dtypes = [tensor.dtype for tensor in tensors]

    def in_dtypes(result: Any) -> Any:
        return finish([out.view(dtype) if dtype is torch.bool else out
                       for out, dtype in zip(result.outputs, dtypes, strict=True)])  # fmt: skip

    inputs = [_as_moved(tensor) for tensor in tensors]
    return submit(found, kind="allgather", name=name, inputs=inputs, outputs=[], finish=in_dtypes,
                  set_id=process_set.process_set_id)  # fmt: skip


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Concatenates the ranks' tensors along the first dimension, in which they may differ, in rank order."""
    found, _ = member_of(process_set)
    check_tensor("allgather", tensor, MOVED)
    return _gather(found, [tensor], _name(name, "allgather", process_set), lambda outputs: outputs[0], process_set)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Gathers several tensors as one operation, with one handle and a list as its result."""
    found, _ = member_of(process_set)
    inputs = check_group("allgather", tensors, MOVED)
    return _gather(found, inputs, _group_name(name, "allgather", process_set), list, process_set)


def _broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, in_place: bool
) -> int:
    found, _ = member_of(process_set)
    check_tensor("broadcast", tensor, MOVED)
    output = tensor if in_place else _empty_like(tensor)
    return submit(
        found,
        kind="broadcast",
        name=_name(name, "broadcast", process_set),
        inputs=[_as_moved(tensor)],
        outputs=[_as_moved(output)],
        finish=lambda _: output,
        written=[output] if in_place else [],
        root=root_in_set(process_set, root_rank),
        set_id=process_set.process_set_id,
    )


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Copies the root's tensor into a new one on every rank. `root_rank`: a rank of the job, also in a process set."""
    return _broadcast(tensor, root_rank, name, process_set, in_place=False)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Like broadcast_async(), in place."""
    return _broadcast(tensor, root_rank, name, process_set, in_place=True)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Sends splits[r] rows of `tensor` to rank r of the set, in rank order; rows beyond their sum are not sent. Where
    `splits` are wrong, this rank gets a ValueError, and the others a HorovodInternalError.

    The result is a pair: the received rows in rank order, and how many came from each rank, int32 of shape (ranks of
    the set,), on the device of `splits`."""
    found, _ = member_of(process_set)
    check_tensor("alltoall", tensor, MOVED)
    check_has_rows("alltoall", tensor)
    name = _name(name, "alltoall", process_set)
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
    return submit(found, kind="alltoall", name=name, inputs=[rows], outputs=[],
                  finish=finish, splits=parsed, set_id=process_set.process_set_id)  # fmt: skip


def _scatter(
    found: World,
    tensors: list[torch.Tensor],
    name: str,
    finish: Callable[[Any], Any],
    op: int,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
) -> int:
    check_scattered_op(op)
    for tensor in tensors:
        check_has_rows("reducescatter", tensor)
    return submit(found, kind="reducescatter", name=name, inputs=tensors, outputs=[], finish=finish, op=op,
                  prescale=prescale_factor, postscale=postscale_factor, set_id=process_set.process_set_id)  # fmt: skip


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Sums tensors of one shape; each rank keeps its share of the rows. The first `rows % ranks` ranks get one more."""
    found, _ = member_of(process_set)
    check_tensor("reducescatter", tensor, REDUCED)
    return _scatter(found, [tensor], _name(name, "reducescatter", process_set), _one, op, process_set,
                    prescale_factor, postscale_factor)  # fmt: skip


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Scatters several sums as one operation, with one handle and a list as its result."""
    found, _ = member_of(process_set)
    inputs = check_group("reducescatter", tensors, REDUCED)
    return _scatter(found, inputs, _group_name(name, "reducescatter", process_set), _many, op, process_set,
                    prescale_factor, postscale_factor)  # fmt: skip
