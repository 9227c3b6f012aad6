"""Process sets that are made and ended after hvd.init()."""

from collections.abc import Iterable

from fusedcomm.horovod.objects import allgather_object
from fusedcomm.horovod.process_sets import ProcessSet, check_ranks, make_set
from fusedcomm.horovod.world import World, world

DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Makes a process set after hvd.init(). A collective call of every rank of the job, member or not.

    Raises ValueError if sets may not be added, if there is one of these ranks, or if other ranks add other ranks.
    """
    found = world()
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    _check_dynamic(found, "add_process_set()")
    check_ranks(process_set.ranks, found, found.sets.values())
    set_id = found.num_sets_made
    _agree(found, "add_process_set", process_set.ranks)
    make_set(found, process_set, set_id)
    found.num_sets_made += 1
    # No rank may use the set before every rank's coordinator knows it.
    _agree(found, "add_process_set.made", process_set.ranks)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Ends a process set. A collective call of every rank of the job. Returns False if the set is the global one or is
    not in use. Raises ValueError if other ranks remove another set."""
    found = world()
    set_id = process_set.process_set_id
    if set_id is None or set_id == 0:
        return False
    _check_dynamic(found, "remove_process_set()")
    if found.sets.get(set_id) is None:
        process_set.process_set_id = None
        return False
    _agree(found, "remove_process_set", process_set.ranks)
    if process_set.ranks:
        found.coordinator.remove_set(set_id)
    found.sets.pop(set_id).process_set_id = None
    process_set.process_set_id = None
    found.backends.pop(set_id, None)
    return True


def _check_dynamic(found: World, call: str) -> None:
    if not found.settings.dynamic_process_sets:
        raise ValueError(
            f"{call} needs {DYNAMIC}=1 or hvd.init(process_sets='dynamic'), on every rank before hvd.init()"
        )


def _agree(found: World, call: str, ranks: list[int]) -> None:
    """Waits for every rank. Raises ValueError if another rank calls with other ranks."""
    others = allgather_object(ranks, name=f"process sets.{call}")
    for other, theirs in enumerate(others):
        if theirs != ranks:
            raise ValueError(
                f"{call}: rank {found.rank} has called with the ranks {ranks}, and rank {other} with {theirs}: every "
                "rank must add and remove the same sets in the same order"
            )
