"""The sources from which a process learns its rank, the number of ranks, and the store over which they meet.

The first of these that applies: what :func:`set_launch` has given, the store of `fusedcomm run --elastic`,
torch.distributed if the script has initialised it, HOROVOD_* variables, torchrun's variables. Otherwise the job is this
one process.
"""

import contextlib
import dataclasses
import datetime
import ipaddress
import json
import os
import time
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import fusedcomm.horovod.rendezvous as rendezvous
from fusedcomm.horovod.environment import Settings
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
    timeout: datetime.timedelta
    is_horovods: bool = False


_given: Callable[[], Launch] | None = None
# TCPStores by (host, port): a process that hosts one must keep it, since others may still use it.
_stores: dict[tuple[str, int], dist.Store] = {}


def set_launch(function: Callable[[], Launch] | None) -> None:
    """Has the next hvd.init() ask `function` for rank, size and store. None: as usual again."""
    global _given
    _given = function


def find(settings: Settings) -> Launch:
    """Raises ValueError if the variables contradict each other or name no place to meet."""
    timeout = datetime.timedelta(seconds=settings.timeout_s)
    if _given is not None:
        return _given()
    if rendezvous.is_elastic():
        return Launch(*rendezvous.meet(), timeout)
    if dist.is_initialized():
        group = dist.distributed_c10d._get_default_group()
        _, store = c10d._world.pg_map[group]
        return Launch(dist.get_rank(), dist.get_world_size(), store, timeout)
    if "HOROVOD_RANK" in os.environ and SET_BY not in os.environ:
        return _from_horovod_variables(timeout)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, size = _number("RANK"), _number("WORLD_SIZE")
        if size == 1:
            return Launch(rank, 1, dist.HashStore(), timeout)
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        # Workers that torchrun has restarted find the store of those before. (Agents of several hosts count apart.)
        if os.environ.get("GROUP_WORLD_SIZE") == "1":
            store = dist.PrefixStore("attempt " + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        return Launch(rank, size, store, timeout)
    return Launch(0, 1, dist.HashStore(), timeout)


def _from_horovod_variables(timeout: datetime.timedelta) -> Launch:
    rank, size = _number("HOROVOD_RANK"), _number("HOROVOD_SIZE")
    if not 0 <= rank < size:
        raise ValueError(f"HOROVOD_RANK={rank} is not possible with HOROVOD_SIZE={size}: ranks go from 0 to {size - 1}")
    if size == 1:
        return Launch(0, 1, dist.HashStore(), timeout, is_horovods=True)
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
    return Launch(rank, size, _stores[where], timeout, is_horovods=True)


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


def fresh(launch: Launch) -> dist.Store:
    """The launch's store under a prefix for this init: ranks may shut down and init any number of times. Every rank
    must init as often as the others; the count is the store's, since a rank may be another process than before."""
    ours = dist.PrefixStore("fusedcomm/horovod", launch.store)
    count = ours.add(f"inits/{launch.rank}", 1)
    return dist.PrefixStore(f"{count}/{launch.size}", ours)


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


def exchange(launch: Launch, store: dist.Store, about: dict) -> list[dict]:
    """What each rank says of itself. Raises TimeoutError that names the ranks that say nothing."""
    store.set(f"about/{launch.rank}", json.dumps(about))
    deadline, pause_s = time.monotonic() + launch.timeout.total_seconds(), 1e-3
    keys = [f"about/{rank}" for rank in range(launch.size)]
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise TimeoutError(
                f"fusedcomm.horovod: hvd.init() took too long: ranks {missing} of {launch.size} have not connected "
                f"within {launch.timeout.total_seconds():.0f} s. Check that they run and call hvd.init(); "
                "HOROVOD_GLOO_TIMEOUT_SECONDS sets the time"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return [json.loads(store.get(key)) for key in keys]


# Variables in which launchers say a process's place, in the order local rank and size, cross rank and size.
_PLACES = ("local_rank", "local_size", "cross_rank", "cross_size")
_TORCHRUNS = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def places(rank: int, hosts: list[str], is_horovods: bool) -> dict[str, int]:
    """local_rank, local_size, cross_rank and cross_size, as the launcher says, or else from each rank's host name."""
    mine = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    local_rank = mine.index(rank)
    # The hosts that have a rank of my number.
    cross = [name for name in dict.fromkeys(hosts) if hosts.count(name) > local_rank]
    found = dict(zip(_PLACES, (local_rank, len(mine), cross.index(hosts[rank]), len(cross)), strict=True))
    for name, torchruns in zip(_PLACES, _TORCHRUNS, strict=True):
        text = os.environ.get(f"HOROVOD_{name.upper()}" if is_horovods else torchruns, "")
        if text.isdigit():
            found[name] = int(text)
    return found


def publish(values: dict[str, int]) -> None:
    """Sets HOROVOD_RANK and the like in the environment, where scripts look for them."""
    os.environ.update((f"HOROVOD_{name.upper()}", str(value)) for name, value in values.items())
    os.environ[SET_BY] = str(os.getpid())
