"""Constants that the kernels and the ahead-of-time compiler share.

The wires' names and numbers come from csrc/wire/wires.h.
"""

import triton
import triton.language as tl

from fusedcomm.native import _C

from .variants import NUM_WARPS, max_registers

WIRE_IDS = {wire: _C.wire_id(wire) for wire in _C.WIRES}

WITH_SCALES = frozenset(WIRE_IDS[wire] for wire in _C.WIRES if _C.has_scales(wire))

PER_BYTE = {WIRE_IDS[wire]: 8 // _C.code_nbits(wire) for wire in _C.WIRES if _C.code_nbits(wire) < 8}
"""The elements whose codes share a byte, of wires in which several do."""

CODE_NBYTES = {wire: max(1, _C.code_nbits(wire) // 8) for wire in _C.WIRES}
"""Bytes of one integer of a codes section, by wire. An integer holds the code of one element; in int4 of two."""

CONVERTS_FP8 = (8, 9)
"""The least compute capability with instructions that convert fp8. There the codes have Triton's type for it."""

SCALE_NBYTES = {wire: _C.scale_nbytes(wire) or 4 for wire in _C.WIRES}
"""Bytes of one scale, by wire: 4 for fp32, 2 for bf16. 4 if there are none: the kernels take a pointer all the same."""

BF16_SCALES = frozenset(WIRE_IDS[wire] for wire, nbytes in SCALE_NBYTES.items() if nbytes == 2)


def options(
    tile: int,
    plain_registers: int = 64,
    feedback: bool = False,
    sums: bool = False,
) -> dict[str, object]:
    """How Triton compiles a kernel with this tile. The other parameters are those of max_registers()."""
    return {
        "num_warps": NUM_WARPS,
        "num_stages": 1,  # no loop is pipelined through shared memory
        "enable_fp_fusion": False,  # a fused multiply-add rounds once where the reference rounds twice
        "maxnreg": max_registers(tile, plain_registers, feedback, sums),
    }


# The same values for device functions, which can read only globals that are constexpr.
NUM_THREADS = tl.constexpr(32 * NUM_WARPS)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
