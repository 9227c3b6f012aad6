"""How an encoder rounds, and the kernels' parameters for it."""

from dataclasses import dataclass

import torch

from .arguments import Noise

# Of a residual's values in memory; kernels round by integers.
VALUES = {"fp32": torch.float32, "bf16": torch.int16}


@dataclass(frozen=True)
class Encoding:
    key: tuple[int, int, int, int] | None = None
    """(seed, parameter, step, source) of the noise, fields of reference.NoiseKey; None: to nearest even."""

    feedback: str | None = None
    """The residual's format, "fp32" or "bf16"; None: nothing is kept."""

    residual: torch.Tensor | None = None
    """uint8 [_C.residual_nbytes(feedback, numel)], read and written."""

    def is_stochastic(self, wire: str) -> bool:
        return self.key is not None and wire != "fp32"  # which loses nothing


NEAREST = Encoding()


def encoding_args(encoding: Encoding, first: int, numel: int, unused: torch.Tensor) -> tuple[torch.Tensor, Noise]:
    """(residual, noise), the residual from its element `first` of `numel` on.

    `unused`: any tensor, uint8, for the residual where there is none. ValueError if it has another shape or dtype.
    """
    values = unused.view(torch.int8)
    format, residual = encoding.feedback, encoding.residual
    if format is not None:
        from fusedcomm.native import _C

        nbytes = _C.residual_nbytes(format, numel)
        if residual.dtype != torch.uint8 or tuple(residual.shape) != (nbytes,) or not residual.is_contiguous():
            raise ValueError(
                f"the residual must be contiguous uint8 [{nbytes}], not {residual.dtype} {list(residual.shape)}"
            )
        values = residual[_C.residual_nbytes(format, first) :].view(VALUES[format])
    seed, parameter, step, source = encoding.key or (0, 0, 0, 0)
    return values, Noise(_signed(seed, 64), _signed(parameter, 32), _signed(step, 32), _signed(source, 32))


def _signed(word: int, nbits: int) -> int:
    """The signed number of the same bits."""
    return word - (1 << nbits) if word >> (nbits - 1) else word
