"""The process-wide state: init, shutdown, ranks, and what is built in."""

import atexit
import ctypes
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
import fusedcomm.horovod.handles as handles
import fusedcomm.horovod.launch as launch
import fusedcomm.horovod.membership as membership
import fusedcomm.horovod.operations as operations
import fusedcomm.horovod.step_reducer as step_reducer
import fusedcomm.horovod.timeline as timeline
from fusedcomm.horovod.engines import open_sums
from fusedcomm.horovod.order import Order, Request
from fusedcomm.horovod.process_sets import forget_sets, make_sets, parse_sets
from fusedcomm.horovod.signature import Signature
from fusedcomm.horovod.world import Ended, World, set_world, world, world_if_any
from fusedcomm.ranks import agreement, own_address
from fusedcomm.ranks.channels import connect_gloo
from fusedcomm.ranks.connections import kept_alive
from fusedcomm.ranks.own_group import OwnGroup
from fusedcomm.ranks.peers import Peers

_lock = threading.RLock()


def init(comm: Sequence[int] | None = None, process_sets: Sequence[Any] | None = None) -> None:
    """Connects the ranks of the job. A collective call; calls after the first have no effect.

    comm: the ranks that take part, all others must not call; None: every rank.
    process_sets: the process sets of the job, besides that of all ranks.

    Raises ValueError for arguments that are not possible, for other arguments than those of an earlier call, and for
    variables that contradict each other. Raises TimeoutError that names the ranks that did not call.
    """
    sets = parse_sets(process_sets)
    asked_for = (_parse_comm(comm), tuple(tuple(process_set.ranks) for process_set in sets))
    with _lock:
        if (old := world_if_any()) is not None:
            if isinstance(old.order, Ended):
                raise ValueError(f"{old.order.failure}. For a job of its own call hvd.shutdown() first")
            if asked_for != old.asked_for and (comm is not None or process_sets is not None):
                raise ValueError(
                    f"hvd.init() was called before with {_said(old.asked_for)}, now with {_said(asked_for)}: call "
                    "hvd.shutdown() on every rank first"
                )
            return
        new = _met(asked_for)
        make_sets(new, sets, open_sums)
        control = None
        if new.size > 1:
            control, new.sockets = kept_alive(
                lambda: connect_gloo(new.store, "control", new.rank, new.size, new.timeout)
            )
        ranks = [new.sets[set_id].ranks for set_id in sorted(new.sets)]
        start = functools.partial(_start, new.members)
        new.order = Order(new.rank, new.size, ranks, control, new.settings, start)
        try:
            # A rank that goes on may end the job while others are still connecting.
            barrier = Request(0, Signature("barrier", "init"))
            new.order.submit(barrier, at_once=True)
            new.order.wait(barrier)
        except BaseException:
            new.order.shutdown()
            raise
        set_world(new)
    if new.settings.timeline and new.settings.timeline != "DYNAMIC" and new.rank == 0:
        new.timeline = timeline.Writer(Path(new.settings.timeline), new.order, new.settings.mark_cycles)


def _met(asked_for: tuple) -> World:
    """The ranks, once they have met and agree on the process sets."""
    settings, problem = environment.Settings(), ""
    try:
        settings = environment.settings()
    except ValueError as error:  # raised once all ranks have been told
        problem = str(error)
    if settings.interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", settings.interface)
    timeout = datetime.timedelta(seconds=settings.timeout_s)
    found = launch.find(timeout)
    if asked_for[0] is not None:
        found = launch.subset(found, list(asked_for[0]))
    # Ranks may shut down and init any number of times: the store is counted.
    group = OwnGroup(dist.PrefixStore("horovod", found.store), found.rank, found.size, timeout)
    peers = Peers.of(group, torch.device("cpu"), what="calling hvd.init()")
    hostname = os.environ.get("HOROVOD_HOSTNAME") or own_address.host_name()
    about = {"host": hostname, "sets": asked_for[1], "problem": problem, "changes": membership.num_changes()}
    try:
        abouts: list[Any] = agreement.gather(peers, peers.store.under("about"), about, "calling hvd.init()")
    except RuntimeError as error:
        raise TimeoutError(f"hvd.init(): {error}; HOROVOD_GLOO_TIMEOUT_SECONDS sets the time") from error
    for rank, of_rank in enumerate(abouts):
        if of_rank["problem"]:
            raise ValueError(f"hvd.init(): rank {rank} cannot start: {of_rank['problem']}")
    sets = {f"rank {rank}": {"process_sets": of_rank["sets"]} for rank, of_rank in enumerate(abouts)}
    if differs := agreement.difference(sets):
        raise ValueError(f"hvd.init(): {differs}. Give every rank the same sets in the same order")
    membership.take_num_changes(max(of_rank["changes"] for of_rank in abouts))
    hosts = [of_rank["host"] for of_rank in abouts]
    places = launch.places(found.rank, hosts)
    launch.publish({"rank": found.rank, "size": found.size, **places})
    return World(
        rank=found.rank,
        size=found.size,
        **places,
        hosts=hosts,
        store=peers.store.native,
        timeout=timeout,
        settings=settings,
        asked_for=asked_for,
    )


def _start(members: dict[int, Any], set_id: int, rows: Sequence[Sequence[int]], requests: list[Request]) -> Any:
    return operations.start(members[set_id], rows, requests)


def _parse_comm(comm: Any) -> tuple[int, ...] | None:
    """The ranks, None for all. Raises ValueError for an MPI communicator."""
    if comm is None or (isinstance(comm, (list, tuple)) and not comm):
        return None
    if not isinstance(comm, (list, tuple, range)) or not all(isinstance(rank, int) for rank in comm):
        raise ValueError(f"hvd.init(comm={comm!r}): expected a list of ranks; there is no MPI here")
    return tuple(comm)


def _said(asked_for: tuple) -> str:
    comm, sets = asked_for
    return f"comm={comm and list(comm)} and process_sets={list(map(list, sets)) or None}"


def shutdown() -> None:
    """Ends the job's operations on every rank: pending ones, and later ones until the next hvd.init(), raise
    HorovodInternalError. Without effect before hvd.init()."""
    with _lock:
        old = world_if_any()
        if old is None:
            return
        if not isinstance(old.order, Ended):  # this process is no child of fork()
            old.end_timeline()
            step_reducer.leave_all(old.order.failure or "hvd.shutdown() was called")
            if old.order.failure:  # its thread may wait for a sum that no longer ends
                old.close_engines(old.order.failure)
            if not old.order.shutdown():
                _keep(old.members)  # the end of a backend would wait for a peer that is gone
                _keep(old.order)
            old.close_engines("hvd.shutdown() was called")
            old.order = Ended(old.order.failure)
        forget_sets(old)
        set_world(None)
    handles.forget_all()


atexit.register(shutdown)


def _keep(thing: object) -> None:
    """Keeps it as long as the process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _leave_to_parent() -> None:
    """In a child of fork(), which has none of the threads: it is no rank of its parent's job, and ends by itself. It
    still knows the rank and the size, for workers that load data."""
    global _lock
    _lock = threading.RLock()
    handles.leave_to_parent()
    if (old := world_if_any()) is None or isinstance(old.order, Ended):
        return
    ended, old.timeline = old.order, None
    old.order = Ended(
        f"fusedcomm.horovod: process {os.getpid()} was forked from rank {old.rank} after hvd.init(), and is no rank of "
        "its job"
    )
    # The end of an engine, or a backend, waits for threads.
    _keep(ended)
    for each in [*old.members.values(), *old.sessions]:
        _keep(each)
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
