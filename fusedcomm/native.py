"""Imports the compiled extension. Every module imports it from here, so one message says how to build it."""

import sys
from pathlib import Path

import torch  # also loads torch's libraries, which the extension links against

from fusedcomm.version import built_for, minor

_HOW_TO_BUILD = (
    "Build it for this torch, in a checkout of fusedcomm: `make build` to use it there, or `pip install "
    "--no-build-isolation --force-reinstall --no-deps .` to install it"
)


def _hidden_by(folder: Path) -> Path | None:
    """The folder of a package fusedcomm with an extension that Python would have found after `folder`; None if there is
    none."""
    places = (Path(place or ".").resolve() / "fusedcomm" for place in sys.path)
    return next((place for place in places if place != folder and any(place.glob("_C*.so"))), None)


_torch = built_for()
if _torch is not None and minor(_torch) != minor(torch.__version__):
    raise ImportError(
        f"the native extension fusedcomm._C was built for torch {_torch}, and this is torch {torch.__version__}: each "
        f"minor version of torch needs a build of its own. {_HOW_TO_BUILD}; or install torch {minor(_torch)} again"
    )
try:
    from fusedcomm import _C
except ImportError as error:
    folder = Path(__file__).resolve().parent
    if not any(folder.glob("_C*.so")):
        if (hidden := _hidden_by(folder)) is not None:
            raise ImportError(
                f"the folder {folder.parent} holds a checkout of fusedcomm that has not been built, and hides the "
                f"fusedcomm that is installed in {hidden.parent}: Python finds the checkout first. Run from another "
                "folder (and leave the checkout out of PYTHONPATH), or build it there with: make build"
            ) from error
        raise ImportError(
            f"the native extension fusedcomm._C has not been built: there is none in {folder}. Build it there with: "
            "make build   (or, if fusedcomm is installed, start Python in another folder: Python finds this one first)"
        ) from error
    raise ImportError(
        f"the native extension fusedcomm._C cannot be loaded with torch {torch.__version__} ({error}). {_HOW_TO_BUILD}"
    ) from error

__all__ = ["_C"]
