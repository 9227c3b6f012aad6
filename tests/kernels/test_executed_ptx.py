"""The compiled kernels against the oracle, without a GPU: Triton's code, executed from its PTX.

They are compiled for the real tile. tests/kernels/test_kernels.py tests the same sources interpreted, with small tiles.
"""

import dataclasses
import re

import ptx
import ptx_kernels
import pytest
from codec_cases import Case
from codec_checks import check
from kernel_checks import REAL_TILES, Kernels, check_scale

from fusedcomm.kernels.variants import TILE

BACKENDS = ("newest-80", "newest-90", "oldest-80")
REAL = Kernels(tile=None)


@pytest.fixture(params=BACKENDS)
def executed(request, compilers, monkeypatch):
    """Launchers run compiled kernels in this test."""
    name, capability = request.param.split("-")
    ptx_kernels.replace_kernels(monkeypatch, compilers(name), int(capability))


@pytest.mark.sampled
@pytest.mark.parametrize("feedback", [None, "fp32", "bf16"])
@pytest.mark.parametrize("wire_format", ["bf16", "int8", "int4-rotated", "int4"])
def test_compiled_kernels_give_the_bytes_of_the_oracle(executed, wire_format, feedback):
    check(REAL, dataclasses.replace(REAL_TILES, wires=(wire_format,), feedback=feedback))


@pytest.mark.sampled
def test_compiled_scale(executed):
    check_scale(REAL, 2 * TILE + 3)


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
    with pytest.raises((ptx.Fault, ptx.Unsupported), match=f"pack_kernel, line .*({reason})"):
        check(REAL, Case(numels=([2 * TILE], []), num_parts=1), stages=["pack"])
