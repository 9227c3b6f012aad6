"""The sources from which a process learns its rank, the number of ranks, and the store over which they meet.

The first of these that applies: the members of `fusedcomm run --elastic`, torch.distributed if the script has
initialised it, the variables of torchrun and `fusedcomm run`. Otherwise the job is this one process.
"""

import dataclasses
import datetime
import functools
import os

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import fusedcomm.horovod.membership as membership

SET_BY = "FUSEDCOMM_HOROVOD_SET_BY"
"""The process whose hvd.init() has set HOROVOD_RANK and so on: no launcher has."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """A place in the job, and the store over which the ranks meet."""

    rank: int
    size: int
    store: dist.Store


def find(timeout: datetime.timedelta) -> Launch:
    """Raises ValueError if the variables contradict each other or name no place to meet."""
    if membership.is_elastic():
        return Launch(*membership.place())
    if dist.is_initialized():
        _, store = c10d._world.pg_map[c10d._get_default_group()]
        return Launch(dist.get_rank(), dist.get_world_size(), store)
    said = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
    if said[0] and said[1] not in (None, "1"):
        return _launched(timeout, *said)
    horovods = "1" if SET_BY in os.environ else os.environ.get("HOROVOD_SIZE", "1")
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


def subset(launch: Launch, ranks: list[int]) -> Launch:
    """The job of those ranks alone, numbered anew in their order. Raises ValueError if this rank is none of them."""
    if sorted(set(ranks)) != sorted(ranks) or not all(0 <= rank < launch.size for rank in ranks):
        raise ValueError(f"hvd.init(comm={ranks}): expected different ranks from 0 to {launch.size - 1}")
    if launch.rank not in ranks:
        raise ValueError(
            f"hvd.init(comm={ranks}): rank {launch.rank} is not one of them, so it must not call hvd.init()"
        )
    store = dist.PrefixStore("ranks " + ",".join(map(str, ranks)), launch.store)
    return Launch(ranks.index(launch.rank), len(ranks), store)


# A process's place in the order local rank and size, cross rank and size, and the variables in which torchrun says it.
_PLACES = ("local_rank", "local_size", "cross_rank", "cross_size")
_TORCHRUNS = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def places(rank: int, hosts: list[str]) -> dict[str, int]:
    """local_rank, local_size, cross_rank and cross_size, as the launcher says; in an elastic job, or if it does not,
    from each rank's host name."""
    mine = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    local_rank = mine.index(rank)
    # The hosts that have a rank of my number.
    cross = [name for name in dict.fromkeys(hosts) if hosts.count(name) > local_rank]
    found = dict(zip(_PLACES, (local_rank, len(mine), cross.index(hosts[rank]), len(cross)), strict=True))
    for name, torchruns in zip(_PLACES, _TORCHRUNS, strict=True):
        text = os.environ.get(torchruns, "")
        if text.isdigit() and not membership.is_elastic():
            found[name] = int(text)
    return found


def publish(values: dict[str, int]) -> None:
    """Sets HOROVOD_RANK and the like in the environment, where scripts look for them."""
    os.environ.update((f"HOROVOD_{name.upper()}", str(value)) for name, value in values.items())
    os.environ[SET_BY] = str(os.getpid())
