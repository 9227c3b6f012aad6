"""The order in which this rank issues its operations, and the wait for their results.

_C.Order has the agreement between the ranks (csrc/frontends/horovod/order.h). calls.py has what is begun at an
operation's turn.
"""

import contextlib
import functools
import itertools
import json
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

import fusedcomm.horovod.calls as calls
from fusedcomm.horovod.environment import Settings
from fusedcomm.horovod.errors import HorovodInternalError
from fusedcomm.horovod.signature import NO_NAME, Signature, mismatch
from fusedcomm.log import LOGGER
from fusedcomm.native import _C

GRACE_S = 5.0
"""Seconds after a failure in which what is under way may still end."""
EXPLANATION_S = 3.0
"""Seconds that an operation which has failed waits for rank 0's word about who is lost."""
SLICE_S = 1.0
"""A wait looks this often, in seconds, whether the job has failed meanwhile."""
MAX_KNOWN = 1 << 16
SMALL_NBYTES = 1 << 10
"""Plain sums on the CPU up to this size travel with the messages about them: a call of a backend takes longer."""


class Request:
    """An operation that this rank has submitted, or takes part in without (after a join).

    `rows`: what may differ between ranks: the rows of each tensor (allgather), or to each rank of the set (alltoall).
    `problem`: why this rank cannot take part; empty: it can. `event`: behind what the caller has enqueued for its
    tensors; None on the CPU. `bucket`: once it is issued; None for a barrier and a small sum. `number`: of a join, the
    rank that joined last.
    """

    __slots__ = ("bucket", "event", "index", "inputs", "issued_s", "number", "outputs", "problem", "rows", "set_id",
                 "signature", "submitted_s", "ticket")  # fmt: skip

    def __init__(
        self,
        set_id: int,
        signature: Signature,
        inputs: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] = (),
        rows: Sequence[int] = (),
        problem: str = "",
    ) -> None:
        self.set_id, self.signature, self.inputs, self.outputs = set_id, signature, inputs, outputs
        self.rows, self.problem = rows, problem
        self.event: torch.Event | None = None
        self.bucket: Any = None
        self.index = self.number = 0
        self.ticket = -1
        self.submitted_s = self.issued_s = time.perf_counter()

    @property
    def results(self) -> list[torch.Tensor]:
        """What the operation has made, once it is finished."""
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
        self._rank, self._start = rank, start
        self._tickets = itertools.count()
        self._requests: dict[int, Request] = {}
        self._known: dict[Signature, _C.AgreedOperation] = {}
        self._under_way: deque[Any] = deque()  # buckets
        self._failed_at: float | None = None
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
        for tensor in request.inputs:
            if not tensor.is_cpu:
                request.event = torch.Event(tensor.device)
                request.event.record()
                break
        operation = self._known.get(request.signature) or self._operation(request.signature)
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
        kind, fuses = signature.kind, signature.fuses()
        nbytes = signature.nbytes()
        is_small = fuses is not None and signature.device == "cpu" and not calls.is_carried(signature)
        is_small = is_small and 0 < nbytes <= SMALL_NBYTES
        operation = self._known[signature] = _C.AgreedOperation(
            key=signature.key,
            signature=json.dumps(signature),
            fuses="" if fuses is None else json.dumps([is_small, *fuses]),
            nbytes=nbytes,
            has_number=not (signature.has_rows or signature.name.startswith(NO_NAME)),
            may_lack_joined=kind == "allreduce",
            is_call=kind not in ("barrier", "join"),
            is_join=kind == "join",
            is_small=is_small,
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
        self._under_way.append(bucket)
        self._forget_done()
        if (watcher := self._watcher) is not None:
            watcher.issued(requests)
            bucket.then(functools.partial(watcher.ended, requests))
        return bucket.futures()

    def _forget_done(self) -> None:
        with contextlib.suppress(IndexError):  # another thread was faster
            while self._under_way[0].is_done():
                self._under_way.popleft()

    def poll(self, request: Request) -> bool:
        """Whether wait() would return at once."""
        if not self._native.poll(request.ticket):
            return False
        return request.bucket is None or request.bucket.is_done() or self._has_given_up()

    def wait(self, request: Request) -> None:
        """Returns when the request's outputs are written. Raises HorovodInternalError."""
        error, request.number = self._native.wait(request.ticket)
        del self._requests[request.ticket]
        bucket = request.bucket
        if error:
            raise HorovodInternalError(error)
        if bucket is None:
            return
        with bucket.lock:
            if bucket.error is None:
                bucket.error = self._end_of(bucket, request.signature.key)
        self._forget_done()
        if bucket.error:
            raise HorovodInternalError(bucket.error)
        bucket.follow()

    def _end_of(self, bucket: Any, key: str) -> str:
        """Waits for a bucket, and writes its results. Returns its error, for people; empty: none."""
        try:
            while not bucket.has_ended_within(SLICE_S):
                if self._has_given_up():
                    return self.failure
            bucket.finish()
            return ""
        except Exception as error:
            return self._explained(key, error)

    def _explained(self, key: str, error: Exception) -> str:
        # A backend says that a connection has ended, but not whose. Rank 0 will know.
        self._native.wait_for_failure(EXPLANATION_S)
        text = f"fusedcomm: {key} failed on rank {self._rank}: {error}"
        text = f"{self.failure} ({text})" if self.failure else text
        self._native.leave(text)  # the other ranks wait for this one
        return text

    def _has_given_up(self) -> bool:
        if self._failed_at is None and self.failure:
            self._failed_at = time.monotonic()
        return self._failed_at is not None and time.monotonic() > self._failed_at + GRACE_S

    def watch(self, watcher: Watcher | None) -> None:
        """Tells the watcher of all operations from now on. None: tells nobody."""
        self._watcher = watcher
        self._native.set_watch(None if watcher is None else _weakly(self._tell))

    def _tell(self, tickets: Sequence[int]) -> None:
        """Small sums have ended."""
        requests = [each for ticket in tickets if (each := self._requests.get(ticket)) is not None]
        if (watcher := self._watcher) is not None:
            watcher.issued(requests)
            watcher.ended(requests)

    def shutdown(self) -> bool:
        """Every rank's requests fail from then on. Returns whether all that was under way has ended. Idempotent."""
        has_ended, deadline = self._native.shutdown(), time.monotonic() + GRACE_S
        for bucket in self._under_way:
            with contextlib.suppress(RuntimeError):
                has_ended &= bucket.has_ended_within(max(0.0, deadline - time.monotonic()))
        return has_ended


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, for the native object that its own object keeps: neither must keep the other alive."""
    found = weakref.WeakMethod(method)
    return lambda *args: found()(*args)  # type: ignore[misc]


def _mismatch(a: Said, b: Said) -> str:
    (one, rank, rows), (other, other_rank, other_rows) = a, b
    return mismatch(_read(one).with_rows(rows), rank, _read(other).with_rows(other_rows), other_rank)


def _read(signature: str) -> Signature:
    return Signature.read(json.loads(signature))
