"""All that fusedcomm relies on in torch's process groups. setup.py refuses a torch whose headers lack it.

Read in torch 2.11 to 2.15. There "nccl" is ``ProcessGroupNCCL``; or ``ProcessGroupNCCL2``, which 2.14 has by the name
"nccl2" or with ``TORCH_DIST_USE_NCCL2=1``, and 2.15 by default; "nccl-legacy" and ``TORCH_DIST_USE_NCCL2=0`` name the
old one.

- Streams: with ``asyncOp = false`` both enqueue on the caller's current stream. The old one then returns no Work. The
  new one returns a Work; its ``wait()`` makes that stream wait for an event of its own, and stops the host only with
  ``TORCH_NCCL_BLOCKING_WAIT=1``.
- Memory: neither keeps the inputs of such a call, nor tells the allocator of its stream: the engine keeps them. The
  new one's Work keeps the outputs; in 2.14 a queue keeps that Work until a later call finds that it has ended.
- Collectives: ``alltoall_base`` without splits is one equal all-to-all, which these builds hand to ``ncclAlltoAll``.
  From 2.14 on it and ``_allgather_base`` stand for ``all_to_all_single`` and ``all_gather_single``.
- Groups of fusedcomm's own, for sums on two levels, are always the old class: made by its constructor,
  connected by ``eager_connect_single_device``, ended by ``shutdown()``. Each has its own communicator, so
  the user's group may be of the other class.
- Communicators: ``getCommPtr()`` of both, called by its C++ symbol (csrc/transport/nccl.cpp), returns that of the
  thread's current device, or 0 before its first collective and once it has ended; the old one throws if it was aborted.
- Non-blocking communicators, with ``TORCH_NCCL_USE_COMM_NONBLOCKING=1`` or ``Options.config.blocking = 0``: NCCL has to
  be asked for the end of each call, and torch's watchdog may free the communicator meanwhile. They are torch's alone.
- Ends: torch's watchdog aborts NCCL's collectives, at the group's timeout. Where ranks come and go fusedcomm does, with
  ``Backend.abort()``, and the watchdog is told not to. It aborts receives of gloo's with ``Work.abort()``.
"""

import datetime
import os
import re
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from fusedcomm import env
from fusedcomm.ranks.errand import Errand, is_left

RELIED_ON = (
    ("Types.hpp", r"struct AllToAllOptions \{[^}]*bool asyncOp\b", "all-to-alls on the current stream"),
    ("Types.hpp", r"struct AllgatherOptions \{[^}]*bool asyncOp\b", "all-gathers on the current stream"),
    ("Types.hpp", r"struct AllreduceOptions \{[^}]*bool asyncOp\b", "all-reduces on the current stream"),
    ("Backend.hpp", r"virtual c10::intrusive_ptr<Work> alltoall_base\(", "the first transfer of a two-shot"),
    ("Backend.hpp", r"virtual c10::intrusive_ptr<Work> _allgather_base\(", "the second transfer of a two-shot"),
    ("Backend.hpp", r"virtual c10::intrusive_ptr<Work> allreduce\(", "exact sums"),
    ("Backend.hpp", r"virtual void eagerConnectSingleDevice\(at::Device", "own groups that are connected at attach"),
    ("Backend.hpp", r"virtual void shutdown\(\)", "the end of own groups"),
    ("Backend.hpp", r"virtual void abort\(\)", "the end of collectives with a lost rank"),
    ("Work.hpp", r"virtual void abort\(\)", "the end of waits for a lost rank"),
    ("ProcessGroupGloo.hpp", r"class TORCH_API RecvWork\b.*? void abort\(\) override", "the same over gloo"),
    ("ProcessGroupGloo.hpp", r"Device>> devices; int threads\b", "gloo's channels"),
    ("nccl2/ProcessGroupNCCL.hpp", r"cudaStream_t getOperationStream\(bool async_op\)", "nccl2's current stream"),
)
"""(header in torch/csrc/distributed/c10d, pattern that it matches once each blank is one space, what needs it)."""

COMM_HOOK = ("reducer.hpp", r"std::unique_ptr<CommHookInterface> comm_hook_;", "taking a hook away from DDP's reducer")
"""A private member. With a torch that has no such member, a reducer keeps its hook for life."""

BACKENDS = {"cpu": ("gloo",), "cuda": ("nccl", "nccl2", "nccl-legacy")}
"""The names of torch's backends over which fusedcomm moves gradients, by the type of device; the usual one first."""

_CLASSES = ("ProcessGroupNCCL", "ProcessGroupNCCL2")


def declares(include: Path, header: str, pattern: str) -> bool:
    """Whether torch's header matches. `include`: the folder of torch's headers."""
    path = include / "torch/csrc/distributed/c10d" / header
    return path.is_file() and re.search(pattern, re.sub(r"\s+", " ", path.read_text()), re.DOTALL) is not None


def missing(include: Path) -> list[str]:
    """A text for everything in RELIED_ON that torch's headers do not declare; empty for a torch that will do."""
    has_nccl2 = (include / "torch/csrc/distributed/c10d/nccl2").is_dir()
    return [
        f"{header} has nothing that matches '{pattern}', for {use}"
        for header, pattern, use in RELIED_ON
        if (has_nccl2 or not header.startswith("nccl2/")) and not declares(include, header, pattern)
    ]


def refuse_unread(backend: dist.Backend) -> None:
    """Raises RuntimeError unless it is known on which streams this backend for cuda runs its collectives."""
    inner = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps every backend
    kind = type(inner)
    if kind in [getattr(dist, name) for name in _CLASSES if hasattr(dist, name)]:
        return
    raise RuntimeError(
        f"fusedcomm: the process group's backend for cuda tensors is a {kind.__module__}.{kind.__qualname__}, whose "
        f"streams are not known; fusedcomm enqueues kernels around collectives of {' and '.join(_CLASSES)} only. Use "
        "init_process_group('nccl'), with TORCH_DIST_USE_NCCL2=0 in the environment if this torch makes 'nccl' "
        "something else, or leave DDP's default all-reduce"
    )


def is_non_blocking(backend: dist.Backend) -> bool:
    """Whether calls of NCCL's on this backend's communicators return before they have enqueued anything. torch decides
    by the same two, in this order."""
    inner = getattr(backend, "wrapped_pg", backend)  # see refuse_unread()
    config = getattr(getattr(inner, "options", None), "config", None)
    chosen = getattr(config, "blocking", None)  # NCCL has a number of its own for "not chosen"
    return chosen == 0 or (chosen != 1 and os.environ.get("TORCH_NCCL_USE_COMM_NONBLOCKING") == "1")


_UNSUPERVISED = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""What the constructor of ProcessGroupNCCL reads: its watchdog neither aborts nor ends the process, nothing watches the
watchdog, and a failure does not hold the lock that the next collective needs for four times 15 s."""
_environment_lock = threading.Lock()
_FIRST_POLL_S, _POLL_S = 1e-3, 0.25
"""Seconds between two looks for ranks that are to connect, at first and later."""


def own_nccl(
    store: dist.Store,
    name: str,
    rank: int,
    size: int,
    timeout: datetime.timedelta,
    device: torch.device,
    is_supervised: bool = True,
    max_ctas: int | None = None,
) -> dist.Backend:
    """A new, connected NCCL backend over the ranks that call this with the same name. A collective call of these ranks.

    store: in which the name is used once.
    timeout: of collectives, and of this call. NCCL waits for ever for a rank that never comes, and cannot be told to
        stop: torch knows of a communicator, which it could abort, once NCCL has connected it. That of a non-blocking
        one it knows at once, but NCCL starts a thread for each collective of such a one. Ranks therefore meet in the
        store before anything is allocated. Only a rank that dies after that leaves NCCL's thread here.
    is_supervised: whether torch's watchdog ends the process, or aborts collectives, when one fails or is late. If not,
        only ``abort()`` ends those that wait for a lost rank.
    max_ctas: the most thread blocks of one collective. None: as NCCL chooses. A torch whose options have no
        configuration of NCCL's leaves it to NCCL, too.
    """
    if not hasattr(dist, "ProcessGroupNCCL"):
        raise RuntimeError(
            f"fusedcomm: torch {torch.__version__} has no torch.distributed.ProcessGroupNCCL, of which fusedcomm makes "
            "groups of its own: use Config(hosts=None)"
        )
    until = time.monotonic() + timeout.total_seconds()
    of_name = dist.PrefixStore(name, store)
    missing = _missing(of_name, rank, size, until)
    if missing:
        raise RuntimeError(
            f"fusedcomm: rank {rank} of {size} does not make NCCL's communicator {name!r}, because within "
            f"{timeout.total_seconds():g} s rank(s) {missing} of these {size} did not come to make it: their own logs "
            "say why"
        )
    # Every rank of the default group would have to call new_group(), but DDP's group may be one of several.
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    if hasattr(options, "config"):
        options.config.blocking = 1
        if max_ctas is not None:
            options.config.max_ctas = max_ctas
    with _environment_lock, env.changed(**({} if is_supervised else _UNSUPERVISED)):
        backend = dist.ProcessGroupNCCL(of_name, rank, size, options)
    given_up = threading.Event()

    # Otherwise the first collective would make the communicator. That would take seconds of the first backward pass,
    # and a rank that cannot connect would fail there and not in attach. DDP's own group has its communicator by now,
    # because DDP's constructor has broadcast the parameters over it.
    def connect() -> None:
        try:
            backend.eager_connect_single_device(device)
        except Exception:
            backend.abort()  # now: whoever keeps the error keeps the backend, and what NCCL has allocated for it
            raise
        if given_up.is_set():
            backend.abort()

    connecting = Errand(connect)
    while not connecting.has_ended_within(max(0.0, min(_POLL_S, until - time.monotonic()))):
        if time.monotonic() < until and not is_left():
            continue
        given_up.set()
        raise RuntimeError(
            f"fusedcomm: rank {rank} of {size}: NCCL has not connected the communicator {name!r} within "
            f"{timeout.total_seconds():g} s, although all its ranks had come: one has died or stopped since, or they "
            "cannot reach each other (NCCL_DEBUG=INFO says where). NCCL goes on waiting: end this process"
        )
    connecting.result()
    return backend


def _missing(store: dist.Store, rank: int, size: int, until: float) -> list[int]:
    """The ranks that have not called this when the clock is `until`, or when nobody waits for the caller any more;
    empty as soon as all have."""
    if size == 1:
        return []
    keys = {other: f"here/{other}" for other in range(size)}
    store.set(keys[rank], "")
    pause_s = _FIRST_POLL_S
    while not store.check(list(keys.values())):
        if time.monotonic() >= until or is_left():
            return [other for other, key in keys.items() if not store.check([key])]
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _POLL_S)
    return []
