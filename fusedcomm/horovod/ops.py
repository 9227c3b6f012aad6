"""The collectives. Each is described once, and its description makes its forms: with _async in their names those that
return a handle at once, for hvd.poll() and hvd.synchronize(), with _ at the end those in place. Forms that wait and
return a new tensor can be differentiated; see operations.py. Tensors given with a handle must not change, and those of
a form in place must not be read, until it is synchronized.

Arguments that they have in common:

    tensor, tensors: dense and contiguous, on cpu or cuda, of the same shape, dtype and device type on every rank unless
        said otherwise. Sums, averages and so on are of int32, int64, float16, bfloat16, float32 or float64; other
        collectives also take uint8, int8, int16 and bool. A grouped function takes a list of at least one tensor, of
        any such shapes and dtypes, on one device, as one operation: none begins before every rank has submitted all.
        Its result is a list.
    name: the operation's name, the same on every rank, and not that of one under way. None: operations of a kind are
        counted for each process set, and all its ranks call those without a name in the same order.
    op: Average, which is the default, Sum, Min, Max or Product. Averages of whole numbers are truncated.
    average: Horovod's older spelling: True is op=Average, False is op=Sum. Not together with op.
    prescale_factor, postscale_factor: multiply each tensor before, and the result after (1.0).
    compression: how the tensors travel; see compression.py (Compression.none: as they are).
    process_set: the ranks that take part, of which this process is one (global_process_set: all).

Errors that all have:

    ValueError: hvd.init() has not been called; an argument is not possible; this rank is not in `process_set`; an
        operation of this name is under way.
    TypeError: `compression` is none.
    HorovodInternalError: the ranks do not agree on the operation: the text names both ranks and both values, and the
        next operation works. Or another rank cannot take part: the text has what its call has raised. That was its
        call of this name: every rank calls again, or none. Or a rank was lost or has called hvd.shutdown(): every later
        operation fails, too.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, get_args

import torch

from fusedcomm.horovod.checks import Average, parse_op
from fusedcomm.horovod.compression import Compression, check_compression
from fusedcomm.horovod.operations import Call, Result, begin, checked, finished, run, told_to_others
from fusedcomm.horovod.order import Request, synchronize
from fusedcomm.horovod.process_sets import ProcessSet, global_process_set, member_of
from fusedcomm.horovod.signature import NO_NAME, Signature
from fusedcomm.horovod.step_reducer import join_all
from fusedcomm.horovod.world import world

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned", covariant=True)
Tensors = Sequence[torch.Tensor]


# ---- the forms of a collective


class Grouped(Protocol[Arguments, Returned]):
    """A function of several tensors instead of one."""

    def __call__(self, tensors: Tensors, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned: ...


def _grouped(
    described: Callable[Concatenate[torch.Tensor, Arguments], Call[torch.Tensor]],
) -> Grouped[Arguments, Call[list[torch.Tensor]]]:
    """The description of the same collective with a list of tensors."""

    def call(tensors: Tensors, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Call[list[torch.Tensor]]:
        asked: Any = cast(Any, described)(tensors, *args, **kwargs)
        asked.is_group = True
        return asked

    _told(call, "", described, Call[list[torch.Tensor]], "Of several tensors, as one operation.")
    first, *others = inspect.signature(described).parameters.values()
    parameters = [first.replace(name="tensors", annotation=Tensors), *others]
    call.__signature__ = call.__signature__.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call


def _waits(
    name: str, described: Callable[Arguments, Call[Result]], in_place: bool = False
) -> Callable[Arguments, Result]:
    """The form that waits for its result."""

    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        asked = described(*args, **kwargs)
        return finished(asked, in_place=True) if in_place else _carried(asked)

    (result,) = get_args(inspect.signature(described).return_annotation)
    return _told(call, name, described, result, "In place, without a derivative: returns what was given." * in_place)


def _begins(
    name: str, described: Callable[Arguments, Call[Any]], in_place: bool = False
) -> Callable[Arguments, Request]:
    """The form that returns a handle."""

    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Request:
        return begin(described(*args, **kwargs), in_place=in_place)

    result = "what was given, in place" if in_place else "new"
    return _told(
        call, name, described, Request, f"Returns a handle. The result is {result}, and autograd does not see it."
    )


def _told(call: Any, name: str, described: Callable[..., Any], result: Any, more: str) -> Any:
    """The function, with what help() shows."""
    call.__name__ = call.__qualname__ = name
    call.__doc__ = "\n\n    ".join(
        filter(None, [described.__doc__, more, name and "Arguments and errors: see ops.py."])
    )
    call.__signature__ = inspect.signature(described).replace(return_annotation=result)
    return call


def _carried(call: Call[Any]) -> Any:
    """The result, compressed on its way."""
    compression = call.compression
    if compression is None:
        return run(call)
    with told_to_others(call):
        pairs = [compression.compress(tensor) for tensor in checked(call)]
    sent = [each for each, _ in pairs]
    call.given = sent if call.is_group else sent[0]
    reduced = run(call) if call.is_group else [run(call)]
    results = [compression.decompress(each, context) for each, (_, context) in zip(reduced, pairs, strict=True)]
    return results if call.is_group else results[0]


# ---- reductions


def _allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Call[torch.Tensor]:
    """Reduces the ranks' tensors, with the same result on every rank: with op=None the average."""
    how = dict(op=parse_op(op, average), prescale=prescale_factor, postscale=postscale_factor)
    return Call("allreduce", tensor, name, process_set, how)


def _compressed_allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Call[torch.Tensor]:
    """Reduces the ranks' tensors into a new one, the same on every rank: with op=None the average."""
    call = _allreduce(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    call.compression = check_compression(compression)
    return call


allreduce = _waits("allreduce", _compressed_allreduce)
allreduce_ = _waits("allreduce_", _allreduce, in_place=True)
allreduce_async = _begins("allreduce_async", _allreduce)
allreduce_async_ = _begins("allreduce_async_", _allreduce, in_place=True)
grouped_allreduce = _waits("grouped_allreduce", _grouped(_compressed_allreduce))
grouped_allreduce_ = _waits("grouped_allreduce_", _grouped(_allreduce), in_place=True)
grouped_allreduce_async = _begins("grouped_allreduce_async", _grouped(_allreduce))
grouped_allreduce_async_ = _begins("grouped_allreduce_async_", _grouped(_allreduce), in_place=True)


def _reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Call[torch.Tensor]:
    """Averages or sums tensors of shape (rows, …); each rank keeps its share of the rows. The first `rows % ranks`
    ranks get one more. Raises HorovodInternalError for an op that is neither Average nor Sum."""
    how = dict(op=op, prescale=prescale_factor, postscale=postscale_factor)
    return Call("reducescatter", tensor, name, process_set, how)


def _compressed_reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Call[torch.Tensor]:
    """Averages or sums tensors of shape (rows, …); each rank keeps its share of the rows, as of reducescatter_async().
    `compression` only casts."""
    call = _reducescatter(tensor, name, op, process_set, prescale_factor, postscale_factor)
    call.compression = check_compression(compression)
    return call


reducescatter = _waits("reducescatter", _compressed_reducescatter)
reducescatter_async = _begins("reducescatter_async", _reducescatter)
grouped_reducescatter = _waits("grouped_reducescatter", _grouped(_compressed_reducescatter))
grouped_reducescatter_async = _begins("grouped_reducescatter_async", _grouped(_reducescatter))


# ---- moves


def _allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Call[torch.Tensor]:
    """Concatenates the ranks' tensors of shape (rows, …) along the first dimension, in rank order. `rows` may differ
    from rank to rank, and be 0."""
    return Call("allgather", tensor, name, process_set)


allgather, allgather_async = _waits("allgather", _allgather), _begins("allgather_async", _allgather)
grouped_allgather = _waits("grouped_allgather", _grouped(_allgather))
grouped_allgather_async = _begins("grouped_allgather_async", _grouped(_allgather))


def _broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Call[torch.Tensor]:
    """Copies the root's tensor to every rank. `root_rank`: a rank of the job, also in a process set."""
    return Call("broadcast", tensor, name, process_set, dict(root_rank=root_rank))


broadcast, broadcast_ = _waits("broadcast", _broadcast), _waits("broadcast_", _broadcast, in_place=True)
broadcast_async = _begins("broadcast_async", _broadcast)
broadcast_async_ = _begins("broadcast_async_", _broadcast, in_place=True)


def _alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Call[tuple[torch.Tensor, torch.Tensor]]:
    """Sends the next splits[r] rows of `tensor`, of shape (rows, …), to rank r of the set. Rows beyond their sum are
    not sent. splits: a list, or int32 or int64 of shape (ranks of the set,); None: as many rows to each.

    The result is a pair, also without `splits`: the received rows in rank order, and how many came from each rank,
    int32 of shape (ranks of the set,), on the device of `splits`."""
    return Call("alltoall", tensor, name, process_set, dict(splits=splits))


alltoall_async = _begins("alltoall_async", _alltoall)


def alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As alltoall_async(), but waits for the result, which without `splits` is the received rows alone."""
    output, received = run(_alltoall(tensor, splits, name, process_set))
    return output if splits is None else (output, received)


# ---- waits


def join(device: int = -1) -> int:
    """Tells the others that this rank has no more data, and waits until every rank has joined. Until then this rank
    adds nothing to the others' allreduces; Average divides by all ranks still. Returns the rank that joined last, the
    same on every rank. `device` is accepted for Horovod's sake and has no effect.

    Raises ValueError before hvd.init(), and HorovodInternalError if a rank is lost or shuts down."""
    found = world()
    request = Request(0, Signature("join", NO_NAME), finish=lambda request: request.number)
    handle = found.order.submit(request, at_once=True)
    join_all()
    number = synchronize(handle)
    found.order.joined()
    return number


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank of the set has called it. Operations under way do not hold it up.

    Raises ValueError before hvd.init() and outside of the set, HorovodInternalError if a rank is lost or shuts down."""
    found, _ = member_of(process_set)
    request = Request(process_set.process_set_id or 0, Signature("barrier", NO_NAME))
    synchronize(found.order.submit(request, at_once=True))
