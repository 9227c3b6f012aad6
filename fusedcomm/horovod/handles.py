"""Operations under way: what Python keeps of each, by handle, until it is synchronized."""

import contextlib
import threading
from typing import Any

from fusedcomm.horovod.order import Request
from fusedcomm.horovod.signature import NO_NAME, Signature
from fusedcomm.horovod.world import World

_pending: dict[int, tuple[World, Request]] = {}
_num_handles = 0
# Handles by process set and key, until the caller knows that the operation has ended.
_handles: dict[tuple[int, str], int] = {}
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


def submit(found: World, request: Request, at_once: bool = False) -> int:
    """Submits an operation, and returns its handle. at_once: the caller is about to wait for it.

    Raises ValueError if one of its name is pending, and HorovodInternalError if the job has failed or was shut down."""
    global _num_handles
    place = (request.set_id, request.signature.key)
    if place in _handles:  # it may be done, but nobody could rely on that: on another rank, or another time, it is not
        raise ValueError(
            f"{place[1]} is pending: its handle has not been synchronized since it was submitted. Use another "
            "name, or call synchronize() first"
        )
    found.order.submit(request, at_once)
    with _lock:
        handle, _num_handles = _num_handles, _num_handles + 1
    _pending[handle] = found, request
    _handles[place] = handle
    return handle


def _free_name(handle: int, request: Request) -> None:
    place = (request.set_id, request.signature.key)
    if _handles.get(place) == handle:
        del _handles[place]


def poll(handle: int) -> bool:
    """Whether synchronize(handle) would return at once. Raises ValueError for a handle that is not under way."""
    pending = _pending.get(_checked(handle))
    if pending is None:
        raise ValueError(f"poll: handle {handle} was synchronized before, so it is no longer under way")
    world, request = pending
    is_done = world.order.poll(request)
    if is_done:
        _free_name(handle, request)
    return is_done


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
    if pending is None:
        return None
    world, request = pending
    _free_name(handle, request)
    return world.order.wait(request)


def leave_to_parent() -> None:
    """In a child of fork(): a thread that the child does not have may hold the lock."""
    global _lock
    _lock = threading.Lock()


def forget_all() -> None:
    """Called when the job is shut down. Handles stay known, so synchronizing them tells what happened."""
    global _num_joins
    with _lock:
        _counts.clear()
        _handles.clear()
        _num_joins = 0
