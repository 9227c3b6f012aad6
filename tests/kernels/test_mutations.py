"""Seeded faults in the kernels' sources: the compiled kernels, executed from their PTX, show each of them.

A fault is one edit of a copy of kernels/, which is compiled for the real tile. The check named beside it must then
fail: the bytes differ from the oracle's, or the execution is a fault of memory or a race.
tests/kernels/test_executed_ptx.py removes barriers.
"""

import shutil
from pathlib import Path

import compiling
import event_mutations
import ptx
import ptx_kernels
import pytest
import test_kernels
import torch
from test_kernels import bucket_layout, check_bucket, check_steps, count, signed, with_holes

from fusedcomm.kernels.variants import TILE

KERNELS = Path(__file__).parents[2] / "kernels"
RAGGED = [TILE + 4, 7, 64, TILE + 1], [TILE + 20]
FLAT = [TILE + 4, 2 * TILE + 480], []  # a part has 66 blocks of 128 elements: padding follows its fp32 scales


def bucket(wire_format: str, numels: tuple[list[int], list[int]]) -> None:
    """A bucket of three parts, so that the order of a sum shows."""
    numels = with_holes(numels, [0, 3])
    layout = bucket_layout(wire_format, 128, 3, count(numels[1]), count(numels[0]))
    flats = signed(count(numels[0]), seed=8, specials=True), signed(count(numels[1]), seed=9, specials=True)
    check_bucket(layout, flats, numels, [0, 3], "cpu", tile=TILE)


def views() -> None:
    """No run is aligned."""
    numels = with_holes(RAGGED, [0, 3])
    layout = bucket_layout("bf16", 128, 3, count(numels[1]), count(numels[0]))
    flats = [signed(count(of_list), seed=8) for of_list in numels]
    check_bucket(layout, flats, numels, [0, 3], "cpu", tile=TILE, begin=1)


def ties() -> None:
    """Values halfway between two codes of fp8: the block's greatest value is 448, so the scale is 1."""
    numel = 3 * TILE
    flat = torch.tensor([448.0, 1.0625, 1.1875, -1.0625, -1.1875, 17.0, 19.0, 0.0009765625] * (numel // 8))
    layout = bucket_layout("fp8", 128, 3, 0, numel)
    check_bucket(layout, (flat, flat[:0]), ([numel], []), [0], "cpu", tile=TILE, scale=1.0)


def counts() -> None:
    """Every element is infinite, so that each slice's count is its size."""
    numels = with_holes(RAGGED, [0, 3])
    layout = bucket_layout("bf16", 128, 3, count(numels[1]), count(numels[0]))
    check_bucket(
        layout, [torch.full((count(of_list),), torch.inf) for of_list in numels], numels, [0, 3], "cpu", tile=TILE
    )


def steps(wire_format: str) -> None:
    layout = bucket_layout(wire_format, 128, 2, 0, 2 * TILE + 300)
    check_steps([layout], [[TILE + 300, TILE]], [], "cpu", "bf16", torch.float32, tile=TILE)


CHECKS = {
    "bf16": lambda: bucket("bf16", RAGGED),
    "bf16 flat": lambda: bucket("bf16", FLAT),
    "fp8": lambda: bucket("fp8", FLAT),
    "int8": lambda: bucket("int8", FLAT),
    "int4": lambda: bucket("int4", FLAT),
    "int8 rotated": lambda: bucket("int8-rotated", FLAT),
    "fp8 ties": ties,
    "counts": counts,
    "views": views,
    "int4 steps": lambda: steps("int4-rotated"),
    "scale": lambda: test_kernels.test_scales_in_place("cpu", 2 * TILE + 3, TILE),
}

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
    """run_on(compiler) makes the rest of the test run what the compiler compiles for sm_90."""
    compilers = []

    def run_on(compiler: ptx_kernels.TritonCompiler) -> None:
        compilers.append(compiler)
        ptx_kernels.replace_kernels(monkeypatch, compiler, 90)

    yield run_on
    for compiler in compilers:
        compiler.close()


@pytest.mark.sampled(by=lambda fault: {})
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.where)
def test_a_fault_is_found(tmp_path, run_on, fault):
    run_on(ptx_kernels.TritonCompiler(kernels=edited(tmp_path, fault.file, fault.text, fault.replacement)))
    with pytest.raises((AssertionError, ptx.Fault)) as found:  # not an edit that does not compile: RuntimeError
        CHECKS[fault.scene]()
    print(f"{type(found.value).__name__}: {str(found.value).splitlines()[0][:160]}")


@pytest.mark.full
@pytest.mark.parametrize("check", CHECKS)
def test_without_a_fault_the_check_passes(run_on, check):
    run_on(ptx_kernels.TritonCompiler())
    CHECKS[check]()


CONSTANT = (
    "none = minus_zero_unless(present, codes_in.dtype.element_ty)",
    "none = -(2 ** (codes_in.dtype.element_ty.primitive_bitwidth - 1))",
)


@pytest.mark.full
def test_a_constant_that_the_oldest_triton_loads_wrongly_is_found(request, tmp_path, run_on):
    """Triton 3.6 sign-extends a 16-bit constant where a register should hold it twice: absent ranks change the sum."""
    oldest = compiling.oldest_triton(request.config)
    run_on(ptx_kernels.TritonCompiler(oldest, kernels=edited(tmp_path, "reduce.py", *CONSTANT)))
    with pytest.raises(AssertionError) as found:
        CHECKS["bf16 flat"]()
    print(f"{type(found.value).__name__}: {str(found.value).splitlines()[0][:160]}")


def test_every_fault_has_its_check():
    assert {fault.scene for fault in FAULTS} <= set(CHECKS)
