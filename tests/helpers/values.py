"""Values, comparisons and codecs that tests of the codec and of the kernels share."""

import torch

from fusedcomm.native import _C

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_WIRES = ("int8", "fp8", "int4")
CODECS = {f"{isa}-{num_threads}": _C.Codec(isa, num_threads) for isa in _C.available_isas() for num_threads in (1, 3)}


def signed(
    numel: int, dtype: torch.dtype = torch.float32, seed: int = 0, specials: bool = False, binades: int = 20
) -> torch.Tensor:
    """Random values of both signs over 2·binades binades. With `specials`, one element in 300 has a random bit
    pattern."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-binades, binades, (numel,), generator=generator).float()
    x = (torch.randn(numel, generator=generator) * exponents.exp2()).to(dtype)
    if specials:
        integers = torch.int32 if dtype == torch.float32 else torch.int16
        limits = torch.iinfo(integers)
        patterns = torch.randint(limits.min, limits.max + 1, (numel,), generator=generator).to(integers).view(dtype)
        x = torch.where(torch.rand(numel, generator=generator) < 1 / 300, patterns, x)
    return x


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def uninitialised(nbytes: int) -> torch.Tensor:
    """Wire memory filled with 0xA5, so that a byte that is not written shows."""
    return torch.full((nbytes,), 0xA5, dtype=torch.uint8)
