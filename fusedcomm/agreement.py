"""Before the first step the ranks compare what they are about to do. Plain JSON through the store; no pickle.

Every rank publishes its record; rank 0 compares each with its own and publishes one verdict, so that all ranks fail
alike, with the same text.
"""

import contextlib
import datetime
import json
import time
import warnings

import torch.distributed as dist

_OK = "ok"
# The key of a record that says nothing but why its rank cannot attach.
PROBLEM = "problem"
# Beside it: when, in seconds since the epoch. What comes later may be what the first has led to.
AT = "at"
_MAX_SHOWN = 300  # characters of a value in an error
# Rank 0 needs a moment to notice that a rank is missing and to say so; the others wait that much longer.
_MARGIN = datetime.timedelta(seconds=15)


def agree(store: dist.Store, rank: int, world_size: int, record: dict, timeout: datetime.timedelta) -> None:
    """Returns when all ranks have published an equal `record` (JSON-serialisable, the same keys everywhere).

    Raises:
        RuntimeError: on every rank, naming the first rank that differs, the field and both values; or naming the
            ranks that did not attach within `timeout`.
    """
    store.set(f"record/{rank}", json.dumps(record))
    began = time.monotonic()
    if rank == 0:
        verdict = _compare(store, world_size, record, timeout)
        store.set("verdict", verdict)
    else:
        try:
            store.wait(["verdict"], timeout + _MARGIN)
        except (RuntimeError, dist.DistStoreError) as error:
            _raise_if_the_store_failed(error, began, timeout)
            raise RuntimeError(
                f"fusedcomm: rank {rank} got no answer from rank 0 within {timeout.total_seconds():.0f} s while "
                "attaching: attach must be called on every rank of the process group"
            ) from error
        verdict = store.get("verdict").decode()
    if verdict != _OK:
        raise RuntimeError(verdict)


def gather(store: dist.Store, rank: int, world_size: int, record: object, timeout: datetime.timedelta) -> list[object]:
    """Every rank's `record` (JSON-serialisable), in rank order. On every rank, each time with a store of its own.

    Raises:
        RuntimeError: naming the ranks that did not call within `timeout`. The call then counts as not made.
    """
    keys = [f"record/{other}" for other in range(world_size)]
    began = time.monotonic()
    store.set(keys[rank], json.dumps(record))
    try:
        store.wait(keys, timeout)
    except (RuntimeError, dist.DistStoreError) as error:
        _raise_if_the_store_failed(error, began, timeout)
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        forget(store, rank)
        raise RuntimeError(
            f"fusedcomm: rank(s) {missing} did not take part within {timeout.total_seconds():.0f} s: this is a "
            "collective call, which every rank of the process group has to make"
        ) from error
    return [json.loads(store.get(key)) for key in keys]


def forget(store: dist.Store, rank: int) -> None:
    """Removes what this rank has published in a :func:`gather`, where the store can."""
    with contextlib.suppress(RuntimeError, NotImplementedError):
        store.delete_key(f"record/{rank}")


def _raise_if_the_store_failed(error: Exception, began: float, timeout: datetime.timedelta) -> None:
    waited_s = time.monotonic() - began
    if waited_s < 0.9 * timeout.total_seconds():
        raise RuntimeError(
            f"fusedcomm: the process group's store failed after {waited_s:.1f} s: {error}. The process that hosts it "
            "may be gone: look at its log, and restart the job"
        ) from error


def _compare(store: dist.Store, world_size: int, own: dict, timeout: datetime.timedelta) -> str:
    keys = [f"record/{rank}" for rank in range(world_size)]
    if PROBLEM in own:  # so that none can attach; it may be that another has had one before
        return _first_problem([json.loads(store.get(key)) if store.check([key]) else {} for key in keys])
    began = time.monotonic()
    try:
        store.wait(keys, timeout)
    except (RuntimeError, dist.DistStoreError) as error:
        _raise_if_the_store_failed(error, began, timeout)
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        return (
            f"fusedcomm: rank(s) {missing} did not attach within {timeout.total_seconds():.0f} s: attach must be "
            "called on every rank of the process group, the same number of times"
        )
    # As the others' records, so that tuples and lists compare equal.
    own = json.loads(json.dumps(own))
    records = [json.loads(store.get(key)) for key in keys]
    if any(PROBLEM in record for record in records):
        return _first_problem(records)
    for rank, record in enumerate(records):
        difference = _first_difference(own, record)
        if difference:
            field, on_rank_0, on_rank = difference
            on_rank_0, on_rank = repr(on_rank_0)[:_MAX_SHOWN], repr(on_rank)[:_MAX_SHOWN]
            return (
                f"fusedcomm: the ranks do not agree: {field} is {on_rank_0} on rank 0 and {on_rank} on rank "
                f"{rank}. Give every rank the same arguments, model and versions."
            )
    return _OK


def _first_problem(records: list[dict]) -> str:
    problems = {rank: record for rank, record in enumerate(records) if PROBLEM in record}
    rank = min(problems, key=lambda rank: (problems[rank].get(AT, 0.0), rank))
    return f"fusedcomm: rank {rank} cannot attach: {problems[rank][PROBLEM]}"


def _first_difference(left: object, right: object, field: str = "") -> tuple[str, object, object] | None:
    """The path and the two values of the first difference between two JSON values."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted({*left, *right}):
            found = _first_difference(left.get(key), right.get(key), f"{field}.{key}" if field else key)
            if found:
                return found
        return None
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            found = _first_difference(a, b, f"{field}[{index}]")
            if found:
                return found
        return None
    return None if left == right else (field, left, right)


def warn_alone(text: str, stacklevel: int) -> None:
    """On one rank, which must not fail alone where warnings are errors. stacklevel: of warnings.warn, here."""
    with contextlib.suppress(Warning):
        warnings.warn(text, stacklevel=stacklevel)
