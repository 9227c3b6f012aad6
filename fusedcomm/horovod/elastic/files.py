"""Committed states as files, for workers that a launcher has restarted. Opt-in: FUSEDCOMM_HOROVOD_STATE names a folder.

The files are pickles: whoever can write to the folder can run code in the job.
"""

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

import fusedcomm.horovod.environment as environment
from fusedcomm import files


def path() -> Path | None:
    """This job's file; None if no folder is named. Under torchrun the job's name is its --rdzv-id."""
    folder = environment.text("FUSEDCOMM_HOROVOD_STATE")
    if folder is None:
        return None
    return Path(folder) / f"{os.environ.get('TORCHELASTIC_RUN_ID') or 'job'}.pt"


def write(path: Path, content: dict[str, Any]) -> None:
    """Replaces the file in one step: a worker that is killed meanwhile leaves the old one.

    Raises OSError that names the file and its disk; the old file is then as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as file:
        torch.save(content, file)


def read() -> dict[str, Any] | None:
    """None if there is no file. Raises what torch.load() raises if it is damaged."""
    found = path()
    if found is None or not found.exists():
        return None
    return torch.load(found, weights_only=False)


def remove() -> None:
    """The job has ended well: the next one must not continue it."""
    if (found := path()) is not None:
        with contextlib.suppress(FileNotFoundError):
            found.unlink()
