"""What every operation has in common, and the table of what each has of its own: the call at its turn, checks, and a
derivative.

Derivatives are Horovod's, whose convention a model's results depend on. An allreduce's gradient is reduced like its
tensor. Gradients of allgather and broadcast are averaged over the ranks, as the loss is taken to be. A reducescatter's
gradient is gathered, times what the sum was scaled by.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

import fusedcomm.horovod.calls as calls
from fusedcomm.horovod.calls import Bucket, Members, Rows
from fusedcomm.horovod.checks import (
    MOVED,
    REDUCED,
    Average,
    Sum,
    check_group,
    check_scattered_op,
    check_tensor,
    parse_splits,
)
from fusedcomm.horovod.order import Request, synchronize
from fusedcomm.horovod.process_sets import ProcessSet, member_of, root_in_set
from fusedcomm.horovod.signature import Signature, described

Tensors = Sequence[torch.Tensor]


Result = TypeVar("Result")
SMALL_NBYTES = 1 << 10
"""Plain sums on the CPU up to this size may be small; see order.SmallSum."""


@dataclasses.dataclass
class Call(Generic[Result]):
    """A collective with its arguments. `given`: a tensor, or a list of them if it is a group, which is one operation.
    `how`: op, prescale, postscale, root_rank and splits, as far as the kind has them. `compression`: what
    ops.py compresses it with; None: nothing. `name`: None until told_to_others() gives it one."""

    kind: str
    given: Any
    name: str | None
    process_set: ProcessSet
    how: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_group: bool = False
    compression: Any = None

    @property
    def told_name(self) -> str:
        """Its name among the ranks, once it has one: names of groups are kept apart from those of single tensors."""
        assert self.name is not None
        return f"grouped.{self.name}" if self.is_group else self.name


class Kind(NamedTuple):
    """`call`: what begins it, see calls.py. `dtypes`: that it takes. `has_rows`: whether it deals with rows, the first
    dimension. `has_output`: whether outputs have the inputs' shapes. `backward`: the gradients of the tensors, from
    those of the results."""

    call: Callable[[Members, Signature, Rows, list[Request]], Bucket]
    dtypes: frozenset[torch.dtype]
    has_rows: bool
    has_output: bool
    backward: Callable[[Any, Tensors], Tensors]


@torch.no_grad()
def start(by_set: dict[int, Members], set_id: int, rows: Rows, requests: list[Request]) -> Bucket:
    """Begins the operations of a bucket, at its turn. On an accelerator all of their work is then enqueued."""
    members, signature = by_set[set_id], requests[0].signature
    with members.on_stream(signature.device) as stream:
        for request in requests:
            if not request.inputs:
                request.inputs = request.outputs = calls.neutral(request.signature, members.device)
            elif request.event is not None:
                request.event.wait(stream)
        bucket = KINDS[signature.kind].call(members, signature, rows, requests)
        if stream is not None:
            bucket.write_all()
    return bucket


@contextlib.contextmanager
def told_to_others(call: Call[Any]) -> Iterator[None]:
    """Names the operation. What is raised within is told to the ranks that submit it, which would wait for this one:
    they get it as a HorovodInternalError. Raises what member_of() raises."""
    (found, _), set_id = member_of(call.process_set), call.process_set.process_set_id or 0
    if call.name is None:
        call.name = found.order.next_name(set_id, f"grouped {call.kind}" if call.is_group else call.kind)
    try:
        yield
    except Exception as error:
        found.order.refuse(set_id, call.kind, call.told_name, str(error))
        raise


def checked(call: Call[Any]) -> list[torch.Tensor]:
    """The tensors that it was given. Raises what check_tensor() and check_group() do."""
    about = call.kind, call.given, KINDS[call.kind].dtypes, KINDS[call.kind].has_rows
    return check_group(*about) if call.is_group else [check_tensor(*about)]


def begin(call: Call[Any], *, in_place: bool = False, at_once: bool = False) -> Request:
    """Submits an operation; autograd does not see it. Returns its handle. at_once: the caller is about to wait for
    it."""
    found, _ = member_of(call.process_set)
    given, about, how, set_id = call.given, KINDS[call.kind], call.how, call.process_set.process_set_id or 0
    members, rows, root = found.members[set_id], (), 0
    with told_to_others(call):
        tensors = checked(call)
        if "root_rank" in how:
            root = root_in_set(call.process_set, how["root_rank"])
        if call.kind == "reducescatter":
            check_scattered_op(how["op"])
        members.check(tensors[0].device)
        if call.kind == "alltoall":
            rows = tuple(parse_splits(how["splits"], given.shape[0], members.size))
        elif call.kind == "allgather":
            rows = tuple([tensor.shape[0] for tensor in tensors])
    outputs: list[torch.Tensor] = []
    if about.has_output:
        outputs = tensors if in_place else [_empty_like(tensor) for tensor in tensors]
    inputs = _as_moved(tensors)
    if call.kind == "alltoall":
        inputs = [inputs[0][: sum(rows)]]
    factors, device = (how.get("prescale", 1.0), how.get("postscale", 1.0)), inputs[0].device.type
    about_inputs = described(call.kind, inputs)
    signature = Signature(call.kind, call.told_name, how.get("op", Sum), *factors, root, device, about_inputs)

    def finish(request: Request) -> Any:
        if in_place:
            for output in outputs:
                torch.autograd.graph.increment_version(output)
        results = outputs or [
            out.view(torch.bool) if tensor.dtype is torch.bool else out
            for out, tensor in zip(request.outputs, tensors, strict=False)
        ]
        if call.kind == "alltoall":
            splits, received = how["splits"], request.outputs[1]
            return results[0], received.to(splits.device) if isinstance(splits, torch.Tensor) else received
        return results if call.is_group else results[0]

    moved = inputs if in_place else _as_moved(outputs)
    small = None
    if at_once and _may_be_small(signature):
        small = calls.small_sum(signature, inputs, moved, members.size)
    return found.order.submit(Request(set_id, signature, inputs, moved, rows, finish=finish, small=small), at_once)


@functools.lru_cache(1 << 10)
def _may_be_small(signature: Signature) -> bool:
    return signature.fuses() is not None and signature.device == "cpu" and 0 < signature.nbytes() <= SMALL_NBYTES


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)


def _as_moved(tensors: Tensors) -> list[torch.Tensor]:
    """The tensors as those that backends can move: bools as bytes, in the same memory."""
    return [each.detach().view(torch.uint8) if each.dtype is torch.bool else each for each in tensors]


def finished(call: Call[Result], *, in_place: bool = False) -> Result:
    """Waits for the result; without a derivative."""
    return synchronize(begin(call, in_place=in_place, at_once=True))


def run(call: Call[Result]) -> Result:
    """Waits for the result, which autograd can differentiate."""
    tensors = call.given if isinstance(call.given, (list, tuple)) else [call.given]
    if torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in tensors):
        results: Any = _Differentiable.apply(dataclasses.replace(call, given=None), *tensors)
        if call.is_group:
            return list(results)
        return results if call.kind == "alltoall" else results[0]
    return finished(call)


class _Differentiable(torch.autograd.Function):
    """An operation. Errors of both passes: those of the operations."""

    @staticmethod
    def forward(ctx: Any, call: Call[Any], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The results, new ones."""
        results = finished(dataclasses.replace(call, given=list(tensors) if call.is_group else tensors[0]))
        ctx.call, ctx.num_rows = call, [each.shape[0] if each.dim() else 0 for each in tensors]
        if call.kind == "alltoall":
            ctx.received = results[1].tolist()
            ctx.mark_non_differentiable(results[1])
        return tuple(results) if isinstance(results, (list, tuple)) else (results,)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        """A gradient for each tensor."""
        contiguous = [None if grad is None else grad.contiguous() for grad in grads]
        return None, *KINDS[ctx.call.kind].backward(ctx, contiguous)


def _unnamed(ctx: Any, kind: str, given: Any, **how: Any) -> Call[Any]:
    """An operation over the ranks of the forward pass's."""
    return Call(kind, given, None, ctx.call.process_set, how)


def _together(calls: Sequence[Call[Any]]) -> list[Any]:
    handles = [begin(call) for call in calls]
    return [synchronize(handle) for handle in handles]


def _averages(ctx: Any, grads: Tensors) -> list[torch.Tensor]:
    return _together([_unnamed(ctx, "allreduce", grad, op=Average) for grad in grads])


def _of_allreduce(ctx: Any, grads: Tensors) -> Tensors:
    found = finished(dataclasses.replace(ctx.call, name=None, given=grads if ctx.call.is_group else grads[0]))
    return found if ctx.call.is_group else [found]


def _of_allgather(ctx: Any, grads: Tensors) -> Tensors:
    """The averages, narrowed to the rows that this rank gave."""
    _, rank = member_of(ctx.call.process_set)
    own = torch.tensor([ctx.num_rows], dtype=torch.int64)
    begins = finished(_unnamed(ctx, "allgather", own))[:rank].sum(0).tolist()
    narrowed = zip(_averages(ctx, grads), begins, ctx.num_rows, strict=True)
    return [average.narrow(0, begin, rows) for average, begin, rows in narrowed]


def _of_broadcast(ctx: Any, grads: Tensors) -> Tensors:
    """The average on the root, zeros on other ranks."""
    found, (average,) = member_of(ctx.call.process_set)[0], _averages(ctx, grads)
    return [average if found.rank == ctx.call.how["root_rank"] else average.zero_()]


def _of_alltoall(ctx: Any, grads: Tensors) -> Tensors:
    """The gradient of the rows that this rank sent, and zeros for rows that were not sent."""
    own, _ = finished(_unnamed(ctx, "alltoall", grads[0], splits=ctx.received))
    if own.shape[0] < ctx.num_rows[0]:
        own = torch.cat([own, own.new_zeros(ctx.num_rows[0] - own.shape[0], *own.shape[1:])])
    return [own]


def _of_reducescatter(ctx: Any, grads: Tensors) -> Tensors:
    """The gathered gradients, of the given tensors' shapes."""
    how = ctx.call.how
    factor = how["prescale"] * how["postscale"] * (len(ctx.call.process_set.ranks) if how["op"] == Sum else 1)
    scaled = [grad * factor if factor != 1 else grad for grad in grads]
    return _together([_unnamed(ctx, "allgather", grad) for grad in scaled])


KINDS = {
    "allreduce": Kind(calls.allreduce, REDUCED, False, True, _of_allreduce),
    "allgather": Kind(calls.allgather, MOVED, True, False, _of_allgather),
    "broadcast": Kind(calls.broadcast, MOVED, False, True, _of_broadcast),
    "alltoall": Kind(calls.alltoall, MOVED, True, False, _of_alltoall),
    "reducescatter": Kind(calls.reducescatter, REDUCED, True, False, _of_reducescatter),
    "barrier": Kind(calls.barrier, frozenset(), False, False, lambda ctx, grads: []),
}
