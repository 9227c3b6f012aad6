"""The order in which this rank issues its operations, and the wait for their results.

_C.Order has the agreement between the ranks (csrc/frontends/horovod/order.h). operations.py has what is begun at an
operation's turn.
"""

import functools
import itertools
import json
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fusedcomm.horovod.environment import Settings
from fusedcomm.horovod.errors import HorovodInternalError
from fusedcomm.horovod.signature import NO_NAME, Signature, mismatch
from fusedcomm.log import LOGGER
from fusedcomm.native import _C

MAX_KNOWN = 1 << 16
SMALL_NBYTES = 1 << 10
"""Plain sums on the CPU up to this size that every rank waits for travel with the messages about them: a call of a
backend takes longer."""


class Request:
    """An operation that this rank has submitted, or takes part in without (after a join).

    `rows`: what may differ between ranks: the rows of each tensor (allgather), or to each rank of the set (alltoall).
    `problem`: why this rank cannot take part; empty: it can. `finish`: makes what the caller gets from the request.
    `event`: behind what the caller has enqueued for its tensors; None on the CPU. `bucket`: once it is issued; None for
    a barrier and a small sum. `number`: of a join, the rank that joined last. `is_seen_done`: the caller knows that it
    has ended.
    """

    __slots__ = ("bucket", "event", "finish", "index", "inputs", "is_seen_done", "issued_s", "number", "outputs",
                 "problem", "rows", "set_id", "signature", "submitted_s", "ticket")  # fmt: skip

    def __init__(
        self,
        set_id: int,
        signature: Signature,
        inputs: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] = (),
        rows: Sequence[int] = (),
        problem: str = "",
        finish: "Callable[[Request], Any]" = lambda _: None,
    ) -> None:
        self.set_id, self.signature, self.inputs, self.outputs = set_id, signature, inputs, outputs
        self.rows, self.problem, self.finish, self.is_seen_done = rows, problem, finish, False
        self.event: torch.Event | None = None
        self.bucket: Any = None
        self.index = self.number = 0
        self.ticket = -1
        self.submitted_s = self.issued_s = time.perf_counter()

    @property
    def results(self) -> list[torch.Tensor]:
        """What the operation has made, once it has ended."""
        return self.bucket.outputs[self.index]


class Watcher(Protocol):
    """Is told of operations; see timeline.py."""

    def issued(self, requests: list[Request]) -> None:
        """These are issued together, at this moment."""

    def ended(self, requests: list[Request]) -> None:
        """The results of these are there."""


Said = tuple[str, int, Sequence[int]]
"""What a rank has submitted: its signature as JSON, the rank, and its rows."""
Start = Callable[[int, Sequence[Sequence[int]], list[Request]], Any]
"""Begins a bucket of a set on this rank: (set, rows of each member, requests) -> a calls.Bucket."""


class Order:
    """Every rank of the job makes one.

    Args:
        sets: the ranks of each process set.
        control: a gloo backend over the ranks that nothing else uses; None with one rank.
        start: begins all other operations, on one thread at a time, in the same order on all members of a set.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        sets: list[list[int]],
        control: dist.Backend | None,
        settings: Settings,
        start: Start,
    ) -> None:
        self._start = start
        self._tickets = itertools.count()
        self._requests: dict[int, Request] = {}
        self._known: dict[Signature, _C.AgreedOperation] = {}
        self._watcher: Watcher | None = None
        self._native = _C.Order(
            rank=rank,
            size=size,
            sets=sets,
            control=control,
            fusion_nbytes=settings.fusion_nbytes,
            stall_warning_s=settings.stall_warning_s,
            stall_shutdown_s=settings.stall_shutdown_s,
            start=_weakly(self._begin),
            mismatch=_mismatch,
            say=LOGGER.warning,
        )

    @property
    def failure(self) -> str:
        """Why nothing more is issued; empty: it goes on."""
        return self._native.failure

    def submit(self, request: Request, at_once: bool) -> None:
        """at_once: the caller is about to wait for it. Raises ValueError if an operation of its name is under way,
        HorovodInternalError after a failure."""
        signature = request.signature
        if signature.device != "cpu":
            request.event = torch.Event(request.inputs[0].device)
            request.event.record()
        operation = self._known.get(signature) or self._operation(signature)
        ticket = request.ticket = next(self._tickets)
        self._requests[ticket] = request
        try:
            self._native.submit(
                ticket,
                request.set_id,
                operation,
                request.rows,
                request.problem,
                request.inputs,
                request.outputs,
                at_once,
            )
        except (ValueError, RuntimeError) as error:
            del self._requests[ticket]
            if isinstance(error, ValueError):
                raise
            raise HorovodInternalError(str(error)) from error

    def _operation(self, signature: Signature) -> "_C.AgreedOperation":
        if len(self._known) == MAX_KNOWN:
            self._known.clear()
        kind, fuses, nbytes = signature.kind, signature.fuses(), signature.nbytes()
        operation = self._known[signature] = _C.AgreedOperation(
            key=signature.key,
            signature=json.dumps(signature),
            fuses="" if fuses is None else json.dumps(fuses),
            nbytes=nbytes,
            has_number=not (signature.has_rows or signature.name.startswith(NO_NAME)),
            may_lack_joined=kind == "allreduce",
            is_call=kind not in ("barrier", "join"),
            is_join=kind == "join",
            may_be_small=fuses is not None
            and signature.device == "cpu"
            and not signature.is_carried
            and 0 < nbytes <= SMALL_NBYTES,
            op=signature.op,
            prescale=signature.prescale,
            postscale=signature.postscale,
        )
        return operation

    def _begin(
        self, set_id: int, tickets: Sequence[int], signatures: Sequence[str], rows: Sequence[Sequence[int]]
    ) -> list[torch.futures.Future]:
        """At the turn of a bucket. Returns what is under way."""
        requests = [
            self._requests[ticket] if ticket >= 0 else Request(set_id, _read(signature))
            for ticket, signature in zip(tickets, signatures, strict=True)
        ]
        bucket = self._start(set_id, rows, requests)
        for index, request in enumerate(requests):
            request.bucket, request.index = bucket, index
        if (watcher := self._watcher) is not None:
            watcher.issued(requests)
            ended = functools.partial(watcher.ended, requests)
            bucket.futures[-1].add_done_callback(lambda _: ended()) if bucket.futures else ended()
        return bucket.futures

    def poll(self, request: Request) -> bool:
        """Whether wait() would return at once."""
        return self._native.poll(request.ticket)

    def wait(self, request: Request) -> Any:
        """Returns what the request's `finish` makes of it, when its outputs are written. Raises
        HorovodInternalError."""
        failure, request.number = self._native.wait(request.ticket)
        del self._requests[request.ticket]
        if failure:
            raise HorovodInternalError(failure)
        if request.bucket is not None:
            try:
                request.bucket.finish()
            except RuntimeError as error:
                raise HorovodInternalError(f"fusedcomm: {request.signature.key} failed: {error}") from error
        elif (watcher := self._watcher) is not None and request.signature.tensors:  # a small sum
            watcher.issued([request])
            watcher.ended([request])
        return request.finish(request)

    def watch(self, watcher: Watcher | None) -> None:
        """Tells the watcher of all operations from now on. None: tells nobody."""
        self._watcher = watcher

    def fail(self, why: str) -> None:
        """This rank's requests fail, and later ones. The other ranks are not told."""
        self._native.fail(why)

    def shutdown(self) -> bool:
        """Every rank's requests fail from then on. Returns whether all that was under way has ended. Idempotent."""
        return self._native.shutdown()


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, for the native object that its own object keeps: neither must keep the other alive."""
    found = weakref.WeakMethod(method)
    return lambda *args: found()(*args)  # type: ignore[misc]


def _mismatch(a: Said, b: Said) -> str:
    (one, rank, rows), (other, other_rank, other_rows) = a, b
    return mismatch(_read(one).with_rows(rows), rank, _read(other).with_rows(other_rows), other_rank)


def _read(signature: str) -> Signature:
    return Signature.read(json.loads(signature))
