"""The sources from which a process learns its rank, the number of ranks, and the store over which they meet.

The first of these that applies: the members of `fusedcomm run --elastic`, torch.distributed if the script has
initialised it, the variables of torchrun and `fusedcomm run`. Otherwise the job is this one process.
"""

import dataclasses
import datetime
import functools
import itertools
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import fusedcomm.horovod.membership as membership
from fusedcomm.ranks import agreement
from fusedcomm.ranks.own_group import OwnGroup
from fusedcomm.ranks.peers import Peers


@dataclasses.dataclass(frozen=True)
class Launch:
    """A place in the job, and the store over which the ranks meet."""

    rank: int
    size: int
    store: dist.Store


def find(timeout: datetime.timedelta) -> Launch:
    """Raises ValueError if the variables contradict each other or name no place to meet, and TimeoutError if a rank
    that begins an elastic job does not come."""
    said = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
    if membership.is_elastic():
        return Launch(*membership.place(lambda: _begin_elastic(_launched(timeout, *said), timeout)))
    if dist.is_initialized():
        _, store = c10d._world.pg_map[c10d._get_default_group()]
        return Launch(dist.get_rank(), dist.get_world_size(), store)
    if said[0] and said[1] not in (None, "1"):
        return _launched(timeout, *said)
    horovods = os.environ.get("HOROVOD_SIZE", "1")
    if said[1] not in (None, "", "1") or (horovods != "1" and not said[1]):
        raise ValueError(
            f"RANK={said[0]!r}, WORLD_SIZE={said[1]!r} and HOROVOD_SIZE={horovods!r} do not say which rank this is and "
            "where the ranks meet: start the script with torchrun or fusedcomm run, or set RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT, as torch.distributed reads them"
        )
    return Launch(0, 1, dist.HashStore())


@functools.cache
def _launched(timeout: datetime.timedelta, *said: str | None) -> Launch:
    """As the variables say, of which these are the values. It is kept: the others may still use a store that this
    process serves."""
    store, found_rank, found_size = next(dist.rendezvous("env://", timeout=timeout))
    # Workers that torchrun has restarted find the store of those before. (Agents of several hosts count apart.)
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = dist.PrefixStore("attempt " + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    return Launch(found_rank, found_size, store)


def _begin_elastic(found: Launch, timeout: datetime.timedelta) -> None:
    """Makes the process group from which members begin, once all have come."""
    gather(found, None, timeout)
    if not dist.is_initialized():
        store = dist.PrefixStore("members", found.store)
        dist.init_process_group("gloo", store=store, rank=found.rank, world_size=found.size)


def gather(found: Launch, about: Any, timeout: datetime.timedelta) -> tuple[dist.Store, list[Any]]:
    """A store of this call alone, and what each rank says. Raises TimeoutError that names the ranks that do not call
    hvd.init() in time."""
    # Ranks may shut down and init any number of times: the store is counted.
    group = OwnGroup(dist.PrefixStore("horovod", found.store), found.rank, found.size, timeout)
    what = "calling hvd.init()"
    peers = Peers.of(group, torch.device("cpu"), what=what)
    try:
        return peers.store.native, agreement.gather(peers, peers.store.under("about"), about, what)
    except RuntimeError as error:
        raise TimeoutError(f"hvd.init(): {error}; HOROVOD_GLOO_TIMEOUT_SECONDS sets the time") from error


def places(rank: int, hosts: list[str], kept: list[int | None]) -> dict[str, int]:
    """local_rank, local_size, cross_rank and cross_size.

    hosts, kept: of each rank the name of its host, and the local rank that it has had in this job. Ranks that have had
    none get the lowest numbers that are free on their host.
    """
    taken = set(zip(hosts, kept, strict=True))
    numbers = []
    for host, number in zip(hosts, kept, strict=True):
        if number is None:
            number = next(each for each in itertools.count() if (host, each) not in taken)
        taken.add((host, number))
        numbers.append(number)
    # The hosts that have a rank of my number.
    cross = [host for host in dict.fromkeys(hosts) if (host, numbers[rank]) in taken]
    return {
        "local_rank": numbers[rank],
        "local_size": hosts.count(hosts[rank]),
        "cross_rank": cross.index(hosts[rank]),
        "cross_size": len(cross),
    }
