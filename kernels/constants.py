"""What the kernels, their launchers and the ahead-of-time compiler have to agree on, written once.

The wires are the enum of csrc/wire/layout.h.
"""

import triton.language as tl

from .variants import NUM_WARPS

WIRE_IDS = {"fp32": 0, "bf16": 1, "fp16": 2, "int8": 3, "fp8": 4, "fp8_e5m2": 5, "int4": 6}
BLOCK_WIRES = ("int8", "fp8", "fp8_e5m2", "int4")
"""Those whose blocks have a scale."""

CODE_NBYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1, "fp8_e5m2": 1, "int4": 1}
"""Of the integers that a codes section is made of: one for each element, int4 one for two elements."""

SCALE_NBYTES = {"int4": 2}
"""Where scales are not fp32: int4's are bf16."""

FEEDBACK_IDS = {None: 0, "fp32": 1, "bf16": 2, "int8": 3}
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
FP8_E5M2 = tl.constexpr(WIRE_IDS["fp8_e5m2"])
INT4 = tl.constexpr(WIRE_IDS["int4"])
FEEDBACK_FP32 = tl.constexpr(FEEDBACK_IDS["fp32"])
FEEDBACK_BF16 = tl.constexpr(FEEDBACK_IDS["bf16"])
FEEDBACK_INT8 = tl.constexpr(FEEDBACK_IDS["int8"])
