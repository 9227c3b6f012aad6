"""How an encoder rounds and whether it keeps a residual, and the kernel parameters that say so."""

from dataclasses import dataclass

import torch

from .arguments import Noise

# The dtype as which kernels read and write a residual, by its format. bf16 is int16, because kernels round in integers.
VALUES = {"fp32": torch.float32, "bf16": torch.int16}


@dataclass(frozen=True)
class Encoding:
    """How an encoder rounds and whether it keeps a residual."""

    key: tuple[int, int, int, int] | None = None
    """(seed, parameter, step, source) of the noise: the fields of reference.NoiseKey. None: to nearest even."""

    feedback: str | None = None
    """The residual's format, "fp32" or "bf16". None: no residual is kept."""

    residual: torch.Tensor | None = None
    """uint8 [_C.residual_nbytes(feedback, numel)], read and overwritten. None if `feedback` is None."""

    def is_stochastic(self, wire: str) -> bool:
        return self.key is not None and wire != "fp32"  # fp32 rounds nothing


NEAREST = Encoding()


def encoding_args(encoding: Encoding, first: int, numel: int, unused: torch.Tensor) -> tuple[torch.Tensor, Noise]:
    """The kernel parameters (residual, noise). The residual has `numel` elements and is passed from element `first` on.

    `unused`: any uint8 tensor; it is passed if there is no residual. Raises ValueError if the residual has another
    shape or dtype, or is not contiguous.
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
    """The signed integer with the bits of `word`, an unsigned integer of `nbits` bits."""
    return word - (1 << nbits) if word >> (nbits - 1) else word
