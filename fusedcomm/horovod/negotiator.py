"""Rank 0's count of which ranks have submitted what: it decides what all ranks issue next, in one order for all.

the first time  a rank sends an operation's signature. When every member of the set has, they are compared, and the
                operation begins
later           the signature has a number by then, and a rank sends that
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fusedcomm.horovod.signature import NO_NAME, Entry, Response, Signature, mismatch
from fusedcomm.ranks.connections import MAX_LISTED, ranks_text

MAX_IDS = 1 << 16
"""Signatures beyond these get no number, so that a script that makes up a name for each call does not fill the
memory."""


@dataclasses.dataclass(slots=True)
class _Pending:
    """An operation that some members have submitted."""

    first: Signature
    first_rank: int
    since: float
    has: set[int] = dataclasses.field(default_factory=set)
    rows: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    problem: str = ""
    was_reported: bool = False


class _Facts(NamedTuple):
    """What follows from a signature, and its number, if it has one."""

    key: str
    id: int | None
    fuses: tuple | None
    nbytes: int


@dataclasses.dataclass
class _Set:
    ranks: list[int]
    pending: dict[str, _Pending] = dataclasses.field(default_factory=dict)
    ready: list[tuple[str, _Pending]] = dataclasses.field(default_factory=list)
    ready_nbytes: int = 0
    facts: dict[Signature, _Facts] = dataclasses.field(default_factory=dict)
    """Of signatures that have a number."""


class Negotiator:
    """Not for several threads at once.

    Args:
        sets: the ranks of each process set, by its id.
        fusion_nbytes: most bytes of a bucket.
        warning_s, shutdown_s: seconds until a stall is said, and until it ends the job. 0: never.
        say: is called with a warning.
    """

    def __init__(
        self,
        size: int,
        sets: dict[int, list[int]],
        fusion_nbytes: int,
        warning_s: float,
        shutdown_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._sets = {set_id: _Set(ranks) for set_id, ranks in sets.items()}
        self._size, self.fusion_nbytes, self._say = size, fusion_nbytes, say
        self._warning_s, self._shutdown_s = warning_s, shutdown_s
        self._num_ids = 0
        self._joined: set[int] = set()

    def add(self, set_id: int, rank: int, entry: Entry) -> None:
        """A rank has submitted an operation. Duplicates of a rank are refused there."""
        if entry.signature.kind == "join":
            self._join(rank)
            return
        found, signature = self._sets[set_id], entry.signature
        facts = found.facts.get(signature)
        key = signature.key if facts is None else facts.key
        pending = found.pending.get(key)
        if pending is None:
            pending = found.pending[key] = _Pending(signature, rank, time.monotonic())
        if not pending.problem:
            if entry.problem:
                pending.problem = f"fusedcomm: rank {rank} cannot take part: {entry.problem}"
            elif signature != pending.first:
                pending.problem = mismatch(pending.first, pending.first_rank, signature, rank)
        pending.has.add(rank)
        if entry.rows:
            pending.rows[rank] = entry.rows
        self._look(found, key, pending)

    def _join(self, rank: int) -> None:
        self._joined.add(rank)
        for found in self._sets.values():
            for key, pending in list(found.pending.items()):
                self._look(found, key, pending)
        if len(self._joined) == self._size:
            self._joined.clear()
            signature = Signature("join", NO_NAME)
            self._sets[0].ready.append((signature.key, _Pending(signature, rank, 0.0)))

    def _look(self, found: _Set, key: str, pending: _Pending) -> None:
        """Moves an operation to the ready ones if no rank is missing."""
        if len(pending.has) < len(found.ranks):
            missing = self._missing(found, pending)
            if not self._joined.issuperset(missing):
                return
            if pending.first.kind != "allreduce" and not pending.problem:
                pending.problem = (
                    f"fusedcomm: {key} needs every rank, and {ranks_text(missing)} joined already. After a join() the "
                    "other ranks may only call allreduce"
                )
        found.ready.append((key, found.pending.pop(key)))
        facts = found.facts.get(pending.first)
        found.ready_nbytes += pending.first.nbytes() if facts is None else facts.nbytes

    @staticmethod
    def _missing(found: _Set, pending: _Pending) -> list[int]:
        return [rank for rank in found.ranks if rank not in pending.has]

    def due(self) -> Iterator[tuple[int, list[int], int]]:
        """The sets that have something ready: id, ranks, and how many bytes."""
        for set_id, found in self._sets.items():
            if found.ready:
                yield set_id, found.ranks, found.ready_nbytes

    def take(self, set_id: int) -> list[list[Response]]:
        """What is ready in a set, as buckets of operations that are issued together."""
        found = self._sets[set_id]
        ready, found.ready, found.ready_nbytes = found.ready, [], 0
        buckets: list[list[Response]] = []
        open_ones: dict[tuple, tuple[list[Response], int]] = {}
        for _, pending in ready:
            response, facts = self._response(found, pending)
            if facts.fuses is None or response.error:
                buckets.append([response])
                continue
            bucket, nbytes = open_ones.get(facts.fuses, ([], 0))
            if not bucket or nbytes + facts.nbytes > self.fusion_nbytes:
                bucket, nbytes = [], 0
                buckets.append(bucket)
            bucket.append(response)
            open_ones[facts.fuses] = bucket, nbytes + facts.nbytes
        return buckets

    def _response(self, found: _Set, pending: _Pending) -> tuple[Response, _Facts]:
        first, rows = pending.first, ()
        if pending.rows:
            rows = tuple(pending.rows.get(rank, ()) for rank in found.ranks)
        facts = found.facts.get(first)
        if is_new := facts is None:
            facts = _Facts(first.key, None, first.fuses(), first.nbytes())
            if not (pending.problem or rows or first.name.startswith(NO_NAME)) and self._num_ids < MAX_IDS:
                facts = found.facts[first] = facts._replace(id=self._num_ids)
                self._num_ids += 1
        number = pending.first_rank if first.kind == "join" else 0
        return Response(facts.id, is_new, first, rows, pending.problem, number), facts

    # ---- stalls

    def next_look_s(self) -> float | None:
        """Seconds until the next call of look_for_stalls() is due; None: nothing waits."""
        limits = [(pending.since, after_s) for found in self._sets.values() for pending in found.pending.values()
                  for after_s in (0.0 if pending.was_reported else self._warning_s, self._shutdown_s) if after_s]  # fmt: skip
        now = time.monotonic()
        return min((max(0.0, since + after_s - now) for since, after_s in limits), default=None)

    def look_for_stalls(self) -> str:
        """Warns of ranks that do not submit. Returns why the job ends; empty: it goes on."""
        now, fatal = time.monotonic(), ""
        for found in self._sets.values():
            late: dict[str, list[str]] = {}
            for key, pending in found.pending.items():
                waited_s, missing = now - pending.since, ranks_text(self._missing(found, pending))
                if self._warning_s and waited_s >= self._warning_s and not pending.was_reported:
                    pending.was_reported = True
                    late.setdefault(missing, []).append(key)
                if self._shutdown_s and waited_s >= self._shutdown_s and not fatal:
                    fatal = (
                        f"fusedcomm: within HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={self._shutdown_s:g} {missing} did not "
                        f"submit {key}"
                    )
            for missing, keys in late.items():
                more = f", … ({len(keys)})" if len(keys) > MAX_LISTED else ""
                self._say(
                    f"fusedcomm: for {self._warning_s:g} s the other ranks have waited for {missing}, which did not "
                    f"submit {', '.join(keys[:MAX_LISTED])}{more}. Every rank must submit the same names; see whether "
                    "that rank runs, and what it does"
                )
        return fatal
