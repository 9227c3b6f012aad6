"""The collectives that wait for their result. Those that return a new tensor can be differentiated; see operations.py.

Common arguments, of these functions and of those in async_ops.py:

    tensor, tensors: dense and contiguous, on cpu or cuda, of the same shape, dtype and device type on every rank unless
        said otherwise. Sums, averages and so on are of int32, int64, float16, bfloat16, float32 or float64; other
        collectives also take uint8, int8, int16 and bool. A grouped function takes a list of at least one tensor, of
        any such shapes and dtypes, on one device.
    name: the operation's name, the same on every rank, and not that of one under way. None: operations of a kind are
        counted for each process set, and all its ranks call those without a name in the same order.
    op: Average, which is the default, Sum, Min, Max or Product. Averages of whole numbers are truncated.
    average: Horovod's older spelling: True is op=Average, False is op=Sum. Not together with op.
    prescale_factor, postscale_factor: multiply each tensor before, and the result after (1.0).
    compression: how the tensors travel; see compression.py (Compression.none: as they are).
    process_set: the ranks that take part, of which this process is one (global_process_set: all).

Common errors:

    ValueError: hvd.init() has not been called; an argument is not possible; this rank is not in `process_set`; an
        operation of this name is under way.
    TypeError: `compression` is none.
    HorovodInternalError: the ranks do not agree on the operation: the text names both ranks and both values, and the
        next operation works. Or a rank was lost or has called hvd.shutdown(): every later operation fails, too.
"""

from collections.abc import Sequence
from typing import Any

import torch

from fusedcomm.horovod.checks import REDUCED, Average, check_group, parse_op
from fusedcomm.horovod.compression import Compression, check_compression, wire_of
from fusedcomm.horovod.handles import joined, submit, synchronize
from fusedcomm.horovod.operations import Call, finished, run
from fusedcomm.horovod.order import Request
from fusedcomm.horovod.process_sets import ProcessSet, global_process_set, member_of
from fusedcomm.horovod.signature import NO_NAME, Signature
from fusedcomm.horovod.step_reducer import join_all
from fusedcomm.horovod.world import world

Tensors = Sequence[torch.Tensor]


def _call(
    kind: str,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    is_group: bool = False,
) -> Call:
    """A reduction."""
    how = dict(op=op, prescale=prescale_factor, postscale=postscale_factor)
    return Call(kind, name, process_set, how, is_group)


def _carried(call: Call, tensors: Tensors, compression: Any) -> list[torch.Tensor]:
    """The results of a reduction, compressed on its way."""
    check_compression(compression)
    if call.kind == "allreduce" and (wire := wire_of(compression, tensors[0])):
        compression, call = Compression.none, call._replace(how={**call.how, "wire": wire})  # the engine encodes
    pairs = [compression.compress(tensor) for tensor in tensors]
    sent = [each for each, _ in pairs]
    reduced = run(call, sent if call.is_group else sent[0])
    reduced = reduced if call.is_group else [reduced]
    return [compression.decompress(each, context) for each, (_, context) in zip(reduced, pairs, strict=True)]


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
    """Reduces the ranks' tensors into a new one, the same on every rank: with op=None the average.

    Arguments and errors: see this module."""
    call = _call("allreduce", name, parse_op(op, average), prescale_factor, postscale_factor, process_set)
    return _carried(call, [tensor], compression)[0]


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As allreduce(), in place, without compression and derivative. Returns `tensor`."""
    call = _call("allreduce", name, parse_op(op, average), prescale_factor, postscale_factor, process_set)
    return finished(call, tensor, in_place=True)


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
    """As allreduce(), of several tensors as one operation: none is reduced before every rank has submitted all."""
    call = _call(
        "allreduce", name, parse_op(op, average), prescale_factor, postscale_factor, process_set, is_group=True
    )
    return _carried(call, check_group("allreduce", tensors, REDUCED), compression)


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """As grouped_allreduce(), in place, without compression and derivative. Returns the list of `tensors`."""
    call = _call(
        "allreduce", name, parse_op(op, average), prescale_factor, postscale_factor, process_set, is_group=True
    )
    return finished(call, tensors, in_place=True)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenates the ranks' tensors of shape (rows, …) along the first dimension, in rank order. `rows` may differ
    from rank to rank, and be 0. Arguments and errors: see this module."""
    return run(Call("allgather", name, process_set, {}), tensor)


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """As allgather(), of several tensors as one operation."""
    return list(run(Call("allgather", name, process_set, {}, is_group=True), tensors))


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Copies the root's tensor into a new one on every rank. `root_rank`: a rank of the job, also in a process set.
    Other arguments and errors: see this module."""
    return run(Call("broadcast", name, process_set, dict(root_rank=root_rank)), tensor)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """As broadcast(), in place, without derivative. Returns `tensor`."""
    return finished(Call("broadcast", name, process_set, dict(root_rank=root_rank)), tensor, in_place=True)


def alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends the next splits[r] rows of `tensor`, of shape (rows, …), to rank r of the set. Rows beyond their sum are
    not sent. splits: a list, or int32 or int64 of shape (ranks of the set,); None: as many rows to each.

    Returns the received rows in rank order; if `splits` are given, as a pair with how many came from each rank, int32
    of shape (ranks of the set,). Other arguments and errors: see this module."""
    output, received = run(Call("alltoall", name, process_set, dict(splits=splits)), tensor)
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
    """Averages or sums tensors of shape (rows, …); each rank keeps its share of the rows. The first `rows % ranks`
    ranks get one more. Arguments: see this module; `op` is Average or Sum, and compression only casts. Errors: see this
    module; HorovodInternalError also for another op."""
    call = _call("reducescatter", name, op, prescale_factor, postscale_factor, process_set)
    return _carried(call, [tensor], compression)[0]


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """As reducescatter(), of several tensors as one operation."""
    call = _call("reducescatter", name, op, prescale_factor, postscale_factor, process_set, is_group=True)
    return _carried(call, tensors, compression)


def join(device: int = -1) -> int:
    """Tells the others that this rank has no more data, and waits until every rank has joined. Until then this rank
    adds nothing to the others' allreduces; Average divides by all ranks still. Returns the rank that joined last, the
    same on every rank. `device` is accepted for Horovod's sake and has no effect.

    Raises ValueError before hvd.init(), and HorovodInternalError if a rank is lost or shuts down."""
    found = world()
    request = Request(0, Signature("join", NO_NAME), finish=lambda request: request.number)
    handle = submit(found, request, at_once=True)
    join_all()
    number = synchronize(handle)
    joined()
    return number


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank of the set has called it. Operations under way do not hold it up.

    Raises ValueError before hvd.init() and outside of the set, HorovodInternalError if a rank is lost or shuts down."""
    found, _ = member_of(process_set)
    request = Request(process_set.process_set_id or 0, Signature("barrier", NO_NAME))
    synchronize(submit(found, request, at_once=True))
