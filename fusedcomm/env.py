"""Every environment variable that fusedcomm reads, and nothing else. ISA and CODEC_THREADS are for what ``attach`` is
not told; QUIET or its argument may ask for quiet; the others have no argument."""

import os

ISA = "FUSEDCOMM_ISA"
"""Instruction set of the CPU codec: "auto" (the default) or one that ``fusedcomm doctor`` lists."""

CODEC_THREADS = "FUSEDCOMM_CODEC_THREADS"
"""Threads that share one codec stage, at least 1. By default from the cores and the ranks on this host."""

QUIET = "FUSEDCOMM_QUIET"
"""1: rank 0 does not print the plan."""

SYNC = "FUSEDCOMM_SYNC"
"""1: every stage ends before the next begins, so that no race can happen and a fault is named where it happened. Slow,
for hunting errors; the gradients must be the same bits."""

REGISTERED_MEMORY = "FUSEDCOMM_REGISTERED_MEMORY"
"""1: on cuda, workspaces come from the memory that the process group registers with the network, where it has some; on
every rank or on none."""

KERNELS = "FUSEDCOMM_KERNELS"
"""Which of a GPU's kernels run: "triton", or "cuda" for those in CUDA C++. By default Triton's where it can be used."""


def isa() -> str:
    return os.environ.get(ISA, "auto")


def codec_threads() -> int | None:
    text = os.environ.get(CODEC_THREADS)
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{CODEC_THREADS}={text!r} is not possible: use a whole number of threads, at least 1")
    return int(text)


def kernels() -> str | None:
    """None: not told."""
    text = os.environ.get(KERNELS) or None
    if text not in (None, "triton", "cuda"):
        raise ValueError(f"{KERNELS}={text!r} is not possible: use 'triton' or 'cuda', or unset it")
    return text


def cache_folder() -> str:
    """Where kernels in CUDA C++ are kept once they are compiled."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "fusedcomm")


def quiet() -> bool:
    return os.environ.get(QUIET, "0") not in ("", "0")


def sync() -> bool:
    return os.environ.get(SYNC, "0") not in ("", "0")


def registered_memory() -> bool:
    return os.environ.get(REGISTERED_MEMORY, "0") not in ("", "0")


def cuda_queues() -> int | None:
    """Hardware queues that all streams of a GPU share, if CUDA is told; else it has 8."""
    text = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    return int(text) if text and text.isdigit() else None


def local_world_size() -> int | None:
    """Ranks on this host, as torchrun tells them."""
    text = os.environ.get("LOCAL_WORLD_SIZE")
    return int(text) if text and text.isdigit() else None
