"""Ranks of a host attach at the same time and need the same kernels: each kernel is compiled by one of them, while the
others compile others, and all find the rest in the compiler's cache.

One file beside that cache has a byte for each kernel, which a rank locks while it compiles that. The system lets go of
the locks of a process that dies. Where there can be no lock, every rank compiles for itself, as it would without this.
"""

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator

NAME = "fusedcomm.lock"
PATIENCE_S = 120.0
"""After which a rank compiles what another has had for so long: that may have been stopped. A kernel takes seconds."""
POLL_S = 0.02


def compiled(kernels: Iterable[Hashable], compile: Callable, folder: str | None = None) -> Iterator:
    """``compile(kernel)`` for each of `kernels`, in the order in which they are there.

    Args:
        kernels: their repr() tells them apart, and is the same in every process.
        compile: finds in a cache what any process has compiled.
        folder: of the cache; None: Triton's.
    """
    waiting = list(kernels)
    until = time.monotonic() + PATIENCE_S
    with _open_lock_file(_cache_folder() if folder is None else folder) as file:
        while waiting:
            others = []
            for kernel in waiting:
                with _locked(file, kernel) as is_ours:
                    if not is_ours and time.monotonic() < until:
                        others.append(kernel)
                        continue
                    result = compile(kernel)
                yield result
                until = time.monotonic() + PATIENCE_S
            if len(others) == len(waiting):
                time.sleep(POLL_S)
            waiting = others


def _cache_folder() -> str:
    from triton import knobs

    return knobs.cache.dir


@contextlib.contextmanager
def _open_lock_file(folder: str) -> Iterator[int | None]:
    """Its descriptor; None if there can be none, as in a folder that cannot be written to."""
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
    """Whether nobody else compiles it; True where that cannot be known, as on some network file systems."""
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
