"""The meeting of an elastic job's workers: which of them are alive, and in which order.

`fusedcomm run --elastic` hosts a store and publishes generations in it. A generation is a list of workers; a worker's
rank is its place in it, so workers that stay keep their order and new ones come last. The keys:

    newest              the newest generation, JSON of a Generation
    ready/<n>/<worker>  the worker has seen generation n and is about to connect
    failed/<n>          a member of n has lost another one: a new generation is due
    waiting/<worker>    a new worker is ready to become a member
"""

import dataclasses
import datetime
import json
import os
import time

import torch.distributed as dist

import fusedcomm.horovod.environment as environment

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
_must_exceed = 0  # generations up to this one have failed


def is_elastic() -> bool:
    """Whether `fusedcomm run --elastic` has started this process."""
    return WORKER in os.environ and environment.flag("HOROVOD_ELASTIC")


def meet() -> tuple[int, int, dist.Store]:
    """(rank, size, a store for this generation), as soon as every member of the newest generation has seen it.

    Raises TimeoutError if that takes longer than HOROVOD_ELASTIC_TIMEOUT.
    """
    global _current
    store, worker = _open(), os.environ[WORKER]
    timeout_s = _timeout_s()
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
    """Makes this the newest generation. For the launcher alone."""
    store.set(NEWEST, json.dumps(dataclasses.asdict(generation)))


def are_ready(store: dist.Store, generation: Generation) -> bool:
    """Whether every member has seen the generation."""
    return store.check([f"ready/{generation.number}/{each}" for each in generation.members])


def _set(store: dist.Store, key: str) -> None:
    store.set(key, b"1")


def _look(store: dist.Store) -> Generation:
    """The newest generation."""
    return Generation(**json.loads(store.get(NEWEST))) if store.check([NEWEST]) else NONE


def _open() -> dist.Store:
    """The launcher's store. Raises ValueError if the variables do not name it."""
    global _store
    if _store is None:
        host = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
        if not host or not port:
            raise ValueError(
                f"{WORKER} is set but not where the launcher is: start the job with fusedcomm run --elastic"
            )
        timeout = datetime.timedelta(seconds=_timeout_s())
        _store = dist.PrefixStore(PREFIX, dist.TCPStore(host, int(port), None, False, timeout))
    return _store


def _timeout_s() -> float:
    return environment.seconds("HOROVOD_ELASTIC_TIMEOUT", os.environ.get("HOROVOD_ELASTIC_TIMEOUT") or "600")
