"""The store of the user's process group, over which its ranks find each other. Every request to it ends."""

import contextlib
import datetime
import os
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fusedcomm.native import _C
from fusedcomm.ranks.errand import Errand
from fusedcomm.ranks.groups import Group
from fusedcomm.ranks.own_group import OwnGroup

T = TypeVar("T")


class StoreError(RuntimeError):
    """The process group's store has failed, or has not answered in time."""

    is_silence = False
    """Whether the store has not answered yet, but still may."""


class BoundedStore:
    """A store whose every request ends within `timeout`, and whose errors say which store has failed.

    A request to a TCPStore blocks for as long as the process that hosts it is stopped or cut off. It is therefore made
    on a thread of its own, which is left behind if there is no answer.

    Args:
        native: the store. Only code that may block, and is therefore not on the main thread, uses it directly.
        about: what the store is and which process hosts it, as from :func:`describe_store`.

    Every request raises StoreError if the store fails or does not answer.
    """

    def __init__(self, native: dist.Store, timeout: datetime.timedelta, about: str) -> None:
        self.native = native
        self.about, self._timeout = about, timeout

    def under(self, prefix: str) -> "BoundedStore":
        """The part of this store whose keys begin with `prefix`."""
        return BoundedStore(dist.PrefixStore(prefix, self.native), self._timeout, self.about)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(lambda: self.native.set(key, value), f"setting {key!r}")

    def get(self, key: str) -> bytes:
        return self._ask(lambda: self.native.get(key), f"reading {key!r}")

    def text(self, key: str) -> str:
        """The text of a key; empty if the key is not set."""
        return self.get(key).decode() if self.check([key]) else ""

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._ask(lambda: self.native.multi_get(list(keys)), f"reading {keys[0]!r} to {keys[-1]!r}")

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(lambda: self.native.check(list(keys)), f"looking for {keys[0]!r}")

    def add(self, key: str, amount: int) -> int:
        return self._ask(lambda: self.native.add(key, amount), f"adding to {key!r}")

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._ask(lambda: self.native.compare_set(key, expected, desired), f"setting {key!r}")

    def delete_key(self, key: str) -> bool:
        return self._ask(lambda: self.native.delete_key(key), f"removing {key!r}")

    def failure(self, error: Exception | str, asked: str, or_else: str = "") -> StoreError:
        """The error of a request. asked: what was asked for; "reading 'key'" for example. or_else: another cause."""
        reason = error if isinstance(error, str) else _first_line(error)
        return StoreError(
            f"fusedcomm: the process group's store failed ({asked}): {reason}. It is {self.about}. That process was "
            f"killed, has left, is stopped or is cut off{or_else}: look at its log, and restart the job"
        )

    def _ask(self, request: Callable[[], T], asked: str) -> T:
        errand = Errand(request)
        timeout_s = self._timeout.total_seconds()
        if not errand.has_ended_within(timeout_s):
            raise self.failure(f"no answer within {timeout_s:g} s", asked, ", or the link to it is full")
        try:
            return errand.result()
        except NotImplementedError:  # a store need not have every request
            raise
        except RuntimeError as error:
            raise self.failure(error, asked) from error


class OwnClient(BoundedStore):
    """A store over a connection of its own, which a wait of other code on the same store does not delay; see
    csrc/transport/store_client.h. Possible are check(), get(), multi_get(), set() and compare_set().

    While a request is late, others raise StoreError with `is_silence`. A failed connection is made again; a request may
    therefore be made twice.
    """

    def __init__(self, store: dist.Store, timeout: datetime.timedelta, about: str) -> None:
        self._client = _C.StoreClient(store=store, timeout_s=timeout.total_seconds())
        super().__init__(cast("dist.Store", self._client), timeout, about)  # it has the requests that are possible
        self.loss = ""
        """Why no more requests are made: the store has failed again after it was connected again. Empty: they are."""

    def _ask(self, request: Callable[[], T], asked: str) -> T:
        if self.loss:
            raise StoreError(self.loss)
        try:
            return request()
        except TimeoutError:
            text, problem = f"no answer within {self._timeout.total_seconds():g} s", self._client.problem
            error = StoreError(f"{text} of reconnecting after the error: {problem}" if problem else text)
            error.is_silence = not problem
            raise error from None
        except RuntimeError as error:
            self.loss = _first_line(error)
            raise StoreError(self.loss) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]  # torch's text continues with a backtrace


def private_store(process_group: Group, timeout: datetime.timedelta = dist.default_pg_timeout) -> BoundedStore:
    """The group's store under a prefix for this attachment. Every rank must attach in the same order.

    timeout: within which each request ends.
    """
    name = "" if isinstance(process_group, OwnGroup) else process_group.group_name
    store = BoundedStore(_store_of(process_group), timeout, describe_store(process_group))
    ours = store.under(f"fusedcomm/{name}")
    # Counted in the store, not in this process: a new group begins at 1, also after another of its name was destroyed.
    count = ours.add(f"attachments/{process_group.rank()}", 1)
    return ours.under(str(count))


def _store_of(process_group: Group) -> dist.Store:
    if isinstance(process_group, OwnGroup):
        return process_group.store
    _, store = c10d._world.pg_map[process_group]
    return store


def own_client(store: BoundedStore) -> dist.Store:
    """The same store over its own connection, if it can be cloned: an endless wait there does not block `store`.

    Not for the main thread: a clone of a TCPStore whose host is gone tries to connect for the store's whole timeout.
    """
    with contextlib.suppress(RuntimeError, NotImplementedError):  # stores written in Python need not have clone()
        return store.native.clone()
    return store.native


def describe_store(process_group: Group) -> str:
    """Says what the group's store is and which process hosts it, if known: the end of "It is …". Never empty."""
    store = innermost_store(process_group)
    if isinstance(store, dist.FileStore):
        return f"the file {store.path}"
    if not isinstance(store, dist.TCPStore):
        return f"a {type(store).__name__}"
    where = f"a TCPStore at {store.host}:{store.port}, "
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return where + "hosted by torchrun's agent there"
    return where + "hosted by rank 0 of the job, unless the script has made it elsewhere"


def store_address(process_group: Group) -> tuple[str, int] | None:
    """The host and port of the group's store; None if it is no TCPStore."""
    store = innermost_store(process_group)
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None


def innermost_store(process_group: Group) -> dist.Store:
    """The group's store without its prefixes."""
    store = _store_of(process_group)
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
