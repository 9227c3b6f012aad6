"""The typed views of a part's sections that the kernels take, at the layout's offsets."""

import torch

from fusedcomm.native import _C

from .arguments import Sections
from .constants import CODE_NBYTES, SCALE_NBYTES

# The dtype of codes by their width in bytes. Kernels round in integers.
INTEGERS = {4: torch.int32, 2: torch.int16, 1: torch.int8}
# The dtype of scales by their width in bytes. bf16 is int16.
SCALES = {4: torch.float32, 2: torch.int16}


def sections(layout: "_C.BucketLayout", parts: torch.Tensor, nbytes: int) -> Sections:
    """The sections of the layout's piece of the first part in `parts`. Each view reaches to the end of `parts`.

    parts: uint8 [nbytes], contiguous, 16-byte aligned: one or more parts of a message. The exact section is int32.
    Scales are fp32; those of int4 are bf16 as int16. Codes are integers of their width. Raises ValueError if
    `parts` is not as described.
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
