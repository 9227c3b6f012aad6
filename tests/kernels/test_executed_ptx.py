"""The compiled kernels against the oracle, without a GPU: Triton's code, executed from its PTX.

They are compiled for the real tile. tests/kernels/test_kernels.py tests the same sources interpreted, with small tiles.
"""

import dataclasses
import re

import ptx
import ptx_kernels
import pytest
import test_kernels
import torch
from test_kernels import bucket_layout, check_bucket, check_steps, count, make_bucket, pack, signed, with_holes

from fusedcomm.kernels.variants import TILE

BACKENDS = ("newest-80", "newest-90", "oldest-80")


@pytest.fixture(params=BACKENDS)
def executed(request, compilers, monkeypatch):
    """Launchers run compiled kernels in this test."""
    name, capability = request.param.split("-")
    ptx_kernels.replace_kernels(monkeypatch, compilers(name), int(capability))


@pytest.mark.sampled
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "ragged"])
@pytest.mark.parametrize("wire_format", ["bf16", "int8", "int4-rotated", "int4"])
def test_compiled_kernels_give_the_bytes_of_the_oracle(executed, wire_format, flat):
    numels = ([TILE + 4, 2 * TILE - 100], []) if flat else ([TILE + 4, 7, 64, TILE + 1], [TILE + 20])
    numels = with_holes(numels, [0, 3])
    lossy_numel, exact_numel = map(count, numels)
    layout = bucket_layout(wire_format, 128, 2, exact_numel, lossy_numel)
    flats = signed(lossy_numel, seed=8, specials=True), signed(exact_numel, seed=9, specials=True)
    check_bucket(layout, flats, numels, [0, 3], "cpu", tile=TILE)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("wire_format", "feedback", "dtype"),
    [("int4-rotated", "bf16", torch.float32), ("int8", "fp32", torch.bfloat16), ("int4", "bf16", torch.float16)],
    ids=str,
)
def test_compiled_encoders_round_and_keep_residuals_as_the_oracle(executed, wire_format, feedback, dtype):
    numels = [TILE + 300, TILE]
    layout = bucket_layout(wire_format, 128, 2, 0, sum(numels))
    check_steps([layout], [numels], [], "cpu", feedback, dtype, tile=TILE)


@pytest.mark.sampled
def test_compiled_scale(executed):
    test_kernels.test_scales_in_place("cpu", 2 * TILE + 3, TILE)


# ---- faults of compiled kernels are found


@dataclasses.dataclass
class Edited:
    """A compiler whose PTX is edited: every match of `pattern` becomes `replacement`."""

    compiler: object
    pattern: str
    replacement: str

    def __call__(self, variant, tile, capability):
        code = self.compiler(variant, tile, capability)
        edited, num_edits = re.subn(self.pattern, self.replacement, code["ptx"])
        assert num_edits
        return {**code, "ptx": edited}


@pytest.mark.parametrize(
    ("pattern", "replacement", "reason"),
    [
        (r"bar\.sync\s+0;", "", r"ld\.shared.* shared memory: reads what thread .* wrote, without a barrier"),
        (r"(st\.global\.v2\.b32 \[ %\w+ \+ )0", r"\g<1>8", "outside of what was given|without a barrier"),
        (r"(ld\.global\.v4\.b32 [^\[]*\[ %\w+ \+ )0", r"\g<1>8", "misaligned access of 16 bytes"),
        (r"redux\.sync\.max\.s32", "redux.sync.most.s32", "needs one of"),
    ],
)
def test_faults_in_a_compiled_kernel_are_found(compilers, monkeypatch, pattern, replacement, reason):
    ptx_kernels.replace_kernels(monkeypatch, Edited(compilers("newest"), pattern, replacement), 90)
    layout = bucket_layout("bf16", 128, 1, 0, 2 * TILE)
    bucket = make_bucket(layout, signed(2 * TILE), [(0, 2 * TILE)], [], TILE)
    with pytest.raises((ptx.Fault, ptx.Unsupported), match=f"pack_kernel, line .*({reason})"):
        pack(bucket, 0, 1.0, torch.empty(layout.chunk_nbytes, dtype=torch.uint8), 2)
