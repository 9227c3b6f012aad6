"""Lets ranks compare records before the first step, as JSON in the store (no pickle).

Every rank publishes its record. Rank 0 compares each with its own and publishes one verdict, so all ranks fail with the
same text. Ranks decide by the verdict's fields; its text is for people.
"""

import contextlib
import dataclasses
import datetime
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from fusedcomm import version
from fusedcomm.native import _C
from fusedcomm.ranks.bounded_store import BoundedStore, StoreError
from fusedcomm.ranks.peers import GivenUpError, PeerLostError, Peers

T = TypeVar("T")

_GIVEN_UP = "given up"
"""Store key at which a rank says why it cannot attach. Ranks that are connecting then stop waiting for it."""
# Key of the reason why a rank cannot attach. Such a record has only this and the two keys below.
PROBLEM = "problem"
# Key of whether that reason is another agreement's text, which names a rank already.
IS_VERDICT = "is verdict"
# Key of the time of that problem, in seconds since the epoch. The first problem may have caused later ones. Infinite
# for a rank that only follows another one, whatever its clock says.
AT = "at"
_WHAT = "attaching"  # what ranks are doing that agree, for reports
_MAX_SHOWN = 300  # characters of a value in an error
# How much longer than rank 0 the others wait: it takes a moment to notice and publish that a rank is missing.
_MARGIN = datetime.timedelta(seconds=15)


class DisagreementError(RuntimeError):
    """The ranks cannot attach, by a verdict that all of them get; none is lost."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of rank 0's comparison, the same on every rank."""

    text: str = ""
    """Why the ranks cannot go on, for people; empty if they can."""
    is_loss: bool = False
    """Whether a rank is lost."""
    cause: str | None = None
    """The earliest problem of a rank, as that rank published it; None if no rank has one."""

    def raise_problem(self) -> None:
        """Raises PeerLostError if a rank is lost, DisagreementError for another problem, and nothing without one."""
        if self.text:
            raise (PeerLostError if self.is_loss else DisagreementError)(self.text)


def versions() -> dict[str, object]:
    """The first field of every record of attaching: what else can be compared depends on it."""
    return {
        "versions": {
            "fusedcomm": version.__version__,
            "torch": torch.__version__.split("+")[0],
            "wire layout": _C.WIRE_LAYOUT_VERSION,
            "byte order": sys.byteorder,
        }
    }


def agree(peers: Peers, store: BoundedStore, record: dict, problem: Exception | None = None) -> None:
    """Returns once all ranks have published an equal `record` (JSON-serializable, with equal keys).

    Args:
        store: a store that only this call uses.
        record: each field stands before those whose values follow from it, because the first difference is named.
        problem: why this rank cannot attach; the other ranks are told. None: it can.

    Raises:
        Exception: this rank's `problem`, unless that is a GivenUpError, which only follows another rank's.
        DisagreementError: the earliest problem of another rank; or the first rank that differs, the field and both
            values; or the ranks that did not attach within the group's timeout.
        RuntimeError: rank 0 gave no verdict within the group's timeout, or the store has failed.
        PeerLostError: a rank is lost.
    """
    if problem is not None:
        at = math.inf if isinstance(problem, GivenUpError) else time.time()
        record = {PROBLEM: str(problem), IS_VERDICT: isinstance(problem, DisagreementError), AT: at}
    verdict = None
    try:
        verdict = _verdict(peers, store, record)
        verdict.raise_problem()
    except RuntimeError as error:
        if problem is None or isinstance(problem, GivenUpError):
            raise
        # Another rank's earlier problem may have caused this one, unless both are the same.
        is_same = verdict is not None and verdict.cause == record[PROBLEM]
        raise problem from (None if is_same else error)


def connect(peers: Peers, store: BoundedStore, function: Callable[[], T]) -> T:
    """Returns what `function` returns, which waits for all ranks. Raises if one is lost, or has called :func:`ready`
    with a problem. store: of the engine that is made."""
    return peers.call(
        function,
        "connecting with the other ranks to attach",
        given_up=lambda: store.text(_GIVEN_UP),
    )


def ready(peers: Peers, store: BoundedStore, found: dict, problem: Exception | None) -> None:
    """Compares what the ranks have made, so that all go on or none. Raises as :func:`agree`. store: of the engine."""
    if problem is not None and not isinstance(problem, GivenUpError):
        with contextlib.suppress(RuntimeError):  # the store has failed, too
            why = f"{peers.title(peers.rank)} cannot attach: {problem}"
            store.set(_GIVEN_UP, why.replace("fusedcomm: ", ""))
    agree(peers, store.under("ready"), found, problem)


def confirm(peers: Peers, store: BoundedStore, problem: Exception | None, stop: Callable[[str], object]) -> None:
    """Raises what a rank has found since, this rank's `problem` first, once `stop` was called. Once for a store."""
    try:
        agree(peers, store.under("confirmed"), {}, problem)
    except StoreError:
        pass  # training needs no store; this rank has no problem, or that would have been raised
    except Exception:
        stop("a rank could not attach")
        raise


def _verdict(peers: Peers, store: BoundedStore, record: dict) -> Verdict:
    """Publishes this rank's record, and returns what rank 0 says of all. Raises as agree()."""
    store.set(f"record/{peers.rank}", json.dumps(record))
    if peers.rank == 0:
        try:
            verdict = _compare(peers, store, record)
        except PeerLostError as error:
            verdict = Verdict(str(error), is_loss=True)
        store.set("verdict", json.dumps(dataclasses.asdict(verdict)))
        return verdict
    timeout = peers.timeout + _MARGIN
    if peers.wait(store, {0: "verdict"}, _WHAT, timeout):
        raise RuntimeError(
            f"fusedcomm: rank {peers.rank} got no answer from rank 0 within {timeout.total_seconds():.0f} s while "
            f"{_WHAT}: attach must be called on every rank of the process group"
        )
    return Verdict(**json.loads(peers.call(lambda: store.get("verdict"), _WHAT)))


def gather(peers: Peers, store: BoundedStore, record: object, what: str, is_watched: bool = False) -> list[object]:
    """Returns every rank's `record` (JSON-serializable), in rank order. A collective call.

    Args:
        store: a store that only this call uses.
        what, is_watched: as for :meth:`fusedcomm.ranks.peers.Peers.wait`.

    Raises:
        RuntimeError: some ranks did not call within the group's timeout; names them. This rank's record is removed.
        PeerLostError: a rank that has not called is lost.
    """
    keys = {rank: f"record/{rank}" for rank in range(peers.world_size)}
    peers.call(lambda: store.set(keys[peers.rank], json.dumps(record)), what)
    missing = peers.wait(store, keys, what, is_watched=is_watched)
    if missing:
        forget(store, peers.rank)
        raise RuntimeError(
            f"fusedcomm: rank(s) {missing} did not take part within {peers.timeout.total_seconds():.0f} s: this is a "
            "collective call, which every rank of the process group has to make"
        )
    return peers.call(lambda: [json.loads(store.get(key)) for key in keys.values()], what)


def forget(store: BoundedStore, rank: int) -> None:
    """Removes this rank's record of a :func:`gather`, if the store can delete keys."""
    with contextlib.suppress(RuntimeError, NotImplementedError):
        store.delete_key(f"record/{rank}")


def _compare(peers: Peers, store: BoundedStore, own: dict) -> Verdict:
    keys = {rank: f"record/{rank}" for rank in range(peers.world_size)}
    # No rank can attach; another rank's problem may be earlier. A rank that only follows waits for that one's record.
    if PROBLEM in own and own[AT] != math.inf:
        records = [json.loads(store.get(key)) if store.check([key]) else {} for key in keys.values()]
        return _first_problem(peers, records)
    missing = peers.wait(store, keys, _WHAT)
    if missing:
        return Verdict(
            f"fusedcomm: rank(s) {missing} did not attach within {peers.timeout.total_seconds():.0f} s: attach must be "
            "called on every rank of the process group, the same number of times"
        )
    records = [json.loads(store.get(key)) for key in keys.values()]
    if any(PROBLEM in record for record in records):
        return _first_problem(peers, records)
    found = difference({peers.title(rank): record for rank, record in enumerate(records)})
    return Verdict(f"fusedcomm: {found}. Give every rank the same arguments, model and versions." if found else "")


def difference(records: Mapping[str, object]) -> str:
    """The first field in which a record is not equal to the first one, as "the ranks do not agree: lr is 0.1 on rank 0
    and 0.2 on rank 1"; empty if all are equal.

    records: JSON-serializable values, by whose they are: "rank 0" for example.
    """
    # What has travelled has been JSON, which makes tuples lists. What has not must be, too, to compare equal.
    (first, expected), *others = ((whose, json.loads(json.dumps(record))) for whose, record in records.items())
    for whose, record in others:
        found = _first_difference(expected, record)
        if found:
            field, here, there = found[0], repr(found[1])[:_MAX_SHOWN], repr(found[2])[:_MAX_SHOWN]
            return f"the ranks do not agree: {field} is {here} on {first} and {there} on {whose}"
    return ""


def _first_problem(peers: Peers, records: list[dict]) -> Verdict:
    problems = {rank: record for rank, record in enumerate(records) if PROBLEM in record}
    rank = min(problems, key=lambda rank: (problems[rank].get(AT, 0.0), rank))
    cause = problems[rank][PROBLEM]
    if problems[rank][IS_VERDICT]:
        return Verdict(cause, cause=cause)
    return Verdict(f"fusedcomm: {peers.title(rank)} cannot attach: {cause.removeprefix('fusedcomm: ')}", cause=cause)


def _first_difference(left: object, right: object, field: str = "") -> tuple[str, object, object] | None:
    """The path and the two values of the first difference between two JSON values; None if they are equal.

    Keys are compared in the order of `left`. A record has a field before those whose values follow from it.
    """
    if isinstance(left, dict) and isinstance(right, dict):
        for key in {**left, **right}:
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
