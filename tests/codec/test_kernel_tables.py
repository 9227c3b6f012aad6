"""Every instruction set that this machine can run gives the bytes of the portable kernels."""

import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest
from scripts import ROOT, compiled

from fusedcomm.native import _C

pytestmark = pytest.mark.check  # it compiles

ISAS = ("portable", "neon", "avx2", "avx512")
SOURCES = ("tests/native/kernel_tables.cpp", *(f"csrc/codec/isa/{isa}.cpp" for isa in ISAS))
NUM_SEEDS = 3


def compared(command: list) -> dict[str, int]:
    """How many outputs were compared, by instruction set."""
    done = subprocess.run([*command, str(NUM_SEEDS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {isa: int(count) for isa, count in map(str.split, done.stdout.splitlines())}


def test_tables_of_this_machine(tmp_path):
    counts = compared([compiled(tmp_path, *SOURCES)])
    assert set(counts) == set(_C.available_isas()) - {"portable"}
    assert all(count > 600 * NUM_SEEDS for count in counts.values())


@pytest.mark.full
def test_neon_in_an_emulator(tmp_path):
    """Needs `pip install ziglang`, which has a compiler for Arm, and qemu-aarch64-static."""
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if not emulator or find_spec("ziglang") is None:
        pytest.skip("needs qemu-aarch64-static and ziglang")
    binary = tmp_path / "program"
    options = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-static", "-I", "csrc"]
    command = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl", *options, *SOURCES]
    subprocess.run([*command, "-o", binary], cwd=ROOT, check=True)
    assert compared([emulator, binary])["neon"] > 600 * NUM_SEEDS
