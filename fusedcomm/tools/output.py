"""The files that commands write. They are checked before the work begins; pictures are drawn with matplotlib."""

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from fusedcomm.files import replacing, why_not_writable
from fusedcomm.tools.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from tqdm import tqdm

BLACK, GREY = "#000000", "#8a8a8a"
PALETTE = ("#e69f00", "#009e73", "#0072b2", "#cc79a7", "#d55e00", "#56b4e9", "#8c510a", "#999933")
"""Okabe and Ito's colors, which color-blind readers can tell apart; brown and olive in the place of a yellow that is
faint on white."""


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


def check_readable(option: str, paths: Iterable[Path]) -> None:
    """Checks that files can be read. Raises UsageError that names the first one that cannot, and its `option`."""
    for path in paths:
        if not path.is_file():
            raise UsageError(f"{option} {path}: there is no such file; name an existing one")
        if not os.access(path, os.R_OK):
            raise UsageError(f"{option} {path} cannot be read: no permission; name another file")


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


def pyplot() -> ModuleType:
    """matplotlib.pyplot, set up to draw files. Without matplotlib, raises ImportError that says what to install."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("pictures need matplotlib, which is not installed: pip install matplotlib") from error
    matplotlib.use("Agg")  # draws files only, so no screen is needed
    from matplotlib import pyplot

    return pyplot


def save_picture(figure: "Figure", path: Path, dpi: int) -> None:
    """Writes the picture, in the format that the file's name ends in, and closes it."""
    from matplotlib import pyplot

    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=dpi)
    pyplot.close(figure)
