"""Imports the compiled extension. Every module imports it from here, so one message says how to build it."""

from pathlib import Path

import torch  # noqa: F401  (loads torch's libraries, which the extension links against)

try:
    from fusedcomm import _C
except ImportError as error:
    folder = Path(__file__).resolve().parent
    if not any(folder.glob("_C.*")):
        raise ImportError(
            f"the native extension fusedcomm._C has not been built: there is none in {folder}. Build it there with: "
            "make build   (or, if fusedcomm is installed, start Python in another folder: Python finds this one first)"
        ) from error
    raise ImportError(
        f"the native extension fusedcomm._C cannot be loaded with torch {torch.__version__} ({error}). Build it "
        "against this torch, in a checkout, with: make build   (or: pip install --no-build-isolation -e .)"
    ) from error

__all__ = ["_C"]
