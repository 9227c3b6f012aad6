"""Builds the library of tests/native that has the CUDA path on a simulated accelerator, and runs its scenes:
cuda_scenes.cpp, cuda_failures.cpp, lane_scenes.cpp, members_scenes.cpp and nccl_scenes.cpp."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import native_objects
import pytest
from native_objects import FLAGS, INCLUDE, OF_CUDA, TORCH
from patience import HANG_S
from scripts import ROOT, built, cxx, in_a_unit, is_built

LIBRARY = "libcuda_stress.so"
# Units of several sources, which setup.py writes: those that use torch, and the engine.
UNITS = ("build/units/0_torch.cpp", "build/units/engine.cpp")
LINK = ["-pthread", f"-L{TORCH / 'lib'}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
LINK += [f"-Wl,-rpath,{TORCH / 'lib'}"]
RUN = """import ctypes, sys, torch
library, scene, seed = sys.argv[1:]
ctypes.CDLL(library).run(scene.encode(), ctypes.c_uint64(int(seed)))"""


def run(*command, timeout_s: int = HANG_S, **options) -> str:
    """What a command prints. Fails with all its output if its exit status is not 0."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


def product_objects(folder: Path, flags: Sequence[str] = ()) -> list[Path]:
    """The build's objects of csrc/, without the bindings. Skips the test if the build is older than the sources.

    flags: if any, UNITS are compiled again, to objects in the folder, with these before all others.
    """
    if not (is_built() and all((ROOT / unit).exists() for unit in UNITS)):
        pytest.skip("needs the objects of a build that is newer than csrc/: `make build`")
    sources = [path for path in (ROOT / "build/units").glob("*.cpp") if path.stem != "0_bindings"]
    sources += [path for path in (ROOT / "csrc").rglob("*.cpp") if not in_a_unit(str(path.relative_to(ROOT)))]
    objects = {source: built(source) for source in sorted(str(path.relative_to(ROOT)) for path in sources)}
    for unit in UNITS if flags else ():
        objects[unit] = folder / f"{Path(unit).stem}.o"
        limits = ["--param", "ggc-min-heapsize=1048576"]  # see setup.py
        run(cxx(), *flags, *FLAGS, *limits, *INCLUDE, "-c", ROOT / unit, "-o", objects[unit])
    return list(objects.values())


def link(library: Path, sources: Sequence[str], product: Sequence[Path], flags: Sequence[str] = ()) -> None:
    """Makes a library of sources in tests/native and objects of the product."""
    compiler = cxx()
    run(compiler, "-shared", *flags, *native_objects.compiled(sources, compiler), *product, "-o", library, *LINK)


def build(folder: Path, flags: Sequence[str] = ()) -> None:
    """Makes folder / LIBRARY. flags: as of product_objects()."""
    link(folder / LIBRARY, OF_CUDA, product_objects(folder, flags))


def command(folder: Path, scene: str, seed: int = 1) -> list[str | Path]:
    """The command that runs a scene of the library in the folder, in a process of its own."""
    return [sys.executable, "-c", RUN, str(folder / LIBRARY), scene, str(seed)]
