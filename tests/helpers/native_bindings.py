"""Builds and loads tests/native/bindings.cpp, a Python module of what only tests use of the product's C++ code."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import cuda_stress
from native_objects import OF_BINDINGS

NAME = "test_bindings"


def build(folder: Path) -> None:
    """Makes folder / NAME + ".so". Skips the test if there is no compiler, or no build that is newer than csrc/."""
    cuda_stress.link(folder / f"{NAME}.so", OF_BINDINGS, cuda_stress.product_objects(folder))


def load(folder: Path) -> ModuleType:
    """The module that build() has made there. A process loads it once."""
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(NAME, folder / f"{NAME}.so")
        sys.modules[NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[NAME])
    return sys.modules[NAME]
