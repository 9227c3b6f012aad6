"""Builds tests/native/stream_stress.cpp, which runs the engine over the streams of a simulated accelerator."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import native_objects
from native_objects import FLAGS, INCLUDE, OF_STREAMS, TORCH
from patience import HANG_S
from scripts import ROOT, built, cxx

# What the program links besides OF_STREAMS: the build's objects.
PRODUCT = [
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc/engine").glob("*.cpp")),
    "csrc/devices/cpu_device.cpp",
    *(f"csrc/lanes/{name}.cpp" for name in ("inline_lane", "cpu_lane")),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc/codec").glob("*.cpp")),
    *(f"csrc/codec/isa/{name}.cpp" for name in ("portable", "avx2", "avx512", "neon")),
]
LINK = ["-pthread", f"-L{TORCH / 'lib'}", "-lc10", f"-Wl,-rpath,{TORCH / 'lib'}"]


def run(*command, timeout_s: int = HANG_S, **options) -> str:
    """What a command prints. Fails with all its output if its exit status is not 0."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


def build(folder: Path, mutated: dict[str, Path] | None = None, flags: list[str] | None = None) -> None:
    """Makes folder / "stream_stress", and an object there of each source that neither the build nor native_objects
    compiles. Skips the test if there is no compiler.

    mutated: another source to compile in place of each of these sources; flags: further ones for these.
    """
    compiler, mutated = cxx(), mutated or {}

    def compile_one(source: str) -> Path:
        if source not in mutated and (made := built(source)).suffix == ".o":
            return made
        out = folder / (Path(source).stem + ".o")
        path, more = (mutated[source], flags or []) if source in mutated else (ROOT / source, [])
        run(compiler, *FLAGS, *more, *INCLUDE, "-c", path, "-o", out)
        return out

    objects = native_objects.compiled("streams", [source for source in OF_STREAMS if source not in mutated], compiler)
    with ThreadPoolExecutor(2) as pool:
        objects += pool.map(compile_one, [*PRODUCT, *(source for source in mutated if source in OF_STREAMS)])
    run(compiler, *objects, "-o", folder / "stream_stress", *LINK)
