"""The process-wide state: init, shutdown, ranks, and what is built in."""

import atexit
import collections
import datetime
import functools
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fusedcomm.horovod.environment as environment
import fusedcomm.horovod.launch as launch
import fusedcomm.horovod.membership as membership
import fusedcomm.horovod.operations as operations
import fusedcomm.horovod.step_reducer as step_reducer
import fusedcomm.horovod.timeline as timeline
from fusedcomm.horovod.order import Order, Request, keep, synchronize
from fusedcomm.horovod.process_sets import ProcessSet, forget_sets, make_sets, parse_sets
from fusedcomm.horovod.signature import Signature
from fusedcomm.horovod.world import World, set_world, world, world_if_any
from fusedcomm.ranks import agreement, own_address
from fusedcomm.ranks.channels import connect_gloo
from fusedcomm.ranks.connections import kept_alive

_lock = threading.RLock()
_given_sets: list[ProcessSet] = []
"""The process sets of the last init()."""
_num_meetings: collections.Counter[str] = collections.Counter()
"""How often the ranks of the job have met, by HOROVOD_TIMELINE: each meeting has a file of its own."""
_kept_local_rank: int | None = None
"""What local_rank() is as long as an elastic job lasts: a script has chosen a GPU by it."""


def init(comm: None = None, process_sets: Sequence[Any] | None = None) -> None:
    """Connects the ranks of the job. A collective call; calls after the first have no effect.

    comm: None; all ranks take part.
    process_sets: the process sets of the job, besides that of all ranks.

    Raises ValueError for arguments that are not possible, for other sets than those of an earlier call, and for
    variables that contradict each other. Raises TimeoutError that names the ranks that did not call.
    """
    global _given_sets
    if comm:
        raise ValueError(
            f"hvd.init(comm={comm!r}) is not possible, because all ranks take part, and there is no MPI: start as many "
            "ranks as the job shall have, or give hvd.init(process_sets=[…])"
        )
    sets = parse_sets(process_sets)
    with _lock:
        if (old := world_if_any()) is None:
            _given_sets = sets
            init_again()
        elif old.order.ended:
            raise ValueError(f"{old.order.ended}. For a job of its own call hvd.shutdown() first")
        elif process_sets is not None and _ranks_of(sets) != _ranks_of(_given_sets):
            raise ValueError(
                f"hvd.init() was called before with process_sets={_ranks_of(_given_sets)}, now with "
                f"process_sets={_ranks_of(sets)}: call hvd.shutdown() on every rank first"
            )


def init_again() -> None:
    """Connects the ranks that there are, as init() did. In an elastic job whose ranks have changed, process sets with a
    rank that is no longer there are not in use, and raise ValueError that says so."""
    new = _met()
    make_sets(new, _given_sets)
    control = None
    if new.size > 1:
        control, new.sockets = kept_alive(lambda: connect_gloo(new.store, "control", new.rank, new.size, new.timeout))
    ranks = [new.sets[set_id].ranks for set_id in sorted(new.sets)]
    new.order = Order(
        new.rank, new.size, ranks, control, new.settings, functools.partial(operations.start, new.members)
    )
    set_world(new)  # from here on the wait for a rank that is silent can be ended
    try:
        # A rank that goes on may end the job while others are still connecting.
        synchronize(new.order.submit(Request(0, Signature("barrier", "init")), at_once=True))
    except BaseException:
        shutdown()
        raise
    path = Path(new.settings.timeline)
    if new.settings.timeline not in ("", "DYNAMIC") and new.rank == 0:
        number = f".{new.meeting + 1}" if new.meeting else ""
        new.timeline = timeline.Writer(
            path.with_name(path.stem + number + path.suffix), new.order, new.settings.mark_cycles
        )


def _ranks_of(sets: list[ProcessSet]) -> list[list[int]]:
    return [each.ranks for each in sets]


def _met() -> World:
    """The ranks, once they have met and agree on the process sets."""
    global _kept_local_rank
    settings, problem = environment.Settings(), ""
    try:
        settings = environment.settings()
    except ValueError as error:  # raised once all ranks have been told
        problem = str(error)
    if settings.interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", settings.interface)
    timeout = datetime.timedelta(seconds=settings.timeout_s)
    found = launch.find(timeout)
    # Several of torchrun's agents may run on one host, with GPUs of their own.
    host = os.environ.get("HOROVOD_HOSTNAME") or f"{own_address.host_name()} {os.environ.get('GROUP_RANK', '')}"
    about = {
        "host": host,
        "local_rank": _kept_local_rank,
        "sets": _ranks_of(_given_sets),
        "problem": problem,
        "meetings": _num_meetings[settings.timeline],
        "changes": membership.num_changes(),
    }
    store, abouts = launch.gather(found, about, timeout)
    for rank, of_rank in enumerate(abouts):
        if of_rank["problem"]:
            raise ValueError(f"hvd.init(): rank {rank} cannot start: {of_rank['problem']}")
    sets = {f"rank {rank}": {"process_sets": of_rank["sets"]} for rank, of_rank in enumerate(abouts)}
    if differs := agreement.difference(sets):
        raise ValueError(f"hvd.init(): {differs}. Give every rank the same sets in the same order")
    meeting = max(of_rank["meetings"] for of_rank in abouts)
    _num_meetings[settings.timeline] = meeting + 1
    membership.agree_on_changes(of_rank["changes"] for of_rank in abouts)
    hosts = [of_rank["host"] for of_rank in abouts]
    places = launch.places(found.rank, hosts, [of_rank["local_rank"] for of_rank in abouts])
    if membership.is_elastic():
        _kept_local_rank = places["local_rank"]
    return World(
        rank=found.rank,
        size=found.size,
        **places,
        hosts=hosts,
        store=store,
        timeout=timeout,
        settings=settings,
        meeting=meeting,
    )


def shutdown() -> None:
    """Ends the job's operations on every rank: pending ones, and later ones until the next hvd.init(), raise
    HorovodInternalError. Without effect before hvd.init()."""
    with _lock:
        old = world_if_any()
        if old is None:
            return
        if not old.order.ended:  # this process is no child of fork()
            old.end_timeline()
            step_reducer.leave_all(old.order.failure or "hvd.shutdown() was called")
            has_ended = old.order.shutdown()
            if not has_ended:
                keep(old.members)  # the end of a backend would wait for a peer that is gone
            old.order.end(old.order.failure or "fusedcomm.horovod was shut down", keeps=not has_ended)
        forget_sets(old)
        set_world(None)


atexit.register(shutdown)


def _leave_to_parent() -> None:
    """In a child of fork(), which has none of the threads: it is no rank of its parent's job, and ends by itself. It
    still knows the rank and the size, for workers that load data."""
    global _lock
    _lock = threading.RLock()
    if (old := world_if_any()) is None or old.order.ended:
        return
    old.timeline = None
    keep(old.members)  # the end of a backend waits for threads
    old.order.end(
        f"fusedcomm.horovod: process {os.getpid()} was forked from rank {old.rank} after hvd.init(), and is no rank of "
        "its job",
        keeps=True,
    )
    # Otherwise the other ranks would not notice the parent's end while the child lives.
    for descriptor in old.sockets:
        os.close(descriptor)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def is_initialized() -> bool:
    """Whether hvd.init() has been called, and hvd.shutdown() not since then."""
    return world_if_any() is not None


def rank() -> int:
    """This process's number in the job, from 0. Raises ValueError before hvd.init(), as the functions below."""
    return world().rank


def size() -> int:
    """The number of processes in the job."""
    return world().size


def local_rank() -> int:
    """This rank's number among those of its host."""
    return world().local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return world().local_size


def cross_rank() -> int:
    """The number of this host among those that have a rank of this local rank."""
    return world().cross_rank


def cross_size() -> int:
    """The number of hosts that have a rank of this local rank."""
    return world().cross_size


def is_homogeneous() -> bool:
    """Whether every host has as many ranks."""
    hosts = world().hosts
    return len({hosts.count(name) for name in hosts}) == 1


def mpi_threads_supported() -> bool:
    """Raises ValueError: there is no MPI here."""
    world()
    raise ValueError("fusedcomm.horovod is built without MPI")


def mpi_built() -> bool:
    """False: there is no MPI, DDL or oneCCL here."""
    return False


mpi_enabled = ddl_built = ccl_built = mpi_built


def gloo_enabled() -> bool:
    """True: ranks always meet, and CPU tensors travel, over sockets and gloo."""
    return True


def gloo_built() -> bool:
    """Whether torch was built with gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """The version as in 22104 for 2.21.4; 0 without NCCL."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = (*torch.cuda.nccl.version(), 0, 0, 0)[:3]
    return major * 10000 + minor * 100 + patch


def cuda_built() -> bool:
    """Whether torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built for ROCm."""
    return torch.version.hip is not None
