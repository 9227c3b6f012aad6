"""The residual that an encoder keeps, and the kernel parameter that passes it."""

from dataclasses import dataclass

import torch

# The dtype as which kernels read and write a residual, by its format. bf16 is int16, because kernels round in integers.
VALUES = {"fp32": torch.float32, "bf16": torch.int16}


@dataclass(frozen=True)
class Feedback:
    """Whether an encoder keeps a residual."""

    format: str | None = None
    """The residual's format, "fp32" or "bf16". None: no residual is kept."""

    residual: torch.Tensor | None = None
    """uint8 [_C.residual_nbytes(format, numel)], read and overwritten. None if `format` is None."""


NONE = Feedback()


def residual_arg(feedback: Feedback, first: int, numel: int, unused: torch.Tensor) -> torch.Tensor:
    """The kernel parameter `residual`, which has `numel` elements and is passed from element `first` on.

    `unused`: any uint8 tensor; it is passed if there is no residual. Raises ValueError if the residual has another
    shape or dtype, or is not contiguous.
    """
    format, residual = feedback.format, feedback.residual
    if format is None:
        return unused.view(torch.int8)
    from fusedcomm.native import _C

    nbytes = _C.residual_nbytes(format, numel)
    if residual.dtype != torch.uint8 or tuple(residual.shape) != (nbytes,) or not residual.is_contiguous():
        raise ValueError(
            f"the residual must be contiguous uint8 [{nbytes}], not {residual.dtype} {list(residual.shape)}"
        )
    return residual[_C.residual_nbytes(format, first) :].view(VALUES[format])
