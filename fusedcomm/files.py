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


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Yields a new file, which takes the place of `path` when the block has ended without an error.

    It lies beside `path`, under a name that nobody can guess or have made before. After an error it is removed, and
    `path` is as it was. A link at `path` is replaced, not followed. A device or pipe, such as /dev/stdout, is written
    to as it is.

    Raises:
        OSError: writing failed; `filename` is `path`.
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
        raise _of(error, path) from error
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
        raise _of(cause, path) from error


def write_text(path: str | os.PathLike, text: str) -> None:
    """Replaces the file by one with this text; see :func:`replacing`."""
    with replacing(path) as file:
        file.write(text.encode())


def is_stream(path: Path) -> bool:
    """Whether `path` stands for a device, a pipe or an open file of this process, which cannot be replaced."""
    place = path.absolute()
    is_open_file = place.parent in (Path("/dev"), Path("/dev/fd")) or place.is_relative_to("/proc")
    return path.exists() and not path.is_dir() and (is_open_file or not path.is_file())


def check_writable(path: Path) -> None:
    """Makes the folder of `path`. Raises OSError, with the reason, if :func:`replacing` cannot write `path`. A file
    beside it is made and removed again: root has every permission, also for folders of the kernel and full disks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder, and a file is wanted", str(path))
    if not os.access(path if is_stream(path) else path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, "no permission", str(path))
    if is_stream(path):
        return
    unfinished = _beside(path)
    try:
        with open(unfinished, "xb", opener=_create) as file:
            file.write(b" ")
    except OSError as error:
        raise _of(error, path) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _of(error: OSError, path: Path) -> OSError:
    """`error` of writing `path`, which it then names."""
    return OSError(error.errno, error.strerror, str(path))


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
