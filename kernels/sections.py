"""The typed views of a part's sections that the kernels take, cut where the layout says."""

import torch

from fusedcomm.native import _C

from .arguments import Sections
from .constants import CODE_NBYTES, SCALE_NBYTES

# Of a code's width: kernels round by integers.
INTEGERS = {4: torch.int32, 2: torch.int16, 1: torch.int8}
SCALES = {4: torch.float32, 2: torch.int16}


def sections(layout: "_C.BucketLayout", parts: torch.Tensor, nbytes: int) -> Sections:
    """(exact int32, scales, codes) of the layout's piece of the first part in `parts`, uint8 [nbytes], parts of a
    message; each view runs on to the end.

    Scales are fp32, int4's bf16 as int16.
    ValueError if `parts` is anything else, is strided, or does not start at a multiple of 16 bytes.
    """
    if parts.dtype != torch.uint8 or tuple(parts.shape) != (nbytes,) or not parts.is_contiguous():
        raise ValueError(f"parts must be contiguous uint8 [{nbytes}], not {parts.dtype} {list(parts.shape)}")
    if parts.data_ptr() % _C.ALIGN_NBYTES:
        raise ValueError(f"parts must start at a multiple of {_C.ALIGN_NBYTES} bytes")
    piece = parts[layout.part_offset :]
    return Sections(
        piece.view(torch.int32),
        piece[layout.part.scale_offset :].view(SCALES[SCALE_NBYTES[layout.wire]]),
        piece[layout.part.code_offset :].view(INTEGERS[CODE_NBYTES[layout.wire]]),
    )
