"""fusedcomm's environment variables, and the functions that read them.

ISA and CODEC_THREADS apply where :class:`fusedcomm.LocalOptions` leaves these open. QUIET has the same effect as the
argument of ``attach``. MEMBERS and JOIN are what ``Members(join="auto")`` reads. SYNC has no argument.
"""

import contextlib
import os
from collections.abc import Iterator

ISA = "FUSEDCOMM_ISA"
"""Instruction set of the CPU codec: "auto" (the default), or one that ``fusedcomm doctor`` lists."""

CODEC_THREADS = "FUSEDCOMM_CODEC_THREADS"
"""Threads that share one codec stage, at least 1. Default: half of this rank's share of the host's cores, 1 to 4."""

QUIET = "FUSEDCOMM_QUIET"
"""1: rank 0 does not print the plan."""

SYNC = "FUSEDCOMM_SYNC"
"""1: every stage ends before the next begins. No race can happen, and a fault is reported at the stage that caused it.
Slow, for debugging; the gradients must have the same bits."""

NCCL = "FUSEDCOMM_NCCL"
"""torch: NCCL's collectives go through torch. Default: NCCL is called directly, where that is possible."""


MEMBERS = "FUSEDCOMM_MEMBERS"
"""The addresses of members of running training: "host:port", or several with commas between; or the path, with a / in
it, of a file to which every member adds its address. See members/plane/addresses.py."""

JOIN = "FUSEDCOMM_JOIN"
"""1: this process joins training that runs. 0: it begins training. Default: 1 in a process that torchrun has started
again (TORCHELASTIC_RESTART_COUNT). `fusedcomm run --members` sets it."""


def isa() -> str:
    """ISA's value as it stands; "auto" if it is not set."""
    return os.environ.get(ISA, "auto")


def codec_threads() -> int | None:
    """None if CODEC_THREADS is not set. Raises ValueError if it is not a whole number, at least 1."""
    text = os.environ.get(CODEC_THREADS)
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{CODEC_THREADS}={text!r} is not possible: use a whole number of threads, at least 1")
    return int(text)


def quiet() -> bool:
    """Whether QUIET is set to anything but 0."""
    return os.environ.get(QUIET, "0") not in ("", "0")


def sync() -> bool:
    """Whether SYNC is set to anything but 0."""
    return os.environ.get(SYNC, "0") not in ("", "0")


def nccl_through_torch() -> bool:
    """Whether NCCL is "torch". Raises ValueError if it is anything else."""
    text = os.environ.get(NCCL, "")
    if text not in ("", "torch"):
        raise ValueError(f"{NCCL}={text!r} is not possible: use torch, or leave it unset")
    return text == "torch"


def members() -> str | None:
    """MEMBERS's value; None if it is not set, or empty."""
    return os.environ.get(MEMBERS) or None


def joins() -> bool | None:
    """The value of JOIN; without it True if torchrun has started this process again, else None. Raises ValueError if
    JOIN is neither 0 nor 1."""
    text = os.environ.get(JOIN)
    if text not in (None, "", "0", "1"):
        raise ValueError(f"{JOIN}={text!r} is not possible: use 1 in a process that joins, or 0 in one that does not")
    if text:
        return text == "1"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return True if restarts.isdecimal() and int(restarts) > 0 else None


def cuda_queues() -> int | None:
    """Hardware queues that all streams of a GPU share, as set for CUDA. None if not set; CUDA then has 8."""
    text = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    return int(text) if text and text.isdigit() else None


def local_world_size() -> int | None:
    """Ranks on this host, as torchrun sets them; None if not set."""
    text = os.environ.get("LOCAL_WORLD_SIZE")
    return int(text) if text and text.isdigit() else None


def rank() -> int:
    """The rank that a launcher has given this process; 0 without one."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else 0


def launched_world_size() -> int | None:
    """Ranks that torchrun, or another launcher that sets its variables, has started; None if this process is none of
    them."""
    text = os.environ.get("WORLD_SIZE")
    return int(text) if text and text.isdigit() and "RANK" in os.environ else None


@contextlib.contextmanager
def changed(**variables: str) -> Iterator[None]:
    """Sets any environment variables for a while. Other threads see them, too."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
