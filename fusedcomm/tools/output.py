"""The files that commands read and write, which are checked before the work begins, and progress bars."""

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fusedcomm.files import why_not_writable
from fusedcomm.tools.errors import UsageError

if TYPE_CHECKING:
    from tqdm import tqdm


def check(files: Iterable[tuple[str, Path | None]]) -> None:
    """Checks that files can be written, and creates their folders.

    Args:
        files: (option that names the file, file). None: no file is written.

    Raises:
        UsageError: a file cannot be written.
    """
    for option, path in files:
        if path is None:
            continue
        if os.path.isdir(path):
            raise UsageError(f"{option} {path} is a folder; name a file")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            is_file = path.parent.exists() and not path.parent.is_dir()
            reason = f"{path.parent} is no folder" if is_file else error.strerror
            raise UsageError(f"{option} {path}: its folder cannot be made ({reason}); name another file") from error
        if reason := why_not_writable(path):
            raise UsageError(f"{option} {path} cannot be written: {reason}; name another file")


def say_written(*paths: Path) -> None:
    """Says which files a command has written."""
    for path in paths:
        print(f"Written: {path}", flush=True)


def bar(**options: object) -> "tqdm":
    """A progress bar of tqdm with these options. Raises ImportError without tqdm."""
    from tqdm import tqdm

    # tqdm's own lock is shared by processes. A rank that is ended would leave it behind, and Python would warn of that.
    tqdm.set_lock(threading.RLock())
    tqdm.monitor_interval = 0  # its thread would run beside what is measured
    return tqdm(**options)
