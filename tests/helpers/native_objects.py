"""Compiles the sources of tests/native that need torch's headers, with ninja, to objects in build/native: once, and
again only what has changed."""

import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/native"
TORCH = Path(torch.__file__).parent
FLAGS = ["-std=c++20", "-O0", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
INCLUDE = [f"-I{ROOT / 'csrc'}", "-isystem", TORCH / "include", "-isystem", TORCH / "include/torch/csrc/api/include"]
INCLUDE += ["-isystem", sysconfig.get_path("include")]

OF_CUDA = [f"tests/native/sim_{name}.cpp" for name in ("accelerator", "backend", "kernels", "nccl", "python", "torch")]
OF_CUDA += [f"tests/native/{name}.cpp" for name in ("scenes", "cuda_scenes", "cuda_failures", "fake_cuda")]
OF_CUDA += [f"tests/native/{name}.cpp" for name in ("lane_scenes", "members_scenes", "nccl_scenes")]
"""Linked into the library of cuda_stress.py."""

OF_BINDINGS = ["tests/native/bindings.cpp"]
"""Linked into the module of native_bindings.py."""


def _built_file(compiler: str) -> str:
    """What ninja is told. Objects are position-independent, and not optimized: that would take longer than it saves."""
    lines = ["rule compile", f"  command = {compiler} -MMD -MF $out.d $flags -c $in -o $out", "  depfile = $out.d"]
    lines += ["  deps = gcc"]
    for source in (*OF_CUDA, *OF_BINDINGS):
        lines += [f"build {Path(source).stem}.o: compile {ROOT / source}"]
        lines += [f"  flags = {' '.join(map(str, [*FLAGS, *INCLUDE]))}"]
    return "\n".join(lines) + "\n"


def compiled(sources: Sequence[str], compiler: str) -> list[Path]:
    """The objects of these sources, compiled if they are out of date. Raises AssertionError with the compiler's output
    if it refuses one."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    objects = [f"{Path(source).stem}.o" for source in sources]
    with FileLock(FOLDER / "lock"):
        file = FOLDER / "build.ninja"
        if not file.exists() or file.read_text() != _built_file(compiler):
            file.write_text(_built_file(compiler))
        done = subprocess.run(["ninja", "-C", FOLDER, "-j2", *objects], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [FOLDER / name for name in objects]
