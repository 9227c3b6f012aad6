"""Shares the compilation of kernels among the ranks of a host, which attach at the same time and need the same kernels.

One rank compiles a kernel while the other ranks compile others. Each then finds the rest in the compiler's cache.

A lock file in the cache's folder has one byte for each kernel. A rank locks that byte while it compiles the kernel. The
system releases the locks of a process that dies. If no lock can be had, every rank compiles every kernel itself.
"""

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator

NAME = "fusedcomm.lock"
TIMEOUT_S = 120.0
"""Seconds without a new kernel after which a rank ignores the other ranks' locks: such a rank may have been stopped. A
kernel takes seconds to compile."""
# Seconds between two looks at locked kernels.
POLL_S = 0.02


def compiled(kernels: Iterable[Hashable], compile: Callable, folder: str | None = None) -> Iterator:
    """``compile(kernel)`` for each of `kernels`, in the order in which the results are ready.

    Args:
        kernels: their repr() must tell them apart and be the same in every process.
        compile: must find in a cache what any process has compiled.
        folder: the cache's folder. None: Triton's.
    """
    waiting = list(kernels)
    deadline = time.monotonic() + TIMEOUT_S
    with _open_lock_file(_cache_folder() if folder is None else folder) as file:
        while waiting:
            others = []
            for kernel in waiting:
                with _locked(file, kernel) as is_ours:
                    if not is_ours and time.monotonic() < deadline:
                        others.append(kernel)
                        continue
                    result = compile(kernel)
                yield result
                deadline = time.monotonic() + TIMEOUT_S
            if len(others) == len(waiting):
                time.sleep(POLL_S)
            waiting = others


def _cache_folder() -> str:
    from triton import knobs

    return knobs.cache.dir


@contextlib.contextmanager
def _open_lock_file(folder: str) -> Iterator[int | None]:
    """The lock file's descriptor. None if it cannot be opened, as in a folder that cannot be written to."""
    try:
        os.makedirs(folder, exist_ok=True)
        file = os.open(os.path.join(folder, NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield None
        return
    try:
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def _locked(file: int | None, kernel: Hashable) -> Iterator[bool]:
    """Whether no other process compiles the kernel. True also if locks do not work, as on some network file systems."""
    place = int.from_bytes(hashlib.sha256(repr(kernel).encode()).digest()[:4], "big")
    try:
        if file is not None:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: another process has it
        yield False
        return
    except OSError:
        file = None
    try:
        yield True
    finally:
        if file is not None:
            fcntl.lockf(file, fcntl.LOCK_UN, 1, place)
