"""How an encoder rounds, and the kernels' parameters for it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .constants import BLOCK_WIRES

if TYPE_CHECKING:
    from fusedcomm.native import _C

# Of a residual's values in memory; kernels round by integers.
VALUES = {"fp32": torch.float32, "bf16": torch.int16, "int8": torch.int8}


@dataclass(frozen=True)
class Encoding:
    key: tuple[int, int, int, int] | None = None
    """(seed, parameter, step, source) of the noise, fields of reference.NoiseKey; None: to nearest even."""

    feedback: str | None = None
    """The residual's format, "fp32", "bf16" or, for wires with scales, "int8"; None: nothing is kept."""

    residual: torch.Tensor | None = None
    """uint8 [_C.residual_nbytes(feedback, block, numel)], read and written."""

    def is_stochastic(self, wire: str) -> bool:
        return self.key is not None and wire != "fp32"  # which loses nothing


NEAREST = Encoding()


def encoding_args(
    encoding: Encoding, layout: "_C.BucketLayout", first: int, numel: int, unused: torch.Tensor
) -> tuple[torch.Tensor | int, ...]:
    """(residual, its scales, seed, parameter, step, source), the residual's from its element `first` of `numel` on.

    `unused`: any tensor, uint8, for the pointers of what there is not. ValueError if the residual has another shape or
    dtype, or is int8 where the wire has no blocks.
    """
    values = scales = unused.view(torch.int8)
    format, residual = encoding.feedback, encoding.residual
    if format is not None:
        from fusedcomm.native import _C

        nbytes = _C.residual_nbytes(format, layout.block_numel, numel)
        if residual.dtype != torch.uint8 or tuple(residual.shape) != (nbytes,) or not residual.is_contiguous():
            raise ValueError(
                f"the residual must be contiguous uint8 [{nbytes}], not {residual.dtype} {list(residual.shape)}"
            )
        if format == "int8" and layout.wire not in BLOCK_WIRES:
            raise ValueError(f"an int8 residual has the wire's blocks, and {layout.wire} has none")
        begin = _C.residual_nbytes(format, layout.block_numel, first) if format != "int8" else first
        values = residual[begin:].view(VALUES[format])
        if format == "int8":
            scales = residual[_C.residual_scale_offset(numel) :].view(torch.float32)[first // layout.block_numel :]
    seed, parameter, step, source = encoding.key or (0, 0, 0, 0)
    return values, scales, _signed(seed, 64), _signed(parameter, 32), _signed(step, 32), _signed(source, 32)


def _signed(word: int, nbits: int) -> int:
    """The signed number of the same bits."""
    return word - (1 << nbits) if word >> (nbits - 1) else word
