"""Operations under way: what Python keeps of each, by handle, until it is synchronized."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusedcomm.horovod.order import Request
from fusedcomm.horovod.signature import NO_NAME, Signature
from fusedcomm.horovod.world import World


@dataclasses.dataclass(slots=True)
class Pending:
    """One operation. `written`: outputs that the caller gave. `finish` makes what wait() returns from the results.
    `versions`: those of the inputs when they were submitted, in the debug mode only. `is_seen_done`: poll() has
    returned True."""

    world: World
    request: Request
    inputs: Sequence[torch.Tensor]
    written: Sequence[torch.Tensor]
    finish: Callable[[Request], Any]
    versions: list[int] | None
    is_seen_done: bool = False


_pending: dict[int, Pending] = {}
_num_handles = 0
# The handle of the last operation of each name, by process set and key.
_last_of_name: dict[tuple[int, str], int] = {}
# Unnamed operations are counted for each process set and kind; see next_name().
_counts: dict[tuple[int, str], int] = {}
_num_joins = 0
_lock = threading.Lock()


def next_name(set_id: int, kind: str) -> str:
    """A name for an operation without one. All ranks of a set must submit its unnamed operations of a kind in the same
    order. A join starts the count anew: until then the ranks that have joined have submitted fewer."""
    with _lock:
        count = _counts.get((set_id, kind), 0)
        _counts[set_id, kind] = count + 1
    return f"{NO_NAME}.{_num_joins}.{count}" if _num_joins else f"{NO_NAME}.{count}"


def joined() -> None:
    """Every rank has joined: all count unnamed operations from 0 again, under a new prefix."""
    global _num_joins
    with _lock:
        _num_joins += 1
        _counts.clear()


def submit(
    found: World,
    signature: Signature,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    finish: Callable[[Request], Any],
    written: Sequence[torch.Tensor] = (),
    set_id: int = 0,
    at_once: bool = False,
    rows: Sequence[int] = (),
) -> int:
    """As begin(), for an operation that the script waits for: returns its handle. Raises ValueError if its name is
    pending."""
    global _num_handles
    place = (set_id, signature.key)
    last = _pending.get(_last_of_name.get(place, -1))
    # It may be done, but nobody could rely on that: on another rank, or another time, it is not.
    if last is not None and last.world is found and not last.is_seen_done:
        raise ValueError(
            f"{place[1]} is pending: its handle has not been synchronized since it was submitted. Use another "
            "name, or call synchronize() first"
        )
    pending = begin(found, signature, inputs, outputs, finish, written, set_id, at_once, rows)
    with _lock:
        handle, _num_handles = _num_handles, _num_handles + 1
    _pending[handle] = pending
    _last_of_name[place] = handle
    return handle


def begin(
    found: World,
    signature: Signature,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    finish: Callable[[Request], Any],
    written: Sequence[torch.Tensor],
    set_id: int,
    at_once: bool = False,
    rows: Sequence[int] = (),
) -> Pending:
    """Submits an operation. at_once: the caller is about to wait for it.

    Raises ValueError if one of its name is under way, and HorovodInternalError if the job has failed or was shut
    down."""
    given, versions = (inputs, outputs), None
    if found.settings.check:
        # Writes of the results must not count: these share the memory, but not the version.
        given = [each.data for each in inputs], [each.data for each in outputs]
        versions = [each._version for each in inputs]
    request = Request(set_id, signature, *given, rows)
    found.order.submit(request, at_once)
    return Pending(found, request, inputs, written, finish, versions)


def poll(handle: int) -> bool:
    """Whether synchronize(handle) would return at once. Raises ValueError for a handle that is not under way."""
    pending = _pending.get(_checked(handle))
    if pending is None:
        raise ValueError(f"poll: handle {handle} was synchronized before, so it is no longer under way")
    pending.is_seen_done = pending.world.order.poll(pending.request)
    return pending.is_seen_done


def refuse(found: World, kind: str, name: str, problem: str, set_id: int) -> None:
    """Tells the ranks that submit the operation why this one does not: they get it as a HorovodInternalError."""
    with contextlib.suppress(ValueError, RuntimeError):  # its name is pending, or the job has failed
        found.order.submit(Request(set_id, Signature(kind, name), problem=problem), at_once=True)


def _checked(handle: int) -> int:
    """The handle. Raises ValueError if no operation of this process has returned it."""
    if isinstance(handle, int) and not isinstance(handle, bool) and 0 <= handle < _num_handles:
        return handle
    given = f"the handles 0 to {_num_handles - 1}" if _num_handles else "no handle"
    raise ValueError(
        f"handle {handle!r} is not possible: this process has been given {given} so far; pass what allreduce_async() "
        "and the like have returned"
    )


def synchronize(handle: int) -> Any:
    """Waits for an operation and returns its result; None for a handle that was synchronized before.

    Raises ValueError for what is no handle of this process, and HorovodInternalError if the ranks disagreed about the
    operation, or the job has failed or was shut down.
    """
    pending = _pending.pop(_checked(handle), None)
    return None if pending is None else wait(pending)


def wait(pending: Pending) -> Any:
    """Waits for an operation and returns its result. Errors: see synchronize()."""
    pending.world.order.wait(pending.request)
    if pending.versions is not None:
        _check_versions(pending)
    for output in pending.written:
        torch.autograd.graph.increment_version(output)
    return pending.finish(pending.request)


def _check_versions(pending: Pending) -> None:
    for i, (tensor, before) in enumerate(zip(pending.inputs, pending.versions, strict=True)):
        if tensor._version != before:
            raise RuntimeError(
                f"rank {pending.world.rank}: {pending.request.signature.key}: tensor {i}, of shape "
                f"{tuple(tensor.shape)}, was changed in place after it was submitted and before it was synchronized, "
                "so the result may hold old or new values. Submit a clone, or change it after synchronize()"
            )


def leave_to_parent() -> None:
    """In a child of fork(): a thread that the child does not have may hold the lock."""
    global _lock
    _lock = threading.Lock()


def forget_all() -> None:
    """Called when the job is shut down. Handles stay known, so synchronizing them tells what happened."""
    global _num_joins
    with _lock:
        _counts.clear()
        _last_of_name.clear()
        _num_joins = 0
