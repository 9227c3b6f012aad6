"""The one place that imports the compiled extension, so that one message says how to build it."""

import torch  # noqa: F401  (the extension links against torch's libraries, which this loads)

try:
    from fusedcomm import _C
except ImportError as error:
    raise ImportError(
        f"the native extension fusedcomm._C cannot be loaded with torch {torch.__version__} ({error}). Build it "
        "against this torch, in a checkout, with: make build   (or: pip install --no-build-isolation -e .)"
    ) from error

__all__ = ["_C"]
