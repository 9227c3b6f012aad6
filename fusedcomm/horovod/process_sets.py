"""Process sets: groups of ranks whose collectives run by themselves."""

import datetime
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

import fusedcomm.horovod.membership as membership
from fusedcomm.horovod.calls import Members
from fusedcomm.horovod.world import World, world
from fusedcomm.ranks.channels import connect_gloo
from fusedcomm.ranks.own_group import OwnGroup

TIMEOUT = datetime.timedelta(minutes=30)
"""Time for one call of a backend. It starts when all ranks have agreed on it, and a lost rank's connections close at
once, so only a dead link takes as long."""


class ProcessSet:
    """Some ranks of the job. It can be used once hvd.init() has given it a `process_set_id`.

    Raises ValueError if `ranks` are not numbers, or a rank appears twice.
    """

    process_set_id: int | None = None

    def __init__(self, ranks: Iterable[int]) -> None:
        if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
            raise ValueError(f"ProcessSet({ranks!r}): expected a list of ranks; there is no MPI here")
        listed = list(ranks)
        if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in listed):
            raise ValueError(f"ProcessSet({listed!r}): expected a list of ranks, which are whole numbers")
        if len(set(listed)) != len(listed):
            raise ValueError(f"ProcessSet({listed!r}): a rank appears twice")
        self.ranks: list[int] = sorted(listed)

    def size(self) -> int | None:
        """Number of ranks; None if the set is not in use."""
        return None if self.process_set_id is None else len(_in_use(self).ranks)

    def rank(self) -> int | None:
        """This process's number in the set; None if the set is not in use. Raises ValueError on a non-member."""
        return None if self.process_set_id is None else member_of(self)[1]

    def included(self) -> bool | None:
        """Whether this process is one of the ranks."""
        return world().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


global_process_set = ProcessSet([])
"""Every rank. Its ranks are known after hvd.init()."""
global_process_set.process_set_id = 0


def _in_use(process_set: ProcessSet) -> ProcessSet:
    """Raises ValueError if this init knows no such set."""
    known = world().sets.get(process_set.process_set_id)
    if known is None or known.ranks != process_set.ranks:
        raise ValueError(
            f"{process_set} is not in use in this job of {world().size} ranks: pass it to hvd.init(process_sets=[…])"
        )
    return known


def member_of(process_set: ProcessSet) -> tuple[World, int]:
    """The world, and this process's rank in the set. Raises ValueError if the set is not in use or this process is not
    one of its ranks."""
    found = world()
    set_id = process_set.process_set_id
    if set_id == 0:
        return found, found.rank
    ranks = _in_use(process_set).ranks
    if found.rank not in ranks:
        raise ValueError(f"rank {found.rank} is not in {process_set}: only its members may call operations on it")
    return found, ranks.index(found.rank)


def members_of(process_set: ProcessSet) -> Members:
    """The ranks of the set, for calls. Errors: see :func:`member_of`."""
    found, _ = member_of(process_set)
    assert process_set.process_set_id is not None
    return found.members[process_set.process_set_id]


def root_in_set(process_set: ProcessSet, root_rank: int) -> int:
    """The root's number in the set. `root_rank` is its rank in the job. Raises ValueError if it is not in the set."""
    ranks = process_set.ranks
    if root_rank not in ranks:
        raise ValueError(f"root_rank={root_rank} is not possible: it must be one of the ranks {_short(ranks)}")
    return root_rank if process_set.process_set_id == 0 else ranks.index(root_rank)


def _short(ranks: Sequence[int]) -> str:
    return f"0 to {len(ranks) - 1}" if list(ranks) == list(range(len(ranks))) else str(list(ranks))


def parse_sets(process_sets: Any) -> list[ProcessSet]:
    """The sets given to hvd.init(). Raises ValueError for what is none."""
    if process_sets is None:
        return []
    if isinstance(process_sets, str):
        raise ValueError(
            f"hvd.init(process_sets={process_sets!r}): expected a list of process sets; none can be made later"
        )
    return [each if isinstance(each, ProcessSet) else ProcessSet(each) for each in process_sets]


def make_sets(new: World, sets: list[ProcessSet]) -> None:
    """Makes the global set and those that hvd.init() was given, and connects their ranks. A collective call."""
    everyone = list(range(new.size))
    if membership.is_elastic() and new.meeting > 0:
        sets = [each for each in sets if set(each.ranks) <= set(everyone)]
    else:
        check_ranks([each.ranks for each in sets], everyone)
    global_process_set.ranks = everyone
    for set_id, each in enumerate([global_process_set, *sets]):
        each.process_set_id = set_id
        new.sets[set_id] = each
        if new.rank not in each.ranks:
            continue
        rank, store = each.ranks.index(new.rank), dist.PrefixStore(f"sets/{set_id}", new.store)
        backend = connect_gloo(store, "cpu", rank, len(each.ranks), TIMEOUT)
        group = OwnGroup(store, rank, len(each.ranks), TIMEOUT, {"cpu": backend}, new.rank)
        new.members[set_id] = Members(group)


def check_ranks(sets: list[list[int]], everyone: list[int]) -> None:
    """Raises ValueError for ranks that the job does not have, for no ranks, and for two sets of the same.

    In a job of one rank any set will do, so that a script for even and odd ranks, say, also runs there."""
    known = [everyone]
    for ranks in sets:
        if not set(ranks) <= set(everyone) or (not ranks and len(everyone) > 1):
            raise ValueError(
                f"a process set of the ranks {ranks} is not possible: ranks go from 0 to {len(everyone) - 1}"
            )
        if ranks in known and len(everyone) > 1:
            raise ValueError(f"there is a process set of the ranks {ranks} already; its id is {known.index(ranks)}")
        known.append(ranks)


def forget_sets(old: World) -> None:
    """Marks all sets of the world as not in use."""
    for set_id, process_set in old.sets.items():
        if set_id != 0:
            process_set.process_set_id = None
    old.sets, old.members = {}, {}  # shutdown() may have kept what these were
