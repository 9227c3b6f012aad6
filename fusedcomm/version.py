"""fusedcomm's version, which pyproject.toml reads from here, and the torch that the extension was built for."""

from pathlib import Path

__version__ = "0.3.0"

BUILT_FOR = "_C.torch"
"""The file beside the extension in which setup.py writes the version of torch that it builds for."""


def built_for() -> str | None:
    """The version of torch that the extension was built for; None if no build has written it."""
    path = Path(__file__).with_name(BUILT_FOR)
    return path.read_text().strip() if path.is_file() else None


def minor(version: str) -> str:
    """The part of torch's version that the extension depends on: "2.13" of "2.13.0+cpu".

    Torch's C++ classes change between minor versions. They are the same in its builds for CPU and for CUDA.
    """
    return ".".join(version.split(".")[:2])
