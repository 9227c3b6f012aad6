"""The order in which this rank issues its operations, their names, and the wait for their results.

_C.Order has the agreement between the ranks (csrc/frontends/horovod/order.h). operations.py has what is begun at an
operation's turn.
"""

import contextlib
import ctypes
import functools
import itertools
import json
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from fusedcomm.horovod.environment import Settings
from fusedcomm.horovod.errors import HorovodInternalError
from fusedcomm.horovod.signature import NO_NAME, Signature, mismatch
from fusedcomm.log import LOGGER
from fusedcomm.native import _C

if TYPE_CHECKING:
    from fusedcomm.horovod.timeline import Writer


class SmallSum(NamedTuple):
    """A sum that travels with the messages about it if every rank waits for it, because a call of a backend takes
    longer. `part`: of this rank, and then the sum. `write`: makes the outputs of that."""

    part: torch.Tensor
    write: Callable[[], None]


class Request(_C.OrderedRequest):
    """An operation that this rank has submitted, or takes part in without (after a join). It is the caller's handle.

    `rows`: what may differ between ranks: the rows of each tensor (allgather), or to each rank of the set (alltoall).
    `problem`: why this rank cannot take part; empty: it can. `finish`: makes what the caller gets from the request.
    `event`: behind what the caller has enqueued for its tensors; None on the CPU. `bucket`: once it is issued; None for
    a join and a small sum. `number`: of a join, the rank that joined last. `order`: from submit() on, until it is
    synchronized.
    """

    def __init__(
        self,
        set_id: int,
        signature: Signature,
        inputs: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] = (),
        rows: Sequence[int] = (),
        problem: str = "",
        finish: "Callable[[Request], Any]" = lambda _: None,
        small: SmallSum | None = None,
    ) -> None:
        super().__init__(set_id, _operation(signature), rows, problem, None if small is None else small.part)
        self.set_id, self.signature, self.inputs, self.outputs = set_id, signature, inputs, outputs
        self.finish, self.small = finish, small
        self.event: torch.Event | None = None
        self.bucket: Any = None
        self.order: Order | None = None
        self.submitted_s = self.issued_s = time.perf_counter()

    def forget(self) -> None:
        """Lets go of the tensors: the caller may keep a handle that has been synchronized."""
        self.inputs = self.outputs = ()
        self.finish, self.small, self.bucket = lambda _: None, None, None


Start = Callable[[int, Sequence[Sequence[int]], list[Request]], Any]
"""Begins a bucket of a set on this rank: (set, rows of each member, requests) -> a calls.Bucket."""


class Order:
    """Every rank of the job makes one.

    ended: why it is of no more use: shutdown() was called, or this process is a child of fork(). Empty: it is.

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
        self.ended, self._start = "", start
        # What was submitted and not synchronized, by process set and key.
        self._handles: dict[tuple[int, str], Request] = {}
        # Unnamed operations are counted for each process set and kind; see next_name().
        self._counts: dict[tuple[int, str], itertools.count] = {}
        self._num_joins = 0
        self._watcher: "Writer | None" = None
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
        return self.ended or self._native.failure

    def next_name(self, set_id: int, kind: str) -> str:
        """A name for an operation without one. All ranks of a set must submit its unnamed operations of a kind in the
        same order. A join starts the count anew: until then the ranks that have joined have submitted fewer."""
        count = next(self._counts.setdefault((set_id, kind), itertools.count()))
        return f"{NO_NAME}.{self._num_joins}.{count}" if self._num_joins else f"{NO_NAME}.{count}"

    def joined(self) -> None:
        """Every rank has joined: all count unnamed operations from 0 again, under a new prefix."""
        self._num_joins, self._counts = self._num_joins + 1, {}

    def submit(self, request: Request, at_once: bool = False) -> Request:
        """Submits an operation, and returns it. at_once: the caller is about to wait for it.

        Raises ValueError if one of its name is pending, and HorovodInternalError if the job has failed or was shut
        down."""
        place = (request.set_id, request.signature.key)
        if place in self._handles:  # it may be done, but nobody could rely on that: elsewhere, or next time, it is not
            raise ValueError(
                f"{place[1]} is pending: its handle has not been synchronized since it was submitted. Use another "
                "name, or call synchronize() first"
            )
        self._tell(request, at_once)
        request.order, self._handles[place] = self, request
        return request

    def refuse(self, set_id: int, kind: str, name: str, problem: str) -> None:
        """Tells the ranks that submit the operation why this one does not: they get it as a HorovodInternalError."""
        with contextlib.suppress(HorovodInternalError):  # the job has failed
            self._tell(Request(set_id, Signature(kind, name), problem=problem), at_once=True)

    def _tell(self, request: Request, at_once: bool) -> None:
        if self.ended:
            raise HorovodInternalError(self.ended)
        if request.signature.device != "cpu":
            request.event = torch.Event(request.inputs[0].device)
            request.event.record()
        try:
            self._native.submit(request, at_once)
        except RuntimeError as error:
            raise HorovodInternalError(str(error)) from error

    def _begin(
        self, set_id: int, own: Sequence[Request | None], signatures: Sequence[str], rows: Sequence[Sequence[int]]
    ) -> list[torch.futures.Future]:
        """At the turn of a bucket. Returns what is under way."""
        requests = [
            request or Request(set_id, _read(signature)) for request, signature in zip(own, signatures, strict=True)
        ]
        bucket = self._start(set_id, rows, requests)
        for request in requests:
            request.bucket = bucket
        if (watcher := self._watcher) is not None:
            watcher.issued(requests)
            ended = functools.partial(watcher.ended, requests)
            bucket.futures[-1].add_done_callback(lambda _: ended()) if bucket.futures else ended()
        return bucket.futures

    def poll(self, request: Request) -> bool:
        """Whether wait() would return at once."""
        is_done = bool(self.ended) or self._native.poll(request)
        if is_done:
            self._free_name(request)
        return is_done

    def _free_name(self, request: Request) -> None:
        place = (request.set_id, request.signature.key)
        if self._handles.get(place) is request:
            del self._handles[place]

    def wait(self, request: Request) -> Any:
        """Returns what the request's `finish` makes of it, when its outputs are written. Raises
        HorovodInternalError."""
        self._free_name(request)
        if failure := self.ended or self._native.wait(request):
            raise HorovodInternalError(failure)
        if request.bucket is not None:
            try:
                request.bucket.finish(request.outputs)
            except RuntimeError as error:
                raise HorovodInternalError(f"fusedcomm: {request.signature.key} failed: {error}") from error
        elif request.small is not None:
            with torch.no_grad():
                request.small.write()
            if (watcher := self._watcher) is not None:
                watcher.issued([request])
                watcher.ended([request])
        return request.finish(request)

    def watch(self, watcher: "Writer | None") -> None:
        """Tells the watcher of all operations from now on. None: tells nobody."""
        self._watcher = watcher

    def fail(self, why: str) -> None:
        """This rank's requests fail, and later ones. The other ranks are not told."""
        self._native.give_up(why)

    def shutdown(self) -> bool:
        """Every rank's requests fail from then on. Returns whether all that was under way has ended. Idempotent."""
        return self._native.shutdown()

    def end(self, why: str, keeps: bool) -> None:
        """It is of no more use. keeps: whether its native half stays as long as the process, because its end would wait
        for threads or peers that are gone."""
        if keeps:
            keep(self._native)
        self.ended = why
        del self._native


def keep(thing: object) -> None:
    """Keeps it as long as the process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _submitted(handle: Request) -> Request:
    """The handle. Raises ValueError if it is none."""
    if isinstance(handle, Request):
        return handle
    raise ValueError(f"handle {handle!r} is not possible: pass what allreduce_async() and the like have returned")


def poll(handle: Request) -> bool:
    """Whether synchronize(handle) would return at once. Raises ValueError for a handle that is not under way."""
    order = _submitted(handle).order
    if order is None:
        raise ValueError(f"poll: {handle.signature.key} was synchronized before, so it is no longer under way")
    return order.poll(handle)


def synchronize(handle: Request) -> Any:
    """Waits for an operation and returns its result; None for a handle that was synchronized before.

    Raises ValueError for what is no handle, and HorovodInternalError if the ranks disagreed about the operation, or the
    job has failed or was shut down.
    """
    order, handle.order = _submitted(handle).order, None
    if order is None:
        return None
    try:
        return order.wait(handle)
    finally:
        handle.forget()


@functools.lru_cache(1 << 16)
def _operation(signature: Signature) -> "_C.AgreedOperation":
    fuses = signature.fuses()
    return _C.AgreedOperation(
        key=signature.key,
        signature=json.dumps(signature),
        fuses="" if fuses is None else json.dumps(fuses),
        nbytes=signature.nbytes(),
        may_lack_joined=signature.kind == "allreduce",
        is_join=signature.kind == "join",
        op=signature.op,
    )


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, for the native object that its own object keeps: neither must keep the other alive."""
    found = weakref.WeakMethod(method)
    return lambda *args: found()(*args)  # type: ignore[misc]


def _mismatch(one: tuple[str, int, Sequence[int]], other: tuple[str, int, Sequence[int]]) -> str:
    return mismatch((_read(one[0]), *one[1:]), (_read(other[0]), *other[1:]))


def _read(signature: str) -> Signature:
    return Signature.read(json.loads(signature))
