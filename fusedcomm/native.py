"""Imports the compiled extension. Every module imports it from here, so one message says how to build it."""

from pathlib import Path

import torch  # also loads torch's libraries, which the extension links against

from fusedcomm.version import built_for, minor

_HOW_TO_BUILD = (
    "Build it for this torch, in a checkout of fusedcomm: `make build` to use it there, or `pip install "
    "--no-build-isolation --force-reinstall --no-deps .` to install it"
)

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
        raise ImportError(
            f"the native extension fusedcomm._C has not been built: there is none in {folder}. Build it there with: "
            "make build   (or, if fusedcomm is installed, start Python in another folder: Python finds this one first)"
        ) from error
    raise ImportError(
        f"the native extension fusedcomm._C cannot be loaded with torch {torch.__version__} ({error}). {_HOW_TO_BUILD}"
    ) from error

__all__ = ["_C"]
