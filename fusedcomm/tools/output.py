"""The files that commands write. They are checked before the work begins; pictures are drawn with matplotlib."""

import os
from pathlib import Path
from types import ModuleType

from fusedcomm.tools.errors import UsageError

PICTURES = (".png", ".pdf", ".svg")
BLACK, GREY = "#000000", "#8a8a8a"
PALETTE = ("#e69f00", "#009e73", "#0072b2", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442")
"""Okabe and Ito's colors, which color-blind readers can tell apart."""


def check(json: Path | None, plot: Path | None, options: tuple[str, str] = ("--json", "--plot")) -> None:
    """Checks that both files can be written, and creates their folders.

    Args:
        json: the JSON file; None: none is written.
        plot: the picture; None: none is written.
        options: the options that named the two files, for error messages.

    Raises:
        UsageError: a file cannot be written, or the suffix of `plot` is not in PICTURES.
    """
    if plot is not None and plot.suffix.lower() not in PICTURES:
        raise UsageError(
            f"{options[1]} {plot}: a picture's name ends in one of {', '.join(PICTURES)}; use another name"
        )
    for option, path in zip(options, (json, plot), strict=True):
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{option} {path}: its folder cannot be made ({error.strerror}); name another file"
            ) from error
        if path.is_dir():
            raise UsageError(f"{option} {path} is a folder; name a file")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UsageError(f"{option} {path} cannot be written: no permission; name another file")


def pyplot() -> ModuleType:
    """matplotlib.pyplot, set up to draw files. Without matplotlib, raises ImportError that says what to install."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("pictures need matplotlib, which is not installed: pip install matplotlib") from error
    matplotlib.use("Agg")  # draws files only, so no screen is needed
    from matplotlib import pyplot

    return pyplot
