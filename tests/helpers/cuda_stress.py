"""Builds the library of tests/native that has the CUDA path on a simulated accelerator, and runs the scenes of
cuda_stress.cpp and members_scenes.cpp there."""

import sys
from pathlib import Path

import native_objects
import pytest
from native_objects import FLAGS, INCLUDE, OF_CUDA, TORCH
from scripts import ROOT, built, cxx, in_a_unit, is_built
from stream_stress import run

LIBRARY = "libcuda_stress.so"
# The sources that use torch are compiled as one unit, which setup.py writes.
UNIT = "build/units/0_torch.cpp"
LINK = ["-pthread", f"-L{TORCH / 'lib'}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
RUN = """import ctypes, sys, torch
library, function, scene, seed = sys.argv[1:]
getattr(ctypes.CDLL(library), function)(scene.encode(), ctypes.c_uint64(int(seed)))"""


def product_objects() -> list[Path]:
    """The build's objects of csrc/, without the bindings and without the unit of torch. Skips the test if the build is
    older than the sources."""
    if not (is_built() and (ROOT / UNIT).exists()):
        pytest.skip("needs the objects of a build that is newer than csrc/: `make build`")
    others = [path.stem for path in (ROOT / "csrc").iterdir() if path.stem not in ("bindings", "codec")]
    units = [path for name in others if (path := ROOT / f"build/units/{name}.cpp").exists()]
    alone = [path for path in sorted((ROOT / "csrc").rglob("*.cpp")) if not in_a_unit(str(path.relative_to(ROOT)))]
    return [built(str(path.relative_to(ROOT))) for path in [*units, *alone]]


def link(folder: Path, unit: Path) -> None:
    """Makes folder / LIBRARY of the sources in tests/native, the product's objects and an object of the unit."""
    product, compiler = product_objects(), cxx()
    objects = [*native_objects.compiled("cuda", OF_CUDA, compiler), unit, *product]
    run(compiler, "-shared", *objects, "-o", folder / LIBRARY, *LINK, f"-Wl,-rpath,{TORCH / 'lib'}")


def build(folder: Path) -> None:
    """As link(), with the build's unit."""
    link(folder, built(UNIT))


def compile_unit(folder: Path, flags: list[str]) -> Path:
    """Compiles the unit, with further flags before all others."""
    product_objects()
    out = folder / "unit.o"
    limits = ["--param", "ggc-min-heapsize=1048576"]  # see setup.py
    run(cxx(), *flags, *FLAGS, "-O0", "-fPIC", *limits, *INCLUDE, "-c", ROOT / UNIT, "-o", out)
    return out


def command(folder: Path, scene: str, seed: int = 1, function: str = "run") -> list[str | Path]:
    """The command that runs a scene of the library in the folder, in a process of its own.

    function: the library's that has the scene: "run" of cuda_stress.cpp, "run_members" of members_scenes.cpp.
    """
    return [sys.executable, "-c", RUN, str(folder / LIBRARY), function, scene, str(seed)]
