"""Builds and loads tests/native/bindings.cpp, a Python module of what only tests use of the product's C++ code."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import native_objects
from cuda_stress import LINK, UNIT, product_objects
from native_objects import OF_BINDINGS, TORCH
from scripts import built, cxx
from stream_stress import run

NAME = "test_bindings"


def build(folder: Path) -> None:
    """Makes folder / NAME + ".so". Skips the test if there is no compiler, or no build that is newer than csrc/."""
    product, compiler = [*product_objects(), built(UNIT)], cxx()
    objects = [*native_objects.compiled("bindings", OF_BINDINGS, compiler), *product]
    run(compiler, "-shared", *objects, "-o", folder / f"{NAME}.so", *LINK, f"-Wl,-rpath,{TORCH / 'lib'}")


def load(folder: Path) -> ModuleType:
    """The module that build() has made there. A process loads it once."""
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(NAME, folder / f"{NAME}.so")
        sys.modules[NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[NAME])
    return sys.modules[NAME]
