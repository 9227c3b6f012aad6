"""Seeded faults in the kernels' sources: the compiled kernels, executed from their PTX, show each of them.

A fault is one edit of a copy of kernels/, which is compiled for the real tile. The check named beside it must then
fail: the bytes differ from the oracle's, or the execution is a fault of memory or a race.
"""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import event_mutations
import ptx
import ptx_kernels
import pytest
import torch
from codec_cases import Case, case_of
from codec_checks import check
from kernel_checks import Kernels, check_scale

from fusedcomm.kernels.variants import TILE

KERNELS = Path(__file__).parents[2] / "kernels"
REAL = Kernels(tile=None)
# Three parts show the order of a sum. A part of FLAT has 66 blocks of 128 elements, so padding follows its fp32 scales.
RAGGED = Case(numels=([TILE + 4, 7, 64, TILE + 1], [TILE + 20]), gaps=[0, 3], block=128, num_parts=3, seed=8)
FLAT = Case(numels=([TILE + 4, 2 * TILE + 480], []), block=128, num_parts=3, seed=8)


def ties(case: Case) -> list[torch.Tensor]:
    """Values halfway between two codes. In fp8 a block's greatest value is 448, so the scale is 1."""
    values = {
        "bf16": 1 + (2 * torch.arange(128) + 1) / 256,
        "fp8": torch.tensor([448.0, 1.0625, 1.1875, -1.0625, -1.1875, 17.0, 19.0, 0.0009765625]),
    }[case.wires[0]]
    return [values.repeat(3 * TILE // len(values)), torch.empty(0)]


def quotients(case: Case) -> list[torch.Tensor]:
    """Blocks whose greatest value, divided by 127, is not its product with the reciprocal."""
    greatest = 1 + torch.arange(4096) / 4096
    greatest = greatest[greatest / torch.tensor(127.0) != greatest * torch.tensor(1 / 127)][: 3 * TILE // 128]
    return [greatest.repeat_interleave(128), torch.empty(0)]


def infinities(case: Case) -> list[torch.Tensor]:
    """Each slice's count is its size."""
    return [torch.full((sum(numels),), torch.inf) for numels in RAGGED.numels]


BUCKETS = {
    "bf16": RAGGED,
    "bf16 flat": FLAT,
    **{wire: replace(FLAT, wires=(wire,)) for wire in ("fp8", "int8", "int4")},
    **{f"{wire} ties": replace(FLAT, numels=(), wires=(wire,), values=ties, scale=1.0) for wire in ("bf16", "fp8")},
    "int8 quotients": replace(FLAT, numels=(), wires=("int8",), values=quotients, scale=1.0),
    "counts": replace(RAGGED, values=infinities),
    "views": replace(RAGGED, shift=1),
    "fp8 specials": case_of("special values", "fp8", torch.float32),
    "int4 steps": replace(FLAT, wires=("int4",), feedback=True),
}
CHECKS = {name: partial(check, REAL, case) for name, case in BUCKETS.items()}
CHECKS["scale"] = partial(check_scale, REAL, 2 * TILE + 3)

FAULTS = event_mutations.read("kernels")
"""Their scenes are the checks that fail."""


def edited(folder: Path, file: str, text: str, replacement: str) -> Path:
    """A copy of kernels/ with one edit."""
    copy = folder / "kernels"
    shutil.copytree(KERNELS, copy, ignore=shutil.ignore_patterns("__pycache__"))
    source = (copy / file).read_text()
    assert source.count(text) >= 1, f"{file} no longer has {text!r}"
    (copy / file).write_text(source.replace(text, replacement, 1))
    return copy


@pytest.fixture
def run_on(monkeypatch):
    """run_on(compiler, scene) makes the rest of the test run what the compiler compiles: for sm_90, which converts fp8,
    or if the scene is about the rounding of fp8 in integers, for sm_80."""
    compilers = []

    def run_on(compiler: ptx_kernels.TritonCompiler, scene: str) -> None:
        compilers.append(compiler)
        ptx_kernels.replace_kernels(monkeypatch, compiler, 80 if scene == "fp8 ties" else 90)

    yield run_on
    for compiler in compilers:
        compiler.close()


@pytest.mark.check
@pytest.mark.sampled(by=lambda fault: {})
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.where)
def test_a_fault_is_found(tmp_path, run_on, fault):
    run_on(ptx_kernels.TritonCompiler(kernels=edited(tmp_path, fault.file, fault.text, fault.replacement)), fault.scene)
    with pytest.raises((AssertionError, ptx.Fault)) as found:  # not an edit that does not compile: RuntimeError
        CHECKS[fault.scene]()
    print(f"{type(found.value).__name__}: {str(found.value).splitlines()[0][:160]}")


@pytest.mark.full
@pytest.mark.parametrize("check", CHECKS)
def test_without_a_fault_the_check_passes(run_on, check):
    run_on(ptx_kernels.TritonCompiler(), check)
    CHECKS[check]()


def test_every_fault_has_its_check():
    assert {fault.scene for fault in FAULTS} <= set(CHECKS)
