"""Process groups: reads the user's group, and makes fusedcomm's own channels over its ranks or some of them."""

import contextlib
import dataclasses
import datetime
import os
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fusedcomm.native import _C
from fusedcomm.ranks import own_address, torch_groups
from fusedcomm.ranks.bounded_store import BoundedStore
from fusedcomm.ranks.hosts import Hosts
from fusedcomm.ranks.own_group import OwnGroup

Group: TypeAlias = dist.ProcessGroup | OwnGroup

# torch 2.13 has given these new names, and warns of the old ones.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

# Threads of one channel's gloo context: as many of its all-reduces run at once. One all-reduce of 8 to 32 MiB uses half
# of a link; four chunks under way fill it.
GLOO_THREADS = 4


LINK_MESSAGES_NBYTES = ((2 << 10, 2 << 20), (128 << 10, 2 << 20), (1 << 20, 8 << 20))
"""Messages that time a link, as (bytes to each rank, most bytes to all ranks). The first gives the fixed time of a
message. The last is sent only if the second takes too little time."""
# All-to-alls of each message.
LINK_ROUNDS = 6
LONG_ENOUGH_S = 1e-3
"""Seconds beyond the first message's time that suffice: a busy machine adds less than that to most messages."""
MIN_S_PER_BYTE = 1e-11
"""Least result, in seconds a byte: no link is faster."""


@dataclasses.dataclass(frozen=True)
class Channels:
    """fusedcomm's own backends: `scatter` for the first collective of a sum, `gather` for the second of a two-shot."""

    scatter: dist.Backend
    gather: dist.Backend


@dataclasses.dataclass(frozen=True)
class HostChannels:
    """fusedcomm's own backends for sums on two levels: `local` ones connect the ranks of a host, `cross` ones the ranks
    with the same number on every host."""

    local_scatter: dist.Backend
    local_gather: dist.Backend
    cross_scatter: dist.Backend
    cross_gather: dist.Backend


def check_backend(process_group: Group, device: torch.device) -> None:
    """Raises RuntimeError if fusedcomm cannot move gradients on this device over the group's backend."""
    possible = torch_groups.BACKENDS.get(device.type)
    if possible is None:
        raise RuntimeError(
            f"fusedcomm: the gradients are on {device}; fusedcomm moves them on {' and '.join(torch_groups.BACKENDS)} "
            "only. Leave DDP's default all-reduce on other devices."
        )
    wanted = possible[0]
    if isinstance(process_group, OwnGroup):
        name = backend = process_group.backend_name(device)
    else:
        name = dist.get_backend_config(process_group)
        backend = c10d.BackendConfig(dist.Backend(name)).get_device_backend_map().get(device.type)
    if backend not in possible:
        raise RuntimeError(
            f"fusedcomm: the process group's backend for {device.type} tensors is {backend!r} (of {name!r}); fusedcomm "
            f"moves {device.type} gradients over {wanted}: use init_process_group('{wanted}') or leave DDP's default "
            "all-reduce"
        )
    if device.type == "cuda":
        torch_groups.refuse_unread(process_group._get_backend(device))


def refuse_unknown(process_group: Group) -> None:
    """Raises RuntimeError if torch.distributed does not know the group, and so has no store and no backends for it.

    Such a group is a class written in Python, or has been destroyed, or this rank is not in it.
    """
    if isinstance(process_group, OwnGroup) or process_group in c10d._world.pg_map:
        return
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise RuntimeError(
            f"fusedcomm: rank {dist.get_rank()} is not in the process group, which new_group() made of other ranks: "
            "use fusedcomm on the group's ranks only"
        )
    kind = type(process_group)
    what = (
        "has been destroyed, or was not made by torch.distributed"
        if kind is dist.ProcessGroup
        else f"is a {kind.__module__}.{kind.__qualname__}, which torch.distributed did not make"
    )
    raise RuntimeError(
        f"fusedcomm: the process group {what}. fusedcomm connects the ranks of a group over channels of its own, for "
        "which it needs the group's store and its gloo or NCCL backend: make the group with "
        "torch.distributed.init_process_group() or new_group(), and give that one to DistributedDataParallel, "
        "GradReducer, DataParallel, CommState or the device mesh"
    )


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


def describe_process(process_group: Group) -> str:
    """Names this rank's process and host, for people. Never empty."""
    if isinstance(process_group, OwnGroup):
        return process_group.describe_process()
    text = own_address.own_process()
    return text if process_group.rank() == dist.get_rank() else f"{text}, rank {dist.get_rank()} of the job"


def ranks_in_job(process_group: Group) -> list[int] | None:
    """The numbers that the group's ranks have in the job; None if the group has all ranks, or is fusedcomm's own."""
    if isinstance(process_group, OwnGroup) or process_group.size() == dist.get_world_size():
        return None
    return dist.get_process_group_ranks(process_group)


def gloo_backend(process_group: Group) -> dist.Backend | None:
    """The group's backend for CPU tensors if that is gloo, else None."""
    with contextlib.suppress(RuntimeError):  # it has no backend for CPU tensors
        backend = process_group._get_backend(torch.device("cpu"))
        return backend if backend.name() == "gloo" else None
    return None


def group_timeout(process_group: Group, device: torch.device) -> datetime.timedelta:
    """The timeout of the group's backend for `device`. Raises RuntimeError if it has none."""
    if isinstance(process_group, OwnGroup):
        return process_group.timeout
    return process_group._get_backend(device).options._timeout


def make_channels(process_group: Group, device: torch.device, store: dist.Store) -> Channels:
    """Connects the ranks of `process_group` over two new gloo backends, with the group's timeout. A collective call."""
    timeout = group_timeout(process_group, device)
    rank, world_size = process_group.rank(), process_group.size()
    scatter, gather = (_gloo(store, name, rank, world_size, timeout) for name in ("scatter", "gather"))
    return Channels(scatter, gather)


def make_host_channels(process_group: Group, device: torch.device, store: dist.Store, hosts: Hosts) -> HostChannels:
    """Connects this rank with the ranks of its host, and with one rank on each other host. A collective call.

    On cuda both collectives of a level share a communicator, because they are enqueued on one stream. The communicators
    are connected on return.
    """
    timeout = group_timeout(process_group, device)
    local_rank, host = hosts.place(process_group.rank())
    local = (local_rank, hosts.ranks_per_host, timeout)
    cross = (host, hosts.num_hosts, timeout)
    if device.type == "cuda":
        on_host = torch_groups.own_nccl(store, f"local/{host}", *local, device)
        between = torch_groups.own_nccl(store, f"cross/{local_rank}", *cross, device)
        return HostChannels(on_host, on_host, between, between)
    return HostChannels(
        _gloo(store, f"local scatter/{host}", *local),
        _gloo(store, f"local gather/{host}", *local),
        _gloo(store, f"cross scatter/{local_rank}", *cross),
        _gloo(store, f"cross gather/{local_rank}", *cross),
    )


def end_together() -> None:
    """Destroys the job's process group once every rank has called this. A collective call.

    A rank that exits right after a collective may get SIGABRT from a gloo thread that still holds it: with a DDP model,
    `destroy_process_group()` does not wait for these threads (torch 2.13). This function does not wait for them either,
    but ranks wait here for the slowest one, which takes long enough except on a very busy machine.
    """
    dist.barrier()
    dist.destroy_process_group()


def time_link(backend: dist.Backend) -> float | None:
    """Roughly the seconds for each byte that a rank sends in an all-to-all; equal on every rank. None for one rank.

    A collective call. It sends about 800 KiB to each rank, and 6 MiB more if that is too fast to measure, but at most
    60 MiB to all of them.
    """
    p = backend.size()
    if p == 1:
        return None
    (small, most), *larger = LINK_MESSAGES_NBYTES
    small_s = _C.all_to_all_s(backend, min(small, most // p), LINK_ROUNDS)
    for to_each, most in larger:
        nbytes = min(to_each, most // p)
        beyond_s = max(_C.all_to_all_s(backend, nbytes, LINK_ROUNDS) - small_s, 0.0)
        if beyond_s >= LONG_ENOUGH_S:
            break
    return max(beyond_s / ((p - 1) * nbytes), MIN_S_PER_BYTE)


def gloo_backend_over(store: dist.Store, name: str, rank: int, size: int, timeout: datetime.timedelta) -> dist.Backend:
    """A new gloo backend over the ranks that call this with the same name. A collective call of these ranks."""
    return _gloo(store, name, rank, size, timeout)


def _gloo(store: dist.Store, name: str, rank: int, size: int, timeout: datetime.timedelta) -> dist.Backend:
    try:
        return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, _gloo_options(timeout))
    except dist.DistError:
        raise
    except RuntimeError as error:  # for example, the system has no thread left
        raise RuntimeError(
            f"fusedcomm: gloo's channel {name!r} over {size} ranks, with {GLOO_THREADS} threads and one for each "
            f"network device, could not be made: {error}"
        ) from error


def _gloo_options(timeout: datetime.timedelta) -> "dist.ProcessGroupGloo._Options":
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    # The interfaces that torch gives to a gloo group.
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [dist.ProcessGroupGloo.create_device(interface=name) for name in interfaces] or [
        dist.ProcessGroupGloo.create_default_device()
    ]
    options._threads = GLOO_THREADS * len(options._devices)
    return options
