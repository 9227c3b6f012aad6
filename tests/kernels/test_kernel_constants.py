"""No kernel compiled by the oldest or the newest Triton has a constant that was extended wrongly to fill its register.

Triton 3.6 to 3.8 sign-extend the `other` of a load even if a register holds two or four of it. Two halves 0x8000 then
become 0xffffffffffff8000, and every second half is a NaN. Child processes compile: this file, run as a program.

`make check` compiles pack, unpack and reduce with the oldest Triton, once for each wire. `make test-all` does so for
each compute capability. The newest Triton's code is checked where it is compiled anyway, in
tests/kernels/test_kernel_code.py. This compiles all variants with both, in a quarter of an hour of a core for each:
pytest tests/kernels/test_kernel_constants.py --every-kernel
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.check

ROOT = Path(__file__).parents[2]
CAPABILITIES = (80, 90)
WIRES = ("fp32", "bf16", "fp16", "int8", "fp8", "int4")
WITH_SCALES = WIRES[3:]
ENCODERS = ({"feedback": "fp32"}, {"feedback": "bf16"})


# ---- wrong constants

LITERAL = r"-?(?:0[xX][0-9a-fA-F]+|\d+)"
ASSIGNMENT = re.compile(r"\b(mov|selp)\.[a-z]*(16|32|64)\s+(%\w+),\s*([^;]+);")
PREDICATED_LOAD = re.compile(r"@!?%\w+\s+ld\.global[.\w]*\s+(?:\{([^}]*)\}|(%\w+))\s*,")


def is_extended(value: int, nbits: int) -> bool:
    """Whether `value` is a constant of at most 16 bits whose sign alone fills the rest of a register of `nbits` bits.

    The rest should repeat the constant. For zero and all ones that is the same, so they do not count.
    """
    signed = (value + (1 << (nbits - 1))) % (1 << nbits) - (1 << (nbits - 1))
    return -(2**15) <= signed < -1


def wrong_constants(ptx: str) -> list[str]:
    """The instructions that assign a constant which does not fit its register, or was sign-extended to fill it. Also
    loads that leave a constant other than zeros of either sign where their predicate is false. May be empty."""
    found, constants, copies = [], {}, {}
    for match in ASSIGNMENT.finditer(ptx):
        nbits, register, operands = int(match[2]), match[3], match[4].split(",")
        for operand in (operand.strip("{} ") for operand in operands):
            if re.fullmatch(LITERAL, operand):
                value = int(operand, 0)
                if not -(1 << (nbits - 1)) <= value < 1 << nbits or (nbits > 16 and is_extended(value, nbits)):
                    found.append(match[0])
                constants.setdefault(register, {})[value % (1 << nbits), nbits] = match[0]
            elif operand.startswith("%"):
                copies.setdefault(register, set()).add(operand)
    for match in PREDICATED_LOAD.finditer(ptx):
        for register in re.findall(r"%\w+", match[1] or match[2]):
            for (value, nbits), text in assigned(register, constants, copies).items():
                if value not in ZEROS[nbits]:
                    found.append(f"{text} … {match[0]}")
    return sorted(set(found))


# By the bits of a register: zeros of 16 and 32 bits and either sign, as many as the register holds.
ZEROS = {16: {0, 0x8000}, 32: {0, 0x80008000, 0x80000000}, 64: {0, 0x8000800080008000, 0x8000000080000000}}


def assigned(register: str, constants: dict, copies: dict) -> dict:
    """{(constant, bits): instruction} of the constants that a register is assigned, also through other registers."""
    seen, waiting, result = set(), [register], {}
    while waiting:
        register = waiting.pop()
        if register not in seen:
            seen.add(register)
            waiting += copies.get(register, ())
            result.update(constants.get(register, {}))
    return result


LOAD = "@%p1 ld.global.v2.b{0} {{ %r1, %r2 }}, [ %rd1 + 0 ];"


@pytest.mark.parametrize(
    "line",
    [
        "mov.u32 %r1, 0xffffffffffff8000;",  # two halves 0x8000, as Triton 3.6 extends them
        "mov.u64 %r1, 0xffffffffffff8000;",  # four halves
        "mov.b32 %r1, -32768;",
        "mov.b64 %r1, -32768;",
        "mov.b32 %r1, 0xffffff80;",  # bytes
        "mov.u16 %r1, 0xffffffffffff8000;",  # does not fit, although its low bits are right
        "selp.b32 %r1, 0, -32768, %p1;",
        "mov.b32 %r1, 0x7e00;",  # a half with sign 0: wrong only as the other of a load
        "mov.b32 %r5, 32256; mov.b32 %r1, %r5;",
        "mov.b16 %rs1, 32256; mov.b32 %r1, {%rs1, %rs1};",
    ],
)
def test_finds_extended_constants(line):
    assert wrong_constants(f"{line}\n{LOAD.format(64 if '64' in line else 32)}")


@pytest.mark.parametrize(
    "line",
    [
        "mov.u32 %r1, 0x80008000;",
        "mov.b32 %r1, -2147450880;",
        "mov.b32 %r1, -2147483648;",
        "mov.b64 %r1, -9223231297218904064;",
        "mov.b32 %r1, 0; mov.b32 %r1, %r2;",
        "selp.b16 %r1, 0, -32768, %p1;",
        "mov.b32 %r3, -1; mov.b32 %r4, 31; mov.b32 %r5, 32256;",
    ],
)
def test_leaves_other_constants_alone(line):
    assert not wrong_constants(f"{line}\n{LOAD.format(64 if '64' in line else 32)}")


# ---- compiled kernels


def every_variant():
    """Every variant that an engine may launch: each wire with each gradient dtype, two-shot and one-shot;
    encoders with residuals; sums within hosts in another wire."""
    import torch

    from fusedcomm.kernels.variants import engine_variants

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    variants = []
    for wire in WIRES:
        block = 32 if wire == "int4" else 128
        scaled = wire in WITH_SCALES
        plain, rotated = [(wire, block, False)], [(wire, block, scaled)]
        variants += engine_variants(plain, dtypes)
        variants += engine_variants(rotated, dtypes, one_shot=True)
        for local_wire in ("fp32", "bf16", "fp16"):
            variants += engine_variants(rotated, dtypes[:1], local_wire=local_wire)
        for encoder in ENCODERS:
            variants += engine_variants(rotated, dtypes[:1], local_wire="bf16", **encoder)
    return list(dict.fromkeys(variants))


def sample(variants, number, num_samples):
    """One variant of each kernel and wire. Each `number` from 0 to num_samples - 1 gives another one, if there are so
    many."""
    groups = {}
    for variant in variants:
        groups.setdefault((variant.kernel, variant.wire), []).append(variant)
    return [group[number * len(group) // num_samples] for group in groups.values()]


def compile_and_check(capability, number, num_samples):
    """Compiles in the child. Returns Triton's version, the oldest supported one, the number of kernels, their kernels
    and wires, and the wrong constants of each kernel that has any.

    number: the sample to compile; -1: every variant.
    """
    from fusedcomm.kernels.compile import check_triton, compile
    from fusedcomm.kernels.variants import SUPPORTED_TRITON

    variants = every_variant()
    if number >= 0:
        variants = sample(variants, number, num_samples)
    wrong = {}
    for variant in variants:
        if lines := wrong_constants(compile(variant, capability).ptx):
            wrong[str(variant)] = lines[:3]
    pairs = sorted({(variant.kernel, str(variant.wire)) for variant in variants})
    return {
        "triton": check_triton(),
        "oldest": SUPPORTED_TRITON[0],
        "num_kernels": len(variants),
        "pairs": pairs,
        "wrong": wrong,
    }


CASES = [(which, capability) for which in ("oldest", "newest") for capability in CAPABILITIES]


def pytest_generate_tests(metafunc):
    if "which" in metafunc.fixturenames:
        cases = CASES if metafunc.config.getoption("--every-kernel") else [case for case in CASES if "oldest" in case]
        metafunc.parametrize(("which", "capability"), cases)


@pytest.mark.sampled(by=lambda which, capability: {"which": which})
@pytest.mark.timeout(3600)  # a sample takes half a minute of an idle core, all variants take minutes
def test_no_constant_is_extended(request, which, capability):
    pytest.importorskip("triton")
    from compiling import environment, oldest_triton  # not at the top: this file is also run as a program

    folder = oldest_triton(request.config) if which == "oldest" else None
    number = -1 if request.config.getoption("--every-kernel") else CASES.index((which, capability))
    child = subprocess.run(
        [sys.executable, __file__, str(capability), str(number), str(len(CASES))],
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    result = json.loads(child.stdout)
    version = result["triton"]
    print(f"{result['num_kernels']} kernels compiled for sm_{capability} with Triton {version}")
    if which == "oldest":
        assert version.split(".")[:2] == list(map(str, result["oldest"]))
    # pack, unpack and reduce of every wire, and scale.
    assert len(result["pairs"]) == 3 * len(WIRES) + 1 <= result["num_kernels"]
    wrong = "\n".join(f"{variant}: {lines}" for variant, lines in result["wrong"].items())
    assert not wrong, f"{len(result['wrong'])} of {result['num_kernels']} kernels, Triton {version}:\n{wrong}"


def test_what_is_installed_is_what_is_supported():
    """pyproject.toml allows the versions that kernels/variants.py names. The Makefile reads the oldest from there."""
    pytest.importorskip("triton")
    from fusedcomm.kernels.variants import SUPPORTED_TRITON

    (major, first), (_, last) = SUPPORTED_TRITON
    listed = re.findall(r'"triton([^;"]*);', (ROOT / "pyproject.toml").read_text())
    assert listed == [f">={major}.{first},<{major}.{last + 1}"] * 2  # for users, and for the tests


if __name__ == "__main__":
    print(json.dumps(compile_and_check(*map(int, sys.argv[1:]))))
