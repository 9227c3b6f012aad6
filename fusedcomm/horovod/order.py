"""The order in which this rank issues its operations, and the wait for their results.

_C.Order has the agreement between the ranks (csrc/frontends/horovod/order.h). operations.py has what is begun at an
operation's turn.
"""

import functools
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
    """An operation that this rank has submitted, or takes part in without (after a join).

    `rows`: what may differ between ranks: the rows of each tensor (allgather), or to each rank of the set (alltoall).
    `problem`: why this rank cannot take part; empty: it can. `finish`: makes what the caller gets from the request.
    `event`: behind what the caller has enqueued for its tensors; None on the CPU. `bucket`: once it is issued; None for
    a join and a small sum. `number`: of a join, the rank that joined last.
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
        self.submitted_s = self.issued_s = time.perf_counter()


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
        return self._native.failure

    def submit(self, request: Request, at_once: bool) -> None:
        """at_once: the caller is about to wait for it. Raises ValueError if an operation of its name is under way,
        HorovodInternalError after a failure."""
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
        return self._native.poll(request)

    def wait(self, request: Request) -> Any:
        """Returns what the request's `finish` makes of it, when its outputs are written. Raises
        HorovodInternalError."""
        if failure := self._native.wait(request):
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
        self._native.fail(why)

    def shutdown(self) -> bool:
        """Every rank's requests fail from then on. Returns whether all that was under way has ended. Idempotent."""
        return self._native.shutdown()


@functools.lru_cache(1 << 16)
def _operation(signature: Signature) -> "_C.AgreedOperation":
    fuses = signature.fuses()
    return _C.AgreedOperation(
        key=signature.key,
        signature=json.dumps(signature),
        fuses="" if fuses is None else json.dumps(fuses),
        nbytes=signature.nbytes(),
        repeats=not signature.name.startswith(NO_NAME),
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
