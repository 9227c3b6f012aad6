"""The ranks of an elastic job, which may be lost and may join: fusedcomm's Members, without a reducer.

A step of the members is what lies between two commits. When a rank is lost or joins, the members agree on a view,
which lists them in the order of ranks: those that stay keep their order, and those that join come last. Each view has a
store of its own, which its first rank serves.
"""

import datetime
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch.distributed as dist

import fusedcomm.horovod.world as worlds
from fusedcomm import env
from fusedcomm.horovod import environment
from fusedcomm.log import LOGGER
from fusedcomm.ranks import agreement

if TYPE_CHECKING:
    from fusedcomm.members.members import Members
    from fusedcomm.members.plane.view import Decision, View

MIN_RANKS = "FUSEDCOMM_HOROVOD_MIN_NP"
RESET_LIMIT = "FUSEDCOMM_HOROVOD_RESET_LIMIT"
SILENCE_S = 30.0
"""Seconds without a sign of life after which a rank is no longer one of the members."""
STORE_TIMEOUT = datetime.timedelta(seconds=60)

_members: "Members | None" = None
_step = 0
_num_changes = 0
"""How often the members were to meet again; see :func:`agree_on_changes`."""
_next: "Decision | None" = None
"""The view that the members enter after this commit; None: they stay in theirs, or it has failed."""


def is_elastic() -> bool:
    """Whether `fusedcomm run --elastic` has started this process."""
    return env.members() is not None and environment.flag("HOROVOD_ELASTIC")


def place(begin: Callable[[], object]) -> tuple[int, int, dist.Store]:
    """(rank, size, the view's store) in the present view. The first time, the members meet, or this process joins them.

    begin: initialises the process group of those that begin. Raises what that and fusedcomm.Members raise."""
    global _members
    if _members is None:
        from fusedcomm.members.members import Members
        from fusedcomm.members.plane import addresses

        least = environment.whole(MIN_RANKS, os.environ.get(MIN_RANKS, "1"))
        if (joins := addresses.to_join(2 * SILENCE_S)) is None:
            begin()
        found = Members(join=joins, min_ranks=least, silence=SILENCE_S)
        about = {**agreement.versions(), "--min-np": least, "--reset-limit": os.environ.get(RESET_LIMIT)}
        found.plane.hooks.check_join = lambda joiner: agreement.difference({"the members": about, "it": joiner})
        found.plane.hooks.stop_step = _stop_operations
        _members = found
        if found.joins is not None:
            _enter(found.plane.join(found.joins, about))
        else:
            found.plane.start(found.current)
            found.plane.barrier.begin(_step)
    view = _members.current
    host, port = view.members[0].info["store"]
    store = dist.TCPStore(host, port, is_master=False, timeout=STORE_TIMEOUT)
    return _members.rank, _members.size, dist.PrefixStore(f"horovod/{view.number}", store)


def _stop_operations() -> None:
    """The main thread may wait for a rank that is silent, and whose connections are whole."""
    if (found := worlds.world_if_any()) is not None:
        found.order.fail("fusedcomm: a rank is lost, or has given no sign of life, and the others go on without it")


def end_step() -> bool:
    """A commit. Whether the members enter another view, which all of them hear at the same commit."""
    global _step, _next
    if _members is None:
        return False
    plane = _members.plane
    plane.barrier.finish_step(_step)
    _step += 1
    _next = plane.boundary(_step)
    return _next is not None


def num_changes() -> int:
    """How often this process has heard that the members are to meet again."""
    return _num_changes


def agree_on_changes(every: Iterable[int]) -> None:
    """num_changes() of each member: the most counts, because one that joins knows of none."""
    global _num_changes
    _num_changes = max(every)


def change() -> None:
    """Enters the next view, if the job is elastic: that of the last commit, or after a failure the one that the members
    agree on then. To be called when the operations of the present one have ended.

    Raises TooFewRanksError and the like if this process cannot go on, and RuntimeError at the limit of changes."""
    global _next, _num_changes
    if _members is None:
        return
    limit = os.environ.get(RESET_LIMIT)
    if limit is not None and _num_changes >= environment.whole(RESET_LIMIT, limit):
        raise RuntimeError(f"fusedcomm: ranks are to meet again after --reset-limit {limit} times: the job ends")
    _num_changes += 1
    decision, _next = _next or _members.plane.recover(), None
    _enter(decision)


def _enter(decision: "Decision") -> None:
    global _step
    assert _members is not None
    plane = _members.plane
    while not _has_come(decision.view):
        decision = plane.recover()
    _members.enter(decision.view)
    plane.barrier.install(decision.view)
    _step = decision.view.step
    plane.barrier.begin(_step)


def _has_come(view: "View") -> bool:
    """Waits until all members of the view have come, as ControlPlane.install(). Those that keep the others waiting are
    named: one may be in a long evaluation, or never come. Raises InstallTimeoutError in the end."""
    from fusedcomm.members.errors import InstallTimeoutError

    assert _members is not None
    settings = environment.settings()
    try:
        return _members.plane.install(view, settings.timeout_s)
    except InstallTimeoutError as error:
        left = f"HOROVOD_ELASTIC_TIMEOUT={settings.change_timeout_s:g} more seconds"
        LOGGER.warning("%s: see what they do. The others wait for them for %s", error, left)
    return _members.plane.install(view, settings.change_timeout_s)
