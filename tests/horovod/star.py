"""Coordinators that are connected without the Python front end."""

import contextlib
import datetime
import socket
from collections.abc import Iterator

import torch.distributed as dist

from fusedcomm.horovod.engines import open_session
from fusedcomm.native import _C
from fusedcomm.ranks.own_group import OwnGroup


def _sockets(store: dist.Store, rank: int, size: int) -> list[int]:
    """A connection between rank 0 and each other rank, as file descriptors."""
    if size == 1:
        return []
    if rank != 0:
        port = int(store.get("port"))
        peer = socket.create_connection(("127.0.0.1", port))
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.sendall(bytes([rank]))
        return [peer.detach()]
    listener = socket.create_server(("127.0.0.1", 0), backlog=size)
    store.set("port", str(listener.getsockname()[1]))
    found = {}
    while len(found) < size - 1:
        peer, _ = listener.accept()
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number = peer.recv(1)[0]
        found[number] = peer.detach()
    listener.close()
    return [found[peer] for peer in range(1, size)]


def _backend(store: dist.Store, name: str, rank: int, size: int) -> dist.Backend:
    return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, datetime.timedelta(seconds=60))


@contextlib.contextmanager
def star(
    rank: int,
    size: int,
    said: list | None = None,
    engines_by_wire: dict | None = None,
    **options: float,
) -> Iterator:
    """A coordinator with set 0 over all ranks of the default group, and set 1 over the ranks but the last.

    engines_by_wire: receives the synchronizers of set 0, by wire.
    """
    _, store = dist.distributed_c10d._world.pg_map[dist.group.WORLD]
    store = dist.PrefixStore("star", store)

    def open_engine(set_id: int, wire: str) -> "_C.Synchronizer":
        group = OwnGroup(dist.PrefixStore(f"engines/{set_id}", store), rank, size, datetime.timedelta(seconds=60))
        session = open_session(group, wire)
        sessions.append(session)
        if engines_by_wire is not None:
            engines_by_wire[wire] = session.synchronizer
        return session.synchronizer

    sessions = []
    coordinator = _C.Coordinator(
        rank=rank,
        size=size,
        sockets=_sockets(store, rank, size),
        fusion_nbytes=int(options.get("fusion_nbytes", 1 << 20)),
        stall_warning_s=options.get("stall_warning_s", 60.0),
        stall_shutdown_s=options.get("stall_shutdown_s", 0.0),
        say=(said if said is not None else []).append,
        open_engine=open_engine,
    )
    coordinator.add_set(0, list(range(size)), _backend(store, "all", rank, size))
    if size > 1:
        members = list(range(size - 1))
        some = _backend(store, "some", rank, size - 1) if rank < size - 1 else None
        coordinator.add_set(1, members, some)
    try:
        yield coordinator
    finally:
        if not coordinator.failure:
            coordinator.wait(coordinator.submit(_C.CollectiveSignature(kind="barrier", name="end"), [], []))
        coordinator.shutdown()
