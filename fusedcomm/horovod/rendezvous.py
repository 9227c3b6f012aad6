"""The meeting of an elastic job's workers: which of them are alive, and in which order.

`fusedcomm run --elastic` hosts a store and publishes generations in it. A generation is a list of workers; a worker's
rank is its place in it, so workers that stay keep their order and new ones come last. The keys:

    newest              the newest generation, JSON of a Generation
    ready/<n>/<worker>  the worker has seen generation n and is about to connect
    failed/<n>          a member of n has lost another one: a new generation is due
    waiting/<worker>    a new worker is ready to become a member

Every value is signed for its key (signatures.py). A value that somebody else has written counts as none: the worker who
waits for it goes on waiting, and the launcher puts its own back.
"""

import dataclasses
import datetime
import json
import os
import time

import torch.distributed as dist

import fusedcomm.horovod.environment as environment
import fusedcomm.horovod.signatures as signatures
from fusedcomm.log import LOGGER

WORKER = "FUSEDCOMM_HOROVOD_WORKER"
PREFIX = "fusedcomm/elastic"
NEWEST = "newest"
POLL_S = 0.02


@dataclasses.dataclass(frozen=True)
class Generation:
    """`number`: from 1. `sync_before`: the members of older generations than this must sync their states; since it
    workers were only removed."""

    number: int
    members: list[str]
    sync_before: int


NONE = Generation(0, [], 0)

_store: dist.Store | None = None
_current = 0  # the generation of this process's last init
_newest = NONE  # that this process has seen
_must_exceed = 0  # generations up to this one have failed
_refused: set[str] = set()  # keys that a warning has named


def is_elastic() -> bool:
    """Whether `fusedcomm run --elastic` has started this process."""
    return WORKER in os.environ and environment.flag("HOROVOD_ELASTIC")


def meet() -> tuple[int, int, dist.Store]:
    """(rank, size, a store for this generation), as soon as every member of the newest generation has seen it.

    Raises TimeoutError if that takes longer than HOROVOD_ELASTIC_TIMEOUT.
    """
    global _current
    store, worker = _open(), os.environ[WORKER]
    timeout_s = environment.seconds("HOROVOD_ELASTIC_TIMEOUT")
    deadline = time.monotonic() + timeout_s
    _set(store, f"waiting/{worker}")
    while time.monotonic() < deadline:
        newest = _look(store)
        if newest.number > _must_exceed and worker in newest.members:
            _set(store, f"ready/{newest.number}/{worker}")
            # A generation that has lost a worker before it met never becomes ready; a newer one follows.
            if are_ready(store, newest):
                _current = newest.number
                meeting_place = dist.PrefixStore(f"generation/{newest.number}", store)
                return newest.members.index(worker), len(newest.members), meeting_place
        time.sleep(POLL_S)
    newest = _look(store)
    raise TimeoutError(
        f"fusedcomm.horovod: worker {worker} has waited {timeout_s:.0f} s for a generation after {_must_exceed}; the "
        f"newest is {newest.number}, of the workers {newest.members}. Check that enough workers run; "
        "HOROVOD_ELASTIC_TIMEOUT sets the time"
    )


def failed() -> None:
    """This process's generation has failed. The next meet() waits for a newer one."""
    global _must_exceed
    if is_elastic():
        _must_exceed = _current
        _set(_open(), f"failed/{_current}")


def update() -> tuple[int, bool] | None:
    """(generation, whether workers were only removed) if there is a newer generation than this process's; else None."""
    if not is_elastic():
        return None
    newest = _look(_open())
    return (newest.number, newest.sync_before <= _current) if newest.number > _current else None


def publish(store: dist.Store, generation: Generation) -> None:
    """Makes this the newest generation. For the launcher alone; it calls put_back() until the next one."""
    store.set(NEWEST, _record(generation))


def put_back(store: dist.Store, generation: Generation) -> bool:
    """Publishes the newest generation again if somebody else has changed or removed it; returns whether that was so."""
    try:
        is_ours = store.check([NEWEST]) and store.get(NEWEST) == _record(generation)
    except dist.DistStoreError:  # it was removed between the two calls
        is_ours = False
    if not is_ours:
        publish(store, generation)
    return not is_ours


def are_ready(store: dist.Store, generation: Generation) -> bool:
    """Whether every member has seen the generation."""
    return are_set(store, [f"ready/{generation.number}/{each}" for each in generation.members])


def are_set(store: dist.Store, keys: list[str]) -> bool:
    """Whether workers of this job have set all these keys."""
    return store.check(keys) and all(_read(store, key) is not None for key in keys)


def _set(store: dist.Store, key: str) -> None:
    store.set(key, signatures.signed(b"1", key))


def _record(generation: Generation) -> bytes:
    return signatures.signed(json.dumps(dataclasses.asdict(generation)).encode(), NEWEST)


def _look(store: dist.Store) -> Generation:
    """The newest generation. Older ones that somebody has put in its place do not count."""
    global _newest
    if store.check([NEWEST]) and (content := _read(store, NEWEST)) is not None:
        found = Generation(**json.loads(content))
        if found.number > _newest.number:
            _newest = found
    return _newest


def _read(store: dist.Store, key: str) -> bytes | None:
    """The content of a record that exists; None, with one warning, if nobody of this job has written it.

    Raises RefusedError if this process has no key, and the job has one.
    """
    try:
        return signatures.content_of(store.get(key), key)
    except signatures.RefusedError as error:
        if signatures.key() is None:
            raise signatures.RefusedError(f"fusedcomm.horovod: {key!r} in the job's store {error}") from error
        if key not in _refused:
            _refused.add(key)
            LOGGER.warning("fusedcomm.horovod: %r in the job's store %s. It is refused", key, error)
        return None


def _open() -> dist.Store:
    """The launcher's store. Raises ValueError if the variables do not name it."""
    global _store
    if _store is None:
        host = environment.text("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        port = environment.text("HOROVOD_GLOO_RENDEZVOUS_PORT")
        if not host or not port:
            raise ValueError(
                f"{WORKER} is set but not where the launcher is: start the job with fusedcomm run --elastic"
            )
        timeout = datetime.timedelta(seconds=environment.seconds("HOROVOD_ELASTIC_TIMEOUT"))
        _store = dist.PrefixStore(PREFIX, dist.TCPStore(host, int(port), None, False, timeout))
    return _store
