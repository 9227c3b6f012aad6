"""Waits for other ranks outside of a step: while attaching, searching or saving.

Within a step the transport notices that a rank is lost, and the watch says which one is slow (watch.py).
Every other wait for ranks is made here. It ends when a rank that it needs is lost, and is reported when it takes long.
Both texts say what that rank was last seen doing.
"""

import datetime
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from fusedcomm.native import _C
from fusedcomm.ranks import bounded_store, groups
from fusedcomm.ranks.bounded_store import BoundedStore, StoreError
from fusedcomm.ranks.errand import Errand

T = TypeVar("T")

STALL_AFTER_S = 60.0
"""Seconds: by default a wait that takes this long is a stall."""
_TAG = 0x66757365
"""Tag of messages that are never sent on the user's group; "fuse" in ASCII."""
_FIRST_POLL_S, _POLL_S = 1e-3, 0.25
"""Seconds between two requests of a waiting rank to the store, at first and later; more if there are many ranks. The
later interval also separates two checks of the connections."""
_POLLS_PER_S = 500
"""Most requests of all waiting ranks together that the store gets in a second, in a long wait."""
_GRACE_S = 1.0
"""Seconds that a wait goes on after a rank is lost. The rank may have done its part, which is then still arriving. The
same time passes after the store has failed: a rank whose loss caused that is named."""
_ANSWER_S = 2.0
"""Seconds that the store has to say what ranks were doing, because it may never answer."""
_UNKNOWN = "What it was doing is not known, because the store does not answer"

_connections: "weakref.WeakKeyDictionary[groups.Group, _Connections]" = weakref.WeakKeyDictionary()


class PeerLostError(RuntimeError):
    """Another rank that this rank waits for is lost."""


class GivenUpError(RuntimeError):
    """This rank has stopped what it did, because another rank will not take part. That rank says why."""


class Peers:
    """The ranks of one group while fusedcomm is attached there. Every rank makes one.

    Args:
        store: a store that only this attachment uses.
        timeout: the group's timeout, after which a wait ends.
        stall_after_s: seconds after which a wait is reported, once.
    """

    def __init__(
        self, process_group: groups.Group, store: BoundedStore, timeout: datetime.timedelta, stall_after_s: float
    ) -> None:
        self.rank, self.world_size, self.timeout = process_group.rank(), process_group.size(), timeout
        self.store, self.stall_after_s, self._num_parts = store, stall_after_s, 0
        self._in_job = groups.ranks_in_job(process_group)
        self._store = store.under("peers")
        self._connections = _connections_of(process_group)
        self._poll_s = max(_POLL_S, self.world_size / _POLLS_PER_S)
        self.who = groups.describe_process(process_group)
        if self.world_size > 1:
            self.call(lambda: self._store.set(f"who/{self.rank}", self.who), "attaching")

    @classmethod
    def of(
        cls,
        process_group: groups.Group,
        device: torch.device,
        stall_after: float | None = None,
        what: str = "attaching",
    ) -> "Peers":
        """Those of a new attachment to the group.

        Args:
            device: where the gradients are: waits have the timeout of its backend.
            stall_after: as for :func:`reported_after_s`.
            what: what this rank is doing, for errors.

        Raises:
            RuntimeError: torch.distributed does not know the group.
            PeerLostError: a rank, which may have hosted the store, is lost.
        """
        groups.refuse_unknown(process_group)
        timeout = groups.group_timeout(process_group, device)
        try:
            store = bounded_store.private_store(process_group, timeout)
        except StoreError as error:
            lost = _connections_of(process_group).lost_within(_GRACE_S)
            if not lost:
                raise
            own = f"rank {process_group.rank()} of {process_group.size()}"
            raise _loss(own, lost, f"rank {min(lost)}", what, _UNKNOWN) from error
        return cls(process_group, store, timeout, reported_after_s(stall_after, timeout.total_seconds()))

    def part(self) -> BoundedStore:
        """A store for a further engine of the same ranks. Every rank asks for as many, in the same order."""
        self._num_parts += 1
        return self.store.under(f"beside/{self._num_parts}")

    def title(self, rank: int) -> str:
        """A rank of the group as all ranks of the job know it: "rank 1", of a smaller group "rank 5 of the job"."""
        return f"rank {rank}" if self._in_job is None else f"rank {self._in_job[rank]} of the job"

    def lost(self) -> list[int]:
        """The ranks whose connection to this one has ended. Over gloo only."""
        return list(self._connections.lost())

    def doing(self, what: str) -> None:
        """Publishes what this rank is doing from now on, for the reports of other ranks."""
        if self.world_size > 1:
            _answer(lambda: self._store.set(f"doing/{self.rank}", what))  # of a failed store the next use tells

    def wait(
        self,
        store: BoundedStore,
        keys: Mapping[int, str],
        what: str,
        timeout: datetime.timedelta | None = None,
        is_watched: bool = False,
    ) -> list[int]:
        """Waits until `store` has every key.

        Args:
            keys: for each awaited rank, the key that it sets.
            what: what this rank is doing, for reports; "attaching" for example.
            timeout: None: the group's timeout.
            is_watched: whether the engine's watch reports a long wait, so that this function does not.

        Returns: the ranks whose keys were missing at the timeout; empty if every key was there in time.

        Raises:
            PeerLostError: a rank whose key is missing is lost.
            StoreError: the store has failed.
        """
        timeout_s = (timeout or self.timeout).total_seconds()
        given_up = threading.Event()

        def missing() -> list[int]:
            return [rank for rank, key in keys.items() if not store.check([key])]

        def wait_for_all() -> list[int]:
            # A TCPStore would write to stderr when store.wait() times out.
            began, pause_s = time.monotonic(), _FIRST_POLL_S
            while not given_up.is_set():
                waited_s = time.monotonic() - began
                if store.check(list(keys.values())):
                    return []
                if waited_s >= timeout_s:
                    return missing()
                given_up.wait(pause_s)
                pause_s = min(2 * pause_s, self._poll_s)
            return []

        try:
            return self.call(wait_for_all, what, missing, is_watched)
        finally:
            given_up.set()

    def call(
        self,
        function: Callable[[], T],
        what: str,
        needed: Callable[[], Collection[int]] | None = None,
        is_watched: bool = False,
        given_up: Callable[[], str] | None = None,
    ) -> T:
        """Returns the result of `function`, which may wait for other ranks and is called on a thread of its own.

        If this raises because of a lost rank, the thread is left to end by itself.

        Args:
            needed: returns the ranks that `function` waits for now. None: it waits for all.
            what, is_watched: as for :meth:`wait`.
            given_up: asks the store why another rank will not take part; "" if none has said so.

        Raises:
            PeerLostError: a rank that `function` needs is lost.
            GivenUpError: another rank will not take part.
            StoreError: the store has failed.
        """
        if self.world_size == 1:
            return function()
        errand, question = Errand(function), None
        began, has_said = time.monotonic(), is_watched
        try:
            while not errand.has_ended_within(self._poll_s):
                self._raise_if_lost(errand, what, needed)
                if given_up is not None:
                    question = question or Errand(given_up)
                    if question.has_ended_within(self._poll_s):
                        self._raise_if_given_up(question, what)
                        question = None
                waited_s = time.monotonic() - began
                if waited_s >= self.stall_after_s and not has_said:
                    has_said = True
                    self._report_stall(what, needed, waited_s)
        finally:
            errand.leave()
        try:
            return errand.result()
        except PeerLostError:
            raise
        except RuntimeError as error:  # perhaps from the transport, which names no rank
            self._raise_cause(error, what)

    def _raise_if_given_up(self, question: Errand, what: str) -> None:
        """question: has asked why another rank will not take part."""
        try:
            why = question.result()
        except StoreError as error:
            self._raise_cause(error, what)
        if why:
            raise GivenUpError(f"fusedcomm: rank {self.rank} stopped {what}, since {why}")

    def _raise_cause(self, error: RuntimeError, what: str) -> NoReturn:
        """Raises PeerLostError if a rank is lost, StoreError if the store has failed, else `error`."""
        failure = self._store.failure(error, what) if isinstance(error, dist.DistNetworkError) else error
        lost = self._connections.lost_within(_GRACE_S if isinstance(failure, StoreError) else 0.0)
        if lost:
            failure = self._loss(lost, what)
        raise failure from (None if failure is error else error)

    def _raise_if_lost(self, errand: Errand, what: str, needed: Callable[[], Collection[int]] | None) -> None:
        lost = self._connections.lost()
        if not lost or errand.has_ended_within(_GRACE_S):
            return
        if needed is not None:
            ranks = _answer(needed)
            lost = {rank: cause for rank, cause in lost.items() if ranks is None or rank in ranks}
        if lost:
            raise self._loss(lost, what)

    def _loss(self, lost: Mapping[int, str], what: str) -> PeerLostError:
        name, seen = self._name(min(lost)), self._last_seen(min(lost))
        return _loss(f"rank {self.rank} of {self.world_size}", lost, name, what, seen)

    def _report_stall(self, what: str, needed: Callable[[], Collection[int]] | None, waited_s: float) -> None:
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        ranks = _answer(needed) if needed is not None else others
        if ranks is None:
            about = "for ranks that are not known, because the store does not answer"
        elif needed is None:
            seen = [f"{self._name(rank)}: {self._last_seen(rank)}" for rank in others[:8]]
            about = f"for one or more of {'; '.join(seen)}"
        else:
            awaited = [rank for rank in sorted(ranks) if rank != self.rank]
            if not awaited:
                return  # every awaited rank has come meanwhile
            about = "for " + "; ".join(f"{self._name(rank)}: {self._last_seen(rank)}" for rank in awaited[:8])
            about += f"; and for {len(awaited) - 8} more" if len(awaited) > 8 else ""
        warn_alone(
            f"fusedcomm: rank {self.rank} of {self.world_size} has waited for {waited_s:.1f} s while {what}, {about}. "
            "It goes on waiting",
            stacklevel=6,
        )

    def _name(self, rank: int) -> str:
        who = _answer(lambda: self._store.text(f"who/{rank}"))
        return f"rank {rank} ({who})" if who else f"rank {rank}"

    def _last_seen(self, rank: int) -> str:
        doing = _answer(lambda: self._store.text(f"doing/{rank}"))
        if doing is None:
            return _UNKNOWN
        return f"It was last seen {doing}" if doing else "It has not come to attach"


def warn_alone(text: str, stacklevel: int) -> None:
    """Warns. Never raises, even if warnings are errors: this rank must not fail alone. stacklevel: of warnings.warn."""
    with suppress(Warning):
        warnings.warn(text, stacklevel=stacklevel)


def reported_after_s(stall_after: float | None, timeout_s: float) -> float:
    """Seconds after which a wait is reported: the argument, else STALL_AFTER_S, but at most a third of the group's
    timeout, so that a report comes before it."""
    return min(STALL_AFTER_S, timeout_s / 3) if stall_after is None else float(stall_after)


def _loss(own: str, lost: Mapping[int, str], name: str, what: str, seen: str) -> PeerLostError:
    """own, name: this rank and the first lost one, for people. seen: what is known of that one."""
    others = f" So are ranks {sorted(lost)[1:]}." if len(lost) > 1 else ""
    return PeerLostError(
        f"fusedcomm: {own}: {name} is lost, and this rank waits for it while {what}. {seen}.{others} If it died, its "
        f"own log says why; restart the job from a checkpoint. Its connection: {lost[min(lost)]}"
    )


class _Connections:
    """Tells which connections of a group are lost. Only gloo can tell; `backend` None: none is ever lost."""

    def __init__(self, backend: dist.Backend | None) -> None:
        self._sentinels = None if backend is None else _C.PeerSentinels(backend=backend, tag=_TAG)
        self._lost: dict[int, str] = {}
        self._lock = threading.Lock()

    def lost(self) -> dict[int, str]:
        """For each lost rank, what the backend says about its connection."""
        with self._lock:
            if self._sentinels is not None:
                self._lost.update(self._sentinels.look())
            return dict(self._lost)

    def lost_within(self, seconds: float) -> dict[int, str]:
        """As lost(), for which a loss has so long to be noticed."""
        deadline = time.monotonic() + seconds
        while not (lost := self.lost()) and time.monotonic() < deadline:
            time.sleep(_FIRST_POLL_S)
        return lost


def _connections_of(process_group: groups.Group) -> _Connections:
    connections = _connections.get(process_group)
    if connections is None:
        backend = groups.gloo_backend(process_group) if process_group.size() > 1 else None
        connections = _connections[process_group] = _Connections(backend)
    return connections


def _answer(function: Callable[[], T]) -> T | None:
    """Returns what `function` gets from the store; None if the store fails or does not answer within _ANSWER_S."""
    errand = Errand(function)
    if not errand.has_ended_within(_ANSWER_S):
        return None
    with suppress(RuntimeError):
        return errand.result()
    return None
