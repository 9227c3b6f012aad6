"""No kernel, compiled by the oldest or the newest Triton, holds a constant that was extended wrongly to a register.

Triton 3.6 to 3.8 sign-extend the `other` of a load, also where a register holds two or four of it: 0xffffffffffff8000
for two halves 0x8000, so that every second one is a NaN. Compiled in child processes: this file, run as a program.

`make test` compiles pack, unpack and reduce once for each wire and compute capability by the oldest; what the newest
makes is looked at where it is compiled anyway (tests/kernels/test_kernel_code.py). All variants by both, in a
quarter of an hour of a core for each Triton: pytest tests/kernels/test_kernel_constants.py --every-kernel
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CAPABILITIES = (80, 90)
WIRES = ("fp32", "bf16", "fp16", "int8", "fp8", "int4")
WITH_SCALES = WIRES[3:]
ENCODERS = ({"feedback": "fp32"}, {"stochastic": True, "feedback": "bf16"})


# ---- what is looked for

LITERAL = r"-?(?:0[xX][0-9a-fA-F]+|\d+)"
ASSIGNMENT = re.compile(r"\b(mov|selp)\.[a-z]*(16|32|64)\s+(%\w+),\s*([^;]+);")
PREDICATED_LOAD = re.compile(r"@!?%\w+\s+ld\.global[.\w]*\s+(?:\{([^}]*)\}|(%\w+))\s*,")


def is_extended(value: int, nbits: int) -> bool:
    """Whether the register's upper half only repeats the sign of a narrower constant, where all halves should be one.

    Zero and all ones are both.
    """
    signed = (value + (1 << (nbits - 1))) % (1 << nbits) - (1 << (nbits - 1))
    return -(2**15) <= signed < -1


def wrong_constants(ptx: str) -> list[str]:
    """The instructions that assign a constant that does not fit its register or was sign-extended to fill it; and
    loads that leave another constant than zeros of either sign where their predicate is false."""
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


# Of 16 and 32 bits, as often as a register holds them.
ZEROS = {16: {0, 0x8000}, 32: {0, 0x80008000, 0x80000000}, 64: {0, 0x8000800080008000, 0x8000000080000000}}


def assigned(register: str, constants: dict, copies: dict) -> dict:
    """The constants that a register is given, also by way of other registers."""
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
        "mov.u32 %r1, 0xffffffffffff8000;",  # what Triton 3.6 makes of two halves 0x8000
        "mov.u64 %r1, 0xffffffffffff8000;",  # of four
        "mov.b32 %r1, -32768;",
        "mov.b64 %r1, -32768;",
        "mov.b32 %r1, 0xffffff80;",  # of bytes
        "mov.u16 %r1, 0xffffffffffff8000;",  # right by luck
        "selp.b32 %r1, 0, -32768, %p1;",
        "mov.b32 %r1, 0x7e00;",  # a half whose sign is 0: only as what a load leaves
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


# ---- what is compiled


def every_variant():
    """All that an engine may launch: each wire with each gradient dtype, flat and not, two-shot and one-shot; encoders
    with noise and residuals; sums within hosts in another wire."""
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
    """One variant of each kernel and wire, another for each number < num_samples."""
    groups = {}
    for variant in variants:
        groups.setdefault((variant.kernel, variant.wire), []).append(variant)
    return [group[number * len(group) // num_samples] for group in groups.values()]


def compile_and_check(capability, number, num_samples):
    """The child: the Triton seen, how many kernels were compiled, and the wrong constants of each kernel that has any.

    number: which sample; -1: all.
    """
    from fusedcomm.kernels.compile import SUPPORTED_TRITON, check_triton, compile

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


def child_environment(folder):
    """With the Triton in `folder` before any other; None: the one installed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if folder is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), environment.get("PYTHONPATH"))))
    return environment


def oldest_triton(config):
    """The folder that has the oldest supported Triton; skips the test if there is none."""
    folder = Path(config.getoption("--oldest-triton") or Path(sys.prefix) / "triton-oldest")
    if not (folder / "triton").is_dir():
        pytest.skip(f"no Triton in {folder}: `make test` installs the oldest there, or name one with --oldest-triton")
    return folder


CASES = [(which, capability) for which in ("oldest", "newest") for capability in CAPABILITIES]


def pytest_generate_tests(metafunc):
    if "which" in metafunc.fixturenames:
        cases = CASES if metafunc.config.getoption("--every-kernel") else [case for case in CASES if "oldest" in case]
        metafunc.parametrize(("which", "capability"), cases)


@pytest.mark.timeout(3600)  # half a minute of a core for one, where nobody else needs it; of all variants, minutes
def test_no_constant_is_extended(request, which, capability):
    pytest.importorskip("triton")
    folder = oldest_triton(request.config) if which == "oldest" else None
    number = -1 if request.config.getoption("--every-kernel") else CASES.index((which, capability))
    child = subprocess.run(
        [sys.executable, __file__, str(capability), str(number), str(len(CASES))],
        env=child_environment(folder),
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
    """pyproject.toml allows the versions that kernels/compile.py accepts; the Makefile takes the oldest from there."""
    pytest.importorskip("triton")
    from fusedcomm.kernels.compile import SUPPORTED_TRITON

    (major, first), (_, last) = SUPPORTED_TRITON
    assert f'"triton>={major}.{first},<{major}.{last + 1}; ' in (ROOT / "pyproject.toml").read_text()


if __name__ == "__main__":
    print(json.dumps(compile_and_check(*map(int, sys.argv[1:]))))
