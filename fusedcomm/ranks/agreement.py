"""Before the first step the ranks compare what they are about to do. Plain JSON through the store; no pickle.

Every rank publishes its record; rank 0 compares each with its own and publishes one verdict, so that all ranks fail
alike, with the same text. What ranks decide by is in the verdict's fields; its text is for people.
"""

import contextlib
import dataclasses
import datetime
import json

import torch.distributed as dist

from fusedcomm.ranks.peers import PeerLostError, Peers

# The key of a record that says nothing but why its rank cannot attach.
PROBLEM = "problem"
# Beside it: when, in seconds since the epoch. A later problem may have been caused by the first.
AT = "at"
_MAX_SHOWN = 300  # characters of a value in an error
# Rank 0 takes a moment to notice that a rank is missing and to publish it; the others wait this much longer.
_MARGIN = datetime.timedelta(seconds=15)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What rank 0 has found, the same on every rank."""

    text: str = ""
    """What prevents the ranks from going on, for people; empty if nothing does."""
    is_loss: bool = False
    """A rank is lost."""
    cause: str | None = None
    """The problem of the rank that was first to have one, as that rank published it; None if no rank did."""

    def raise_problem(self) -> None:
        """See :func:`agree`."""
        if self.text:
            raise (PeerLostError if self.is_loss else RuntimeError)(self.text)


def agree(peers: Peers, store: dist.Store, record: dict, what: str) -> Verdict:
    """The verdict on whether all ranks have published an equal `record` (JSON-serialisable, the same keys everywhere).
    If not, it names the first rank that differs, the field and both values; or the ranks that did not attach within
    the group's timeout, or are lost; or the problem of the rank that was first to have one.

    Args:
        store: for this call alone.
        what: what a rank does meanwhile, "attaching" for example.

    Raises:
        RuntimeError: rank 0 gave no verdict within the group's timeout, or the store has failed.
        PeerLostError: rank 0 is lost.
    """
    store.set(f"record/{peers.rank}", json.dumps(record))
    if peers.rank == 0:
        try:
            verdict = _compare(peers, store, record, what)
        except PeerLostError as error:
            verdict = Verdict(str(error), is_loss=True)
        store.set("verdict", json.dumps(dataclasses.asdict(verdict)))
        return verdict
    timeout = peers.timeout + _MARGIN
    if peers.wait(store, {0: "verdict"}, what, timeout):
        raise RuntimeError(
            f"fusedcomm: rank {peers.rank} got no answer from rank 0 within {timeout.total_seconds():.0f} s while "
            f"{what}: attach must be called on every rank of the process group"
        )
    return Verdict(**json.loads(store.get("verdict")))


def gather(peers: Peers, store: dist.Store, record: object, what: str, is_watched: bool = False) -> list[object]:
    """Every rank's `record` (JSON-serialisable), in rank order. On every rank, each time with a store of its own.

    Args:
        what, is_watched: as for :meth:`fusedcomm.ranks.peers.Peers.wait`.

    Raises:
        RuntimeError: naming the ranks that did not call within the group's timeout. The call then counts as not made.
        PeerLostError: a rank is lost that has not called.
    """
    keys = {rank: f"record/{rank}" for rank in range(peers.world_size)}
    store.set(keys[peers.rank], json.dumps(record))
    missing = peers.wait(store, keys, what, is_watched=is_watched)
    if missing:
        forget(store, peers.rank)
        raise RuntimeError(
            f"fusedcomm: rank(s) {missing} did not take part within {peers.timeout.total_seconds():.0f} s: this is a "
            "collective call, which every rank of the process group has to make"
        )
    return [json.loads(store.get(key)) for key in keys.values()]


def forget(store: dist.Store, rank: int) -> None:
    """Removes what this rank has published in a :func:`gather`, where the store can."""
    with contextlib.suppress(RuntimeError, NotImplementedError):
        store.delete_key(f"record/{rank}")


def _compare(peers: Peers, store: dist.Store, own: dict, what: str) -> Verdict:
    keys = {rank: f"record/{rank}" for rank in range(peers.world_size)}
    if PROBLEM in own:  # so no rank can attach; another may have had a problem before
        return _first_problem([json.loads(store.get(key)) if store.check([key]) else {} for key in keys.values()])
    missing = peers.wait(store, keys, what)
    if missing:
        return Verdict(
            f"fusedcomm: rank(s) {missing} did not attach within {peers.timeout.total_seconds():.0f} s: attach must be "
            "called on every rank of the process group, the same number of times"
        )
    # Through JSON like the others' records, so that tuples and lists compare equal.
    own = json.loads(json.dumps(own))
    records = [json.loads(store.get(key)) for key in keys.values()]
    if any(PROBLEM in record for record in records):
        return _first_problem(records)
    for rank, record in enumerate(records):
        difference = _first_difference(own, record)
        if difference:
            field, on_rank_0, on_rank = difference
            on_rank_0, on_rank = repr(on_rank_0)[:_MAX_SHOWN], repr(on_rank)[:_MAX_SHOWN]
            return Verdict(
                f"fusedcomm: the ranks do not agree: {field} is {on_rank_0} on rank 0 and {on_rank} on rank "
                f"{rank}. Give every rank the same arguments, model and versions."
            )
    return Verdict()


def _first_problem(records: list[dict]) -> Verdict:
    problems = {rank: record for rank, record in enumerate(records) if PROBLEM in record}
    rank = min(problems, key=lambda rank: (problems[rank].get(AT, 0.0), rank))
    cause = problems[rank][PROBLEM]
    return Verdict(f"fusedcomm: rank {rank} cannot attach: {cause}", cause=cause)


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
