"""Committed states as files, for workers that a launcher has restarted. Opt-in: FUSEDCOMM_HOROVOD_STATE names a folder.

A file has what ranks/objects.py packs, so reading one runs no code of whoever wrote it.
"""

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

from fusedcomm import files
from fusedcomm.ranks.objects import pack, unpack


def path() -> Path | None:
    """This job's file; None if no folder is named. Under torchrun the job's name is its --rdzv-id."""
    folder = os.environ.get("FUSEDCOMM_HOROVOD_STATE")
    if not folder:
        return None
    return Path(folder) / f"{os.environ.get('TORCHELASTIC_RUN_ID') or 'job'}.pt"


def write(path: Path, content: dict[str, Any]) -> None:
    """Replaces the file in one step: a worker that is killed meanwhile leaves the old one.

    Raises OSError that names the file and its disk, and TypeError for a part that cannot be packed; the old file is
    then as it was.
    """
    packed, tensors = pack(content, "what FUSEDCOMM_HOROVOD_STATE keeps")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with files.replacing(path) as file:
        os.fchmod(file.fileno(), 0o600)  # for this user alone
        torch.save([packed.decode(), tensors], file)


def read() -> dict[str, Any] | None:
    """None if there is no file. Raises what torch.load() raises if it is damaged."""
    found = path()
    if found is None or not found.exists():
        return None
    packed, kept = torch.load(found, map_location="cpu", weights_only=True)
    content, tensors = unpack(packed.encode(), lambda index, _dtype, _shape, device: kept[index].to(device))
    for tensor, value in zip(tensors, kept, strict=True):
        tensor.copy_(value)  # numpy's arrays are made by unpack()
    return content


def remove() -> None:
    """The job has ended well: the next one must not continue it."""
    if (found := path()) is not None:
        with contextlib.suppress(FileNotFoundError):
            found.unlink()
