"""Files that fusedcomm writes: whole, or not at all. Loads no torch."""

import contextlib
import errno
import io
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""The errors whose reason is the disk, which is then named."""


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Yields a new file, which takes the place of `path` when the block has ended without an error.

    It lies beside `path`, under a name that nobody can guess or have made before. After an error it is removed, and
    `path` is as it was. A link at `path` is replaced, not followed. A device or pipe, such as /dev/stdout, is written
    to as it is.

    Raises:
        OSError: writing failed. The text names the disk and says how much of it is free; `filename` is `path`.
    """
    path = Path(path)
    if is_stream(path):
        with open(path, "wb") as file:
            yield file
        return
    unfinished = _beside(path)
    try:
        raw = _File(unfinished, "xb", opener=_create)
    except OSError as error:
        raise told(error, path) from error
    try:
        with io.BufferedWriter(raw) as file:
            if path.is_file() and not path.is_symlink():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())  # a full disk behind a network is noticed only here
        unfinished.replace(path)
    except BaseException as error:
        cause = error if isinstance(error, OSError) and error.errno is not None else raw.failure
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        if cause is None:
            raise
        raise told(cause, path) from error


def write_text(path: str | os.PathLike, text: str) -> None:
    """Replaces the file by one with this text; see :func:`replacing`."""
    with replacing(path) as file:
        file.write(text.encode())


def is_stream(path: Path) -> bool:
    """Whether `path` stands for a device, a pipe or an open file of this process, which cannot be replaced."""
    place = path.absolute()
    is_open_file = place.parent in (Path("/dev"), Path("/dev/fd")) or place.is_relative_to("/proc")
    return path.exists() and not path.is_dir() and (is_open_file or not path.is_file())


def why_not_writable(path: Path) -> str:
    """Why :func:`replacing` cannot write `path`, whose folder exists; empty if it can. A file beside it is made and
    removed again: root has every permission, also for folders of the kernel and disks that are full."""
    try:
        if not os.access(path if is_stream(path) else path.parent, os.W_OK):
            return "no permission"
        if is_stream(path):
            return ""
        unfinished = _beside(path)
        try:
            with open(unfinished, "xb", opener=_create) as file:
                file.write(b" ")
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        return error.strerror
    return ""


def told(error: OSError, path: Path) -> OSError:
    """`error` of writing `path`, which it then names; if the disk is the reason, the text says how much is free."""
    where = _disk_of(path) if error.errno in _OF_DISKS else ""
    return OSError(error.errno, f"{error.strerror}{where}", str(path))


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def _create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


class _File(io.FileIO):
    """A file that remembers the error of writing it. Who writes to it, torch.save for example, may raise another."""

    failure: OSError | None = None

    def write(self, data: bytes) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


def _disk_of(path: Path) -> str:
    """The disk of a file and what is free there, to follow a reason. Empty if the disk cannot be asked."""
    folder = path.absolute().parent
    try:
        space = os.statvfs(folder)
    except OSError:
        return ""
    mount = next((place for place in (folder, *folder.parents) if os.path.ismount(place)), folder)
    free, whole = (blocks * space.f_frsize / 2**20 for blocks in (space.f_bavail, space.f_blocks))
    return f" (without this file the disk at {mount} has {free:.2f} of {whole:.2f} MiB free)"
