"""The noise of stochastic rounding."""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class NoiseKey:
    """Selects the noise of one encoder in one step. The noise of different keys is independent."""

    seed: int
    """64 bits, the same on every rank."""
    parameter: int
    """Number of the first lossy parameter. Elements are counted from its first one."""
    step: int
    """Number of backward passes before this one."""
    source: int
    """The rank, for its pack; FIRST_HOST + host, for the encoder of a host's sum; REDUCER, for encoders of the mean."""


FIRST_HOST, REDUCER = 0x40000000, 0xFFFFFFFF


def noise(key: NoiseKey, first: int, numel: int, device: torch.device | None = None) -> torch.Tensor:
    """u in [0, 1) for the elements from `first` on: fp32 [numel], multiples of 2^-16.

    The bits come from Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011). Its key is
    (low word of the seed, high word of the seed), its counter (element // 8, parameter, step, source). One counter
    gives 128 bits. An element takes 16 of them, from bit 16·(element % 8) on.
    """
    group = torch.arange(first // 8, -(-(first + numel) // 8), dtype=torch.int64, device=device)
    words = [group & _WORD, *(torch.full_like(group, word) for word in (key.parameter, key.step, key.source))]
    low, high = key.seed & _WORD, key.seed >> 32
    for _ in range(10):
        product_0, product_1 = _product(words[0], 0xD2511F53), _product(words[2], 0xCD9E8D57)
        words = [product_1[0] ^ words[1] ^ low, product_1[1], product_0[0] ^ words[3] ^ high, product_0[1]]
        low, high = (low + 0x9E3779B9) & _WORD, (high + 0xBB67AE85) & _WORD
    halves = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], dim=1).view(-1)
    return halves[first % 8 :][:numel].float() / 2**16


_WORD = 0xFFFFFFFF


def _product(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(high, low) 32-bit words of a·b, where `a` holds 32-bit words. All tensors are int64."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF
