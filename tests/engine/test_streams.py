"""The engine over streams, without a GPU: compiles tests/native/stream_stress.cpp, which simulates an accelerator,
against the installed c10 and runs it."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from patience import HANG_S
from scripts import built, cxx

ROOT = Path(__file__).parents[2]
SOURCES = [
    "tests/native/stream_stress.cpp",
    "tests/native/sim_accelerator.cpp",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc/engine").glob("*.cpp")),
    *(f"csrc/devices/{name}.cpp" for name in ("stream_lane", "stream_device", "cpu_device")),
    *(f"csrc/lanes/{name}.cpp" for name in ("inline_lane", "cpu_lane")),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc/codec").glob("*.cpp")),
    *(f"csrc/codec/isa/{name}.cpp" for name in ("portable", "avx2", "avx512", "neon")),
]
SCENES = ["steady", "host_never_waits", "traced", "failing", "faulted", "stopped", "calls_fail", "two_levels"]
SCENES += ["calls", "lane_streams"]


def run(*command, timeout_s: int = HANG_S) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def stream_stress(made_once) -> Path:
    compiler = cxx()
    return made_once("streams", lambda folder: build(compiler, folder)) / "stream_stress"


def build(compiler: str, folder: Path) -> None:
    installed = Path(torch.__file__).parent
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-I", ROOT / "csrc", "-isystem", installed / "include"]
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")

    def compile_one(source: str) -> Path:
        if (made := built(source)).suffix == ".o":
            return made
        out = folder / (Path(source).stem + ".o")
        run(compiler, *flags, "-c", ROOT / source, "-o", out)
        return out

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, SOURCES))
    lib = installed / "lib"
    run(compiler, *objects, "-o", folder / "stream_stress", "-pthread", f"-L{lib}", "-lc10", f"-Wl,-rpath,{lib}")


@pytest.mark.parametrize("scene", SCENES)
def test_scene(stream_stress, scene):
    assert f"stream_stress: {scene}:" in run(stream_stress, scene)
