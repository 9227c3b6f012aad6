"""fusedcomm's environment variables, and the functions that read them.

ISA and CODEC_THREADS apply where :class:`fusedcomm.LocalOptions` leaves these open. QUIET has the same effect as the
argument of ``attach``. The other variables have no argument.
"""

import os

ISA = "FUSEDCOMM_ISA"
"""Instruction set of the CPU codec: "auto" (the default), or one that ``fusedcomm doctor`` lists."""

CODEC_THREADS = "FUSEDCOMM_CODEC_THREADS"
"""Threads that share one codec stage, at least 1. Default: half of this rank's share of the host's cores, 1 to 4."""

QUIET = "FUSEDCOMM_QUIET"
"""1: rank 0 does not print the plan."""

SYNC = "FUSEDCOMM_SYNC"
"""1: every stage ends before the next begins. No race can happen, and a fault is reported at the stage that caused it.
Slow, for debugging; the gradients must have the same bits."""


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
