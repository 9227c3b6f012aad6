"""The store of the user's process group, over which its ranks find each other."""

import contextlib
import datetime
import os

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fusedcomm.ranks.bounded_store import BoundedStore
from fusedcomm.ranks.groups import Group
from fusedcomm.ranks.own_group import OwnGroup


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


def store_port(process_group: Group) -> int:
    """The port of the group's store if that is a TCPStore, else 0."""
    address = store_address(process_group)
    return 0 if address is None else address[1]


def innermost_store(process_group: Group) -> dist.Store:
    """The group's store without its prefixes."""
    store = _store_of(process_group)
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
