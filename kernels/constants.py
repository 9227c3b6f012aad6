"""What the kernels, their launchers and the ahead-of-time compiler have to agree on, written once.

The wires are those of csrc/wire/names.h.
"""

import triton.language as tl

from fusedcomm.native import _C

from .variants import NUM_WARPS

WIRE_IDS = {wire: _C.wire_id(wire) for wire in _C.WIRES}

WITH_SCALES = frozenset(WIRE_IDS[wire] for wire in _C.WIRES if _C.has_scales(wire))

CODE_NBYTES = {wire: max(1, _C.code_nbits(wire) // 8) for wire in _C.WIRES}
"""Of the integers that a codes section is made of: one for each element, int4 one for two elements."""

SCALE_NBYTES = {wire: _C.scale_nbytes(wire) for wire in _C.WIRES}
"""4: fp32, also where there are none; 2: bf16."""

FEEDBACK_IDS = {format: index for index, format in enumerate((None, *_C.RESIDUAL_FORMATS))}
"""Formats of residuals; None: nothing is kept."""

OPTIONS = {
    "num_warps": NUM_WARPS,
    "num_stages": 1,  # nothing is staged in shared memory
    "enable_fp_fusion": False,  # a fused multiply-add rounds once where the reference rounds twice
    "maxnreg": 65536 // (32 * NUM_WARPS),  # all that one program per SM can have; not told, ptxas spills to fit more
}

# The same for device functions, which can read globals only if they are constexpr.
NUM_THREADS = tl.constexpr(32 * NUM_WARPS)
FP32 = tl.constexpr(WIRE_IDS["fp32"])
BF16 = tl.constexpr(WIRE_IDS["bf16"])
FP16 = tl.constexpr(WIRE_IDS["fp16"])
INT8 = tl.constexpr(WIRE_IDS["int8"])
FP8 = tl.constexpr(WIRE_IDS["fp8"])
INT4 = tl.constexpr(WIRE_IDS["int4"])
FEEDBACK_FP32 = tl.constexpr(FEEDBACK_IDS["fp32"])
FEEDBACK_BF16 = tl.constexpr(FEEDBACK_IDS["bf16"])
