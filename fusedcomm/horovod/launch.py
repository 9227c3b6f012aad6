"""The sources from which a process learns its rank, the number of ranks, and the store over which they meet.

The first of these that applies: the members of `fusedcomm run --elastic`, torch.distributed if the script has
initialised it, HOROVOD_* variables, torchrun's variables. Otherwise the job is this one process.
"""

import contextlib
import dataclasses
import datetime
import ipaddress
import os

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import fusedcomm.horovod.membership as membership
from fusedcomm.ranks.own_group import served_store

SET_BY = "FUSEDCOMM_HOROVOD_SET_BY"
"""The process whose hvd.init() has set HOROVOD_RANK and so on. They then say nothing about how it was launched, nor
about its children."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """`is_horovods`: HOROVOD_RANK has told this process its rank."""

    rank: int
    size: int
    store: dist.Store
    is_horovods: bool = False


# TCPStores by (host, port): a process that hosts one must keep it, since others may still use it.
_stores: dict[tuple[str, int], dist.Store] = {}


def find(timeout: datetime.timedelta) -> Launch:
    """Raises ValueError if the variables contradict each other or name no place to meet."""
    if membership.is_elastic():
        return Launch(*membership.place())
    if dist.is_initialized():
        group = dist.distributed_c10d._get_default_group()
        _, store = c10d._world.pg_map[group]
        return Launch(dist.get_rank(), dist.get_world_size(), store)
    if "HOROVOD_RANK" in os.environ and SET_BY not in os.environ:
        return _from_horovod_variables(timeout)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, size = _number("RANK"), _number("WORLD_SIZE")
        if size == 1:
            return Launch(rank, 1, dist.HashStore())
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        # Workers that torchrun has restarted find the store of those before. (Agents of several hosts count apart.)
        if os.environ.get("GROUP_WORLD_SIZE") == "1":
            store = dist.PrefixStore("attempt " + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        return Launch(rank, size, store)
    return Launch(0, 1, dist.HashStore())


def _from_horovod_variables(timeout: datetime.timedelta) -> Launch:
    rank, size = _number("HOROVOD_RANK"), _number("HOROVOD_SIZE")
    if not 0 <= rank < size:
        raise ValueError(f"HOROVOD_RANK={rank} is not possible with HOROVOD_SIZE={size}: ranks go from 0 to {size - 1}")
    if size == 1:
        return Launch(0, 1, dist.HashStore(), is_horovods=True)
    host = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") or os.environ.get("MASTER_ADDR")
    port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT") or os.environ.get("MASTER_PORT")
    if not host or not port:
        raise ValueError(
            f"HOROVOD_RANK={rank} and HOROVOD_SIZE={size} are set, but not where the ranks meet: set "
            "HOROVOD_GLOO_RENDEZVOUS_ADDR to a host name of rank 0 and HOROVOD_GLOO_RENDEZVOUS_PORT to a free port "
            "there, the same on every rank; or start the script with torchrun, without HOROVOD_RANK"
        )
    where = (host, int(port))
    if where not in _stores:
        is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_master = rank == 0 and not is_hosted
        _stores[where] = _store_at(*where, is_master, timeout)
    return Launch(rank, size, _stores[where], is_horovods=True)


def _store_at(host: str, port: int, is_master: bool, timeout: datetime.timedelta) -> dist.Store:
    # A name may stand for loopback on its own host, where others must reach the store: it gets all interfaces. So does
    # an address that is translated on its way, and this process may serve the port already.
    if is_master:
        with contextlib.suppress(ValueError, OSError):
            return served_store(str(ipaddress.ip_address(host)), port, timeout, multi_tenant=True)
    return dist.TCPStore(host, port, None, is_master, timeout, wait_for_workers=False, multi_tenant=True)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdigit():
        raise ValueError(f"{name}={text!r} is not possible: use a whole number, or start the script with torchrun")
    return int(text)


def subset(launch: Launch, ranks: list[int]) -> Launch:
    """The job of those ranks alone, numbered anew in their order. Raises ValueError if this rank is none of them."""
    if sorted(set(ranks)) != sorted(ranks) or not all(0 <= rank < launch.size for rank in ranks):
        raise ValueError(f"hvd.init(comm={ranks}): expected different ranks from 0 to {launch.size - 1}")
    if launch.rank not in ranks:
        raise ValueError(
            f"hvd.init(comm={ranks}): rank {launch.rank} is not one of them, so it must not call hvd.init()"
        )
    name = "ranks " + ",".join(map(str, ranks))
    store = dist.PrefixStore(name, launch.store)
    return dataclasses.replace(launch, rank=ranks.index(launch.rank), size=len(ranks), store=store)


# Variables in which launchers say a process's place, in the order local rank and size, cross rank and size.
_PLACES = ("local_rank", "local_size", "cross_rank", "cross_size")
_TORCHRUNS = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def places(rank: int, hosts: list[str], is_horovods: bool) -> dict[str, int]:
    """local_rank, local_size, cross_rank and cross_size, as the launcher says; in an elastic job, or if it does not,
    from each rank's host name."""
    mine = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    local_rank = mine.index(rank)
    # The hosts that have a rank of my number.
    cross = [name for name in dict.fromkeys(hosts) if hosts.count(name) > local_rank]
    found = dict(zip(_PLACES, (local_rank, len(mine), cross.index(hosts[rank]), len(cross)), strict=True))
    for name, torchruns in zip(_PLACES, _TORCHRUNS, strict=True):
        text = os.environ.get(f"HOROVOD_{name.upper()}" if is_horovods else torchruns, "")
        if text.isdigit() and not membership.is_elastic():
            found[name] = int(text)
    return found


def publish(values: dict[str, int]) -> None:
    """Sets HOROVOD_RANK and the like in the environment, where scripts look for them."""
    os.environ.update((f"HOROVOD_{name.upper()}", str(value)) for name, value in values.items())
    os.environ[SET_BY] = str(os.getpid())
