"""Triton's code for the kernels on every GPU generation, without a GPU: widths of accesses, registers, barriers. What
the code computes: tests/kernels/test_every_variant.py."""

import base64
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from values import WIRES

pytestmark = pytest.mark.check

triton = pytest.importorskip("triton")

from compiling import environment  # noqa: E402

from fusedcomm.kernels.variants import NUM_WARPS, SUPPORTED_TRITON, TILE, Variant  # noqa: E402
from fusedcomm.native import _C  # noqa: E402

ROOT = Path(__file__).parents[2]
CAPABILITIES = (75, 80, 90, 100, 120)
NUM_THREADS = 32 * NUM_WARPS
FP32, BF16 = torch.float32, torch.bfloat16

# (kernel, wire, gradient dtype, other fields of the variant)
KERNELS = [
    ("scale", None, FP32, {}),
    *(("reduce", wire, None, {}) for wire in WIRES),
    *((kernel, wire, FP32, {}) for kernel in ("pack", "unpack") for wire in WIRES),
    *((kernel, wire, BF16, {}) for kernel in ("pack", "unpack") for wire in WIRES[:4]),
    *(("unpack", wire, FP32, {"sums": True}) for wire in ("bf16", "int8", "fp8")),
    ("unpack", "int4", FP32, {"sums": True}),
    ("pack", "bf16", FP32, {"feedback": True}),
    ("pack", "bf16", BF16, {"feedback": True}),
    ("pack", "int8", FP32, {"feedback": True}),
    ("pack", "int4", FP32, {"feedback": True}),
    ("reduce", "fp8", None, {"feedback": True}),
    ("reduce", "int4", None, {"feedback": True}),
    ("reduce", "int4", None, {"feedback": True, "in_wire": "bf16"}),
]


@pytest.fixture
def compiled(compilers):
    """compiled(kernel, wire, dtype, fields, capability) returns what ptx_kernels.TritonCompiler does."""

    def compiled(kernel: str, wire: str | None, dtype: torch.dtype | None, fields: dict, capability: int) -> dict:
        variant = Variant(kernel, wire, 32 if wire == "int4" else 128, dtype, **fields)
        return compilers("newest")(variant, TILE, capability)

    return compiled


def resources(cubin: str) -> dict[str, int]:
    """The resources that cuobjdump reports for the kernel of a cubin in base 64: {"REG": …, "STACK": …, "LOCAL": …}."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(base64.b64decode(cubin))
        file.flush()
        said = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", said)}


def num_accesses(ptx: str, verb: str, nbytes: float) -> int:
    """How many accesses of so many bytes to global memory there are."""
    types = {16: r"v4\.b32|v2\.b64", 8: r"v2\.b32|b64", 4: r"b32", 2: r"b16"}[int(nbytes)]
    return len(re.findall(rf"{verb}\.global\.({types})\s", ptx))


def sample(kernel, wire, dtype, fields, capability):
    return {"stage": (kernel, tuple(fields)), "wire": wire, "capability": capability}


@pytest.mark.sampled(by=sample)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("kernel", "wire", "dtype", "fields"), KERNELS, ids=str)
def test_accesses_are_wide_and_nothing_is_spilled(compiled, kernel, wire, dtype, fields, capability):
    """A thread accesses at once as many neighbors as fill 16 bytes of the widest of gradient, code and residual."""
    code = compiled(kernel, wire, dtype, fields, capability)
    used = resources(code["cubin"])
    assert used["STACK"] == used["LOCAL"] == 0
    assert used["REG"] <= (128 if fields else 80)
    # A tile passes through no shared memory: at its end, pack finds the greatest magnitude of all threads.
    ptx = code["ptx"]
    # Conversions of bytes have a quarter of other instructions' rate, or less.
    assert not re.search(r"cvt\.rn\.f32\.[su]", ptx)
    assert ("e4m3x2" in ptx) == (wire == "fp8" and capability >= 89)
    with_tiles = ptx[: ptx.rindex("st.global")] if kernel == "pack" else "" if kernel == "scale" else ptx
    assert not re.search(r"bar\.|(?:ld|st)\.shared", with_tiles)
    if capability == 75:
        return
    grad, in_code = dtype and dtype.itemsize, fields.get("in_wire", wire)
    code_nbytes = {name: _C.code_nbits(name) / 8 for name in (wire, in_code) if name}
    moved = {  # bytes of an element that each kernel loads and stores
        "pack": (grad, code_nbytes.get(wire)),
        "unpack": (code_nbytes.get(wire), grad),
        "reduce": (code_nbytes.get(in_code), code_nbytes.get(wire)),
        "scale": (grad, grad),
    }[kernel]
    residual = 4 if fields.get("feedback") else 0
    # int4 has two codes in a byte, and a thread at most 16 elements of a tile.
    numel = int(min(16 / max(*moved, residual), TILE / NUM_THREADS))
    num_vectors = TILE // (NUM_THREADS * numel)
    for verb, nbytes in zip(("ld", "st"), moved, strict=True):
        assert num_accesses(ptx, verb, nbytes * numel) >= num_vectors, (verb, nbytes * numel)
        if residual:
            assert num_accesses(ptx, verb, residual * numel) >= num_vectors, ("residual", verb)


# ---- what compile needs, and what it refuses

REFUSALS = """
import sys
sys.modules["numpy"] = None  # importing it fails as if it were not installed
import dataclasses, torch, triton
from fusedcomm.kernels import compile as c, variants

def refused(expected, call):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        assert expected in str(error), error
    else:
        raise AssertionError("not refused: " + expected)

variant = variants.Variant("scale", None, 128, torch.float32)
engine = variants.engine_variants([("int8", 128)], (torch.float32, torch.bfloat16))
assert len(engine) == len(set(engine)) == 8, engine  # two for exact sums that are not in place
several = variants.engine_variants([("int4", 32), ("fp32", 128)], (torch.float32,), True)
assert {(v.wire, v.feedback) for v in several if v.kernel in ("pack", "reduce")} == {
    ("int4", True), ("fp32", False)
}, several
hosts = variants.engine_variants([("int4", 32)], (torch.float32,), True, local_wire="bf16")
assert {(v.kernel, v.wire, v.in_wire, v.feedback) for v in hosts if v.wire} == {
    ("pack", "bf16", None, False), ("pack", "int4", None, True), ("reduce", "int4", "bf16", True),
    ("reduce", "int4", None, True), ("unpack", "int4", None, False),
    ("pack", "fp32", None, False), ("unpack", "fp32", None, False),
}, hosts
one_shot = variants.engine_variants([("int4", 32)], (torch.float32,), one_shot=True)
assert {(v.kernel, v.sums) for v in one_shot if v.wire == "int4"} == {
    ("pack", False), ("unpack", True)
}, one_shot
assert {(v.kernel, v.sums) for v in one_shot if v.wire == "fp32"} == {("pack", False), ("unpack", False)}, one_shot
assert c.check_triton() == triton.__version__

c.compile(variant, 90)
c.MAX_SHARED_NBYTES = 8
refused("shared memory = 16; supported: at most 8", lambda: c.compile(variant, 90))
c.MAX_SHARED_NBYTES = 48 * 1024
c._TYPES["numel"], wanted = "i32", c._ptx_type
c._ptx_type = lambda kind: {"i32": "i64"}.get(kind, wanted(kind))
refused("with parameters = ('ptr', 'i32', 'f32'", lambda: c.compile(variant, 90))

for version in ("3.5.1", "3.10.0", "4.0.0", "2.3.0+git"):
    triton.__version__ = version
    refused(f"Triton {version} is not supported: use 3.6 to 3.9", c.check_triton)
"""


def run_python(source, env):
    return subprocess.run([sys.executable, "-c", source], env=env, capture_output=True, text=True)


def test_compiles_without_numpy_and_refuses_what_the_engine_could_not_launch():
    result = run_python(REFUSALS, environment())
    assert result.returncode == 0, result.stderr


def test_refuses_to_compile_under_the_interpreter():
    source = "from fusedcomm.kernels.compile import check_triton; check_triton()"
    result = run_python(source, {**os.environ, "TRITON_INTERPRET": "1"})
    assert "TRITON_INTERPRET is set" in result.stderr


def test_what_is_installed_is_what_is_supported():
    """pyproject.toml allows the versions that kernels/variants.py names. The Makefile reads the oldest from there."""
    (major, first), (_, last) = SUPPORTED_TRITON
    listed = re.findall(r'"triton([^;"]*);', (ROOT / "pyproject.toml").read_text())
    assert listed == [f">={major}.{first},<{major}.{last + 1}"] * 2  # for users, and for the tests
