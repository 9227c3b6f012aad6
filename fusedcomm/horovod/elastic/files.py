"""Committed states as files, for workers that a launcher has restarted. Opt-in: FUSEDCOMM_HOROVOD_STATE names a folder.

The files are pickles, which can run code: a file that another user has written, or could have, is not read. They are
not signed: the job that a user starts after a lost one has another key.
"""

import contextlib
import os
import stat
from pathlib import Path
from typing import Any

import torch

from fusedcomm import files


def path() -> Path | None:
    """This job's file; None if no folder is named. Under torchrun the job's name is its --rdzv-id."""
    folder = os.environ.get("FUSEDCOMM_HOROVOD_STATE")
    if not folder:
        return None
    return Path(folder) / f"{os.environ.get('TORCHELASTIC_RUN_ID') or 'job'}.pt"


def write(path: Path, content: dict[str, Any]) -> None:
    """Replaces the file in one step: a worker that is killed meanwhile leaves the old one.

    Raises OSError that names the file and its disk; the old file is then as it was. Raises RuntimeError if read() would
    refuse the file, on a file system that keeps no owners, for example.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with files.replacing(path) as file:
        os.fchmod(file.fileno(), 0o600)  # for this user alone
        _refuse_others(path, os.fstat(file.fileno()))
        torch.save(content, file)


def read() -> dict[str, Any] | None:
    """None if there is no file. Raises RuntimeError if another user may have written it, and what torch.load() raises
    if it is damaged."""
    found = path()
    if found is None or not os.path.lexists(found):
        return None
    _refuse_others(found, found.lstat())
    # The file may be exchanged meanwhile: a link is not followed, and what is open is looked at again.
    with open(found, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        _refuse_others(found, os.fstat(file.fileno()))
        return torch.load(file, weights_only=False)


def _refuse_others(path: Path, found: os.stat_result) -> None:
    """Raises RuntimeError if others than this process's user and root can have written the file, or put it there."""
    folder_mode = path.parent.stat().st_mode
    if not stat.S_ISREG(found.st_mode):
        problem = "it is no file, but a link or a device"
    elif found.st_uid not in (0, os.geteuid()):
        problem = f"it belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"others may write to it (mode {stat.S_IMODE(found.st_mode):o})"
    elif folder_mode & stat.S_IWOTH and not folder_mode & stat.S_ISVTX:
        problem = f"everybody may exchange files in its folder (mode {stat.S_IMODE(folder_mode):o})"
    else:
        return
    raise RuntimeError(
        f"fusedcomm.horovod: the state in {path} is refused: {problem}. A state can run code: set "
        "FUSEDCOMM_HOROVOD_STATE to a folder in which only you can write, on a file system that keeps owners and modes"
    )


def remove() -> None:
    """The job has ended well: the next one must not continue it."""
    if (found := path()) is not None:
        with contextlib.suppress(FileNotFoundError):
            found.unlink()
