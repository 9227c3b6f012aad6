"""Where the workers of an elastic job learn which of them are alive, in which order, and meet again.

`fusedcomm run --elastic` hosts a store and publishes generations in it. A generation is a list of workers; a worker's
rank is its place in it, so workers that stay keep their order and new ones come last. The keys:

    latest              the newest generation's number, from 1
    members/<n>         the workers of generation n, JSON
    removed/<n>         "1" if generation n only lacks workers that n - 1 had
    ready/<n>/<worker>  the worker has seen n and is about to connect
    failed/<n>          a member of n has lost another one: a new generation is due
    waiting/<worker>    a new worker is ready to become a member
"""

import datetime
import json
import os
import time

import torch.distributed as dist

import fusedcomm.horovod.environment as environment

WORKER = "FUSEDCOMM_HOROVOD_WORKER"
PREFIX = "fusedcomm/elastic"
POLL_S = 0.02

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
    timeout_s = environment.seconds("HOROVOD_ELASTIC_TIMEOUT")
    until = time.monotonic() + timeout_s
    store.set(f"waiting/{worker}", "1")
    while time.monotonic() < until:
        number = latest(store)
        members = members_of(store, number) if number > _must_exceed else []
        if worker in members:
            store.set(f"ready/{number}/{worker}", "1")
            # A generation that has lost a worker before it met never becomes ready; a newer one follows.
            if store.check([f"ready/{number}/{each}" for each in members]):
                _current = number
                return members.index(worker), len(members), dist.PrefixStore(f"generation/{number}", store)
        time.sleep(POLL_S)
    raise TimeoutError(
        f"fusedcomm.horovod: worker {worker} has waited {timeout_s:.0f} s for a generation after {_must_exceed}; the "
        f"newest is {latest(store)}, of the workers {members_of(store, latest(store))}. Check that enough workers run; "
        "HOROVOD_ELASTIC_TIMEOUT sets the time"
    )


def failed() -> None:
    """This process's generation has failed. The next meet() waits for a newer one."""
    global _must_exceed
    if is_elastic():
        _must_exceed = _current
        _open().set(f"failed/{_current}", "1")


def update() -> tuple[int, bool] | None:
    """(generation, whether workers were only removed) if there is a newer generation than this process's; else None."""
    if not is_elastic():
        return None
    store = _open()
    number = latest(store)
    if number == _current:
        return None
    removed = all(store.get(f"removed/{each}") == b"1" for each in range(_current + 1, number + 1))
    return number, removed


def publish(store: dist.Store, members: list[str], only_removed: bool) -> int:
    """Makes these workers the newest generation; returns its number. For the launcher alone."""
    number = latest(store) + 1
    store.set(f"members/{number}", json.dumps(members))
    store.set(f"removed/{number}", "1" if only_removed else "0")
    store.set("latest", str(number))
    return number


def latest(store: dist.Store) -> int:
    return int(store.get("latest")) if store.check(["latest"]) else 0


def members_of(store: dist.Store, number: int) -> list[str]:
    return json.loads(store.get(f"members/{number}")) if number else []


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
