"""Every kernel variant that an engine may launch, compiled for the real tile and executed from its PTX, gives the bytes
of the oracle: from the oldest and the newest supported Triton, for sm_80 and sm_90.

`make check` runs a sample, in which every stage, compiler and capability appears, and every stage of the oldest Triton
with narrow codes, whose constants it sometimes extends wrongly. `make test-all` runs all of them. What has passed is
noted in build/executed/, by the hash of the PTX, the executor and the checks: a run that was interrupted goes on where
it was, and the same PTX is executed once.
"""

import functools
import hashlib
import random
import re
from pathlib import Path

import ptx_kernels
import pytest
from codec_cases import case_of
from codec_checks import check, check_every_code
from kernel_checks import Kernels, check_variant
from values import DTYPES, WIRES

from fusedcomm.kernels.variants import TILE, engine_variants
from fusedcomm.native import _C

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]
PASSED = TESTS.parent / "build" / "executed"
COMPILERS = ("newest", "oldest")
CAPABILITIES = (80, 90)


def every_variant() -> list["_C.KernelKey"]:
    """Every variant that an engine may launch: each wire with each gradient dtype, two-shot and one-shot;
    encoders with residuals; sums within hosts in another wire."""
    variants = []
    for wire in WIRES:
        block = 32 if wire == "int4" else 128
        wires = [(wire, block)]
        variants += engine_variants(wires, DTYPES)
        variants += engine_variants(wires, DTYPES, one_shot=True)
        for local_wire in ("fp32", "bf16", "fp16"):
            variants += engine_variants(wires, DTYPES[:1], local_wire=local_wire)
        variants += engine_variants(wires, DTYPES[:1], local_wire="bf16", feedback=True)
    return list(dict.fromkeys(variants))


VARIANTS = every_variant()
CASES = [(name, capability, variant) for name in COMPILERS for capability in CAPABILITIES for variant in VARIANTS]
# In an order that spreads what does not fit over all kinds. It is the same in every process.
random.Random(0).shuffle(CASES)


def fields(variant: "_C.KernelKey") -> dict:
    named = {name: getattr(variant, name) for name in ptx_kernels.FIELDS}
    return {**named, "stage and wire": (variant.kernel, variant.wire)}


@functools.cache
def checks_hash() -> str:
    """Of everything besides the PTX on which a result depends."""
    reference = TESTS / "helpers" / "reference"
    names = ("codec_cases.py", "codec_checks.py", "kernel_checks.py", "ptx_kernels.py", "values.py")
    files = [*(TESTS / "helpers" / name for name in names), *(TESTS / "ptx").glob("*.py"), *reference.glob("*.py")]
    files += [*(TESTS.parent / "kernels").glob("*.py"), Path(_C.__file__)]
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in sorted(files))).hexdigest()


def result_of(ptx: str) -> Path:
    """The file that exists if this PTX has passed. Comments, line numbers and the target do not count."""
    lines = (re.sub(r"//.*", "", line).strip() for line in ptx.splitlines())
    body = "\n".join(line for line in lines if not re.match(r"\.(loc|file|target|version)\b", line))
    return PASSED / hashlib.sha256(f"{checks_hash()}\n{body}".encode()).hexdigest()


def fixed(variant: "_C.KernelKey", code: dict):
    """A compiler that has compiled only this variant."""

    def compiled(asked: "_C.KernelKey", tile: int, capability: int) -> dict:
        # A launcher names the input wire even if it is the wire.
        in_wires = [{"in_wire": key.in_wire or key.wire} for key in (asked, variant)]
        assert fields(asked) | in_wires[0] == fields(variant) | in_wires[1], (
            f"{asked} is launched in place of {variant}"
        )
        return code

    return compiled


def sample(compiler: str, capability: int, variant: "_C.KernelKey") -> dict:
    nbits = min(_C.code_nbits(variant.wire or "fp32"), 32)
    oldest = {"narrow": (variant.kernel, nbits)} if compiler == "oldest" and nbits < 32 else {}
    return {"by": (compiler, capability), "stage": variant.kernel, **oldest}


@pytest.mark.sampled(by=sample)
@pytest.mark.parametrize(("compiler", "capability", "variant"), CASES, ids=str)
def test_variant(compilers, monkeypatch, compiler, capability, variant):
    code = compilers(compiler)(variant, TILE, capability)
    result = result_of(code["ptx"])
    if not result.exists():
        ptx_kernels.replace_kernels(monkeypatch, fixed(variant, code), capability)
        check_variant(variant)
        PASSED.mkdir(parents=True, exist_ok=True)
        result.touch()


@pytest.mark.check
@pytest.mark.parametrize("wire", ["int8", "fp8"])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_every_code_and_the_values_around_it(compilers, monkeypatch, compiler, wire):
    """By the GPU's own instructions, which other tests of codes do not execute: the interpreter has none."""
    ptx_kernels.replace_kernels(monkeypatch, compilers(compiler), 90)
    run = Kernels(tile=None)
    check_every_code(run, wire)
    for name in ("values around codes", "special values", "special values with residuals"):
        check(run, case_of(name, wire, DTYPES[0]))
