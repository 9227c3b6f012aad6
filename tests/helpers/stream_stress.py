"""Builds tests/native/stream_stress.cpp, which runs the engine over the streams of a simulated accelerator."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from patience import HANG_S
from scripts import ROOT, built, cxx

SOURCES = [
    "tests/native/stream_stress.cpp",
    "tests/native/sim_accelerator.cpp",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc/engine").glob("*.cpp")),
    *(f"csrc/devices/{name}.cpp" for name in ("stream_lane", "stream_device", "cpu_device")),
    *(f"csrc/lanes/{name}.cpp" for name in ("inline_lane", "cpu_lane")),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc/codec").glob("*.cpp")),
    *(f"csrc/codec/isa/{name}.cpp" for name in ("portable", "avx2", "avx512", "neon")),
]
TORCH = Path(torch.__file__).parent
FLAGS = ["-std=c++20", "-O1", "-ffp-contract=off", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
LINK = ["-pthread", f"-L{TORCH / 'lib'}", "-lc10", f"-Wl,-rpath,{TORCH / 'lib'}"]


def run(*command, timeout_s: int = HANG_S, **options) -> str:
    """What a command prints. Fails with all its output if its exit status is not 0."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


def build(folder: Path, mutated: dict[str, Path] | None = None, flags: list[str] | None = None) -> None:
    """Makes folder / "stream_stress", and an object there of each source that the build has not compiled. Skips the
    test if there is no compiler.

    mutated: another source to compile in place of each of these sources; flags: further ones for these.
    """
    compiler = cxx()
    include = ["-I", ROOT / "csrc", "-isystem", TORCH / "include"]

    def compile_one(source: str) -> Path:
        is_mutated = source in (mutated or {})
        if not is_mutated and (made := built(source)).suffix == ".o":
            return made
        out = folder / (Path(source).stem + ".o")
        if not out.exists():
            path = mutated[source] if is_mutated else ROOT / source
            run(compiler, *FLAGS, *(flags or [] if is_mutated else []), *include, "-c", path, "-o", out)
        return out

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, SOURCES))
    run(compiler, *objects, "-o", folder / "stream_stress", *LINK)
