"""Reads the answers to a roll call from the store, and what the store has of ranks that have not answered."""

import contextlib
import time
from collections.abc import Callable, Collection, Mapping

from fusedcomm.ranks.bounded_store import BoundedStore, StoreError
from fusedcomm.ranks.connections import MAX_LISTED
from fusedcomm.ranks.roll_call import Began, RollCall, State, decode


def read(store: BoundedStore, keys: Mapping[int, str], found: dict[int, bytes]) -> None:
    """Adds the values of those keys that are set to `found`, also if the store fails on the way."""
    names = list(keys)
    if names and store.check(list(keys.values())):
        found.update(zip(names, store.multi_get(list(keys.values())), strict=True))
    elif len(names) > 1:
        for half in (names[: len(names) // 2], names[len(names) // 2 :]):
            read(store, {name: keys[name] for name in half}, found)


def collect(
    store: BoundedStore,
    call: RollCall,
    late_s: float,
    answer_s: float,
    request_s: float,
    pause: Callable[[], None],
    lost: Callable[[], Collection[int]],
) -> StoreError | None:
    """Fills in `call` with the answers, once all are known or the time for them has passed.

    A rank is late if it had no answer yet when it was asked at `late_s` or later, and absent if it has none and was
    asked at `answer_s` or later; or at once, if all others have answered and it is among the `lost` ones. If the store
    could not be asked then, within `request_s` more, the rank stays unread: a slow store makes no rank look absent.

    Returns: the error after which no more was read, if there was one. A store that falls silent may keep an answer from
    getting there in time, so that the ranks that have none then stay unread.
    """
    began, asked_s, problem = time.monotonic(), 0.0, None
    found: dict[int, bytes] = {}
    missed_s = dict.fromkeys(range(call.world_size), -1.0)  # when each rank was last asked and had no answer
    gone: set[int] = set()
    while True:
        missing = {rank: f"answer/{call.number}/{rank}" for rank in missed_s if rank not in found}
        try:
            read(store, missing, found)
        except StoreError as error:
            problem = error
        call.waited_s = now_s = time.monotonic() - began
        silent = missing.keys() - found.keys()
        call.late_s.update({rank: now_s for rank in missing.keys() - silent if missed_s[rank] >= late_s})
        if problem:
            break
        missed_s.update(dict.fromkeys(silent, asked_s))
        gone = silent.intersection(lost()) if silent else set()
        if silent == gone or asked_s >= answer_s or now_s > answer_s + request_s:
            break
        pause()
        asked_s = time.monotonic() - began
    for rank, missed in missed_s.items():
        if rank in found:
            try:
                call.answers[rank] = decode(State, found[rank])
            except ValueError as error:
                call.unreadable[rank] = str(error)
        elif missed >= answer_s or rank in gone:
            call.absent[rank] = ""
        else:
            call.unread.append(rank)
    return problem


def name_absent(store: BoundedStore, call: RollCall) -> None:
    """Asks for the processes and addresses of the absent ranks, at most MAX_LISTED of them. Raises StoreError."""
    found: dict[int, bytes] = {}
    read(store, {rank: f"began/{rank}" for rank in list(call.absent)[:MAX_LISTED]}, found)
    for rank, said in found.items():
        with contextlib.suppress(ValueError):
            call.began[rank] = decode(Began, said)
            call.absent[rank] = call.began[rank].who
