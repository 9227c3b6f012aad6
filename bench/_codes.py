"""Codes of about four bits to compare int4 with: each function returns what a decoder makes of fp32 x [n·1024].

Bits an element include scales. Every scale is one that a message could have: bf16, e4m3 or a power of two.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

NF4 = (-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0)
NF4 += (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)
"""QLoRA's levels (Dettmers et al., 2023), for blocks divided by their absmax."""
E2M1 = (-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CODEBOOK = (-113.0, -91.0, -72.0, -55.0, -40.0, -26.0, -13.0, 0.0, 12.0, 25.0, 38.0, 51.0, 67.0, 83.0, 103.0, 127.0)
"""Levels for blocks whose element of greatest magnitude is 127."""
EDEN_NUMEL = 1024
"""Elements that EDEN rotates together."""


def nearest(x: Tensor, levels: Tensor) -> Tensor:
    """Each element of `x` as the nearest of `levels`, which ascend."""
    return levels[torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)]


def greatest(blocks: Tensor) -> Tensor:
    """[n, 1]: the element of greatest magnitude of each row."""
    return blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))


def safe(scales: Tensor) -> Tensor:
    """`scales` as bf16 numbers; 1 where they are so small that the wire makes zeros of the block."""
    return torch.where(scales.abs() < 2.0**-103, 1.0, scales).bfloat16().float()


def absmax_code(x: Tensor) -> Tensor:
    """int4 before its scale had a sign: absmax / 7. 4.5 bits."""
    blocks = x.view(-1, 32)
    scales = safe(blocks.abs().amax(1, keepdim=True) / 7)
    return ((blocks / scales).round().clamp(-7, 7) * scales).view_as(x)


def signed_scales(blocks: Tensor, least: int) -> Tensor:
    """[n, 1]: scales by which the element of greatest magnitude in each row is `least`."""
    top = greatest(blocks)
    has_negative = (blocks == -top.abs()).any(1, keepdim=True)  # of two that differ by the sign, the negative one
    return safe(torch.where(has_negative, top.abs(), -top.abs()) / -least)


def int4(x: Tensor) -> Tensor:
    """int4's code. 4.5 bits."""
    blocks = x.view(-1, 32)
    scales = signed_scales(blocks, -8)
    v = blocks * (1 / scales)
    codes = (v * (9856 / 8192 - v * v * (29 / 8192))).round().clamp(-8, 7)
    return (codes * (832 + 3 * codes * codes) / 1024 * scales).view_as(x)


def signed_code(x: Tensor, nbits: int = 4) -> Tensor:
    """A signed scale and equal steps, which int4 had before: nbits + 0.5 bits."""
    blocks, least = x.view(-1, 32), -(2 ** (nbits - 1))
    scales = signed_scales(blocks, least)
    return ((blocks * (1 / scales)).round().clamp(least, -least - 1) * scales).view_as(x)


def adaptive_code(x: Tensor) -> Tensor:
    """signed_code with 5, 4 or 3 bits: 4.51 bits.

    Of the groups of 256 elements of each row of `x` [rows, n·256], the quarter with the most energy has 5 bits and the
    quarter with the least has 3.
    """
    groups = x.view(len(x), -1, 256)
    quarter = groups.shape[1] // 4
    order = groups.square().sum(2).argsort(dim=1, descending=True)
    result = signed_code(groups)
    for nbits, chosen in ((5, order[:, :quarter]), (3, order[:, order.shape[1] - quarter :])):
        index = chosen[:, :, None].expand(-1, -1, 256)
        result.scatter_(1, index, signed_code(groups.gather(1, index), nbits))
    return result.view_as(x)


def codebook(x: Tensor) -> Tensor:
    """A signed scale and CODEBOOK's levels. 4.5 bits."""
    blocks = x.view(-1, 32)
    scales = safe(greatest(blocks) / 127)
    return (nearest(blocks / scales, torch.tensor(CODEBOOK)) * scales).view_as(x)


def duo(x: Tensor, levels: tuple[float, ...], top: float) -> Tensor:
    """4.5 bits: 32 elements share an exponent, and each 16 of them have a sign and k/16."""
    blocks = x.view(-1, 2, 16)
    tops = greatest(blocks.view(-1, 16)).view(-1, 2, 1)
    power = 2.0 ** tops.abs().amax(1, keepdim=True).clamp(min=2.0**-100).log2().ceil()
    scales = tops.sign() * (tops.abs() / power * 16).round().clamp(1, 16) / 16 * power / top
    scales = torch.where(scales == 0, 1.0, scales)
    return (nearest(blocks / scales, torch.tensor(levels)) * scales).view_as(x)


def nf4(x: Tensor) -> Tensor:
    """NF4 in blocks of 32 with bf16 scales. 4.5 bits."""
    blocks = x.view(-1, 32)
    scales = safe(blocks.abs().amax(1, keepdim=True))
    return (nearest(blocks / scales, torch.tensor(NF4)) * scales).view_as(x)


def nvfp4(x: Tensor) -> Tensor:
    """e2m1 in blocks of 16, scales in e4m3 times one fp32 for the tensor. 4.5 bits."""
    blocks = x.view(-1, 16)
    whole = x.abs().max() / (6 * 448)
    scales = (blocks.abs().amax(1, keepdim=True) / 6 / whole).to(torch.float8_e4m3fn).float() * whole
    scales = torch.where(scales == 0, 1.0, scales)
    return (nearest(blocks / scales, torch.tensor(E2M1)) * scales).view_as(x)


def mxfp4(x: Tensor) -> Tensor:
    """e2m1 in blocks of 32 with a power of two as scale. 4.25 bits."""
    blocks = x.view(-1, 32)
    scales = 2.0 ** (blocks.abs().amax(1, keepdim=True).clamp(min=2.0**-100).log2().floor() - 2)
    return (nearest(blocks / scales, torch.tensor(E2M1)) * scales).view_as(x)


def rotate(rows: Tensor) -> Tensor:
    """H·row / √n for each row of n elements, a power of two."""
    numel, h = rows.shape[1], 1
    while h < numel:
        pairs = rows.view(-1, numel // (2 * h), 2, h)
        rows = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], dim=2).view(-1, numel)
        h *= 2
    return rows / math.sqrt(numel)


def eden(x: Tensor, nbits: int) -> Tensor:
    """EDEN (Vargaftik et al., 2022), unbiased; with one bit it is DRIVE. nbits + 0.03 bits."""
    signs = torch.randint(2, (EDEN_NUMEL,), generator=torch.Generator().manual_seed(0)).float() * 2 - 1
    rows = rotate(x.view(-1, EDEN_NUMEL) * signs)
    norms = rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
    codes = nearest(rows / norms * math.sqrt(EDEN_NUMEL), torch.tensor(lloyd(2**nbits)[0]).float())
    scales = norms.square() / (rows * codes).sum(1, keepdim=True).clamp(min=1e-30)
    return (rotate(codes * scales) * signs).view_as(x)


@functools.cache
def lloyd(num_levels: int) -> tuple[tuple[float, ...], float]:
    """The levels of the quantiser with the least squared error for a normal distribution, and that error.

    Each level is the mean of what is rounded to it. For an even number of levels.
    """
    levels = torch.linspace(-2, 2, num_levels, dtype=torch.float64)
    density = torch.distributions.Normal(0.0, 1.0)
    for _ in range(5000):
        ends = torch.cat([torch.tensor([-40.0]), (levels[1:] + levels[:-1]) / 2, torch.tensor([40.0])]).double()
        share = density.cdf(ends).diff()
        levels = -density.log_prob(ends).exp().diff() / share
    return tuple(levels.tolist()), 1 - (share * levels.square()).sum().item()


CODES: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    "absmax / 7": (4.5, absmax_code),
    "signed scale": (4.5, signed_code),
    "int4": (4.5, int4),
    "signed scale and codebook": (4.5, codebook),
    "duo": (4.5, functools.partial(duo, levels=tuple(map(float, range(-8, 8))), top=-8.0)),
    "duo and codebook": (4.5, functools.partial(duo, levels=CODEBOOK, top=127.0)),
    "NF4": (4.5, nf4),
    "NVFP4": (4.5, nvfp4),
    "MXFP4": (4.25, mxfp4),
    "EDEN, 4 bits": (4.03, functools.partial(eden, nbits=4)),
    "DRIVE": (1.03, functools.partial(eden, nbits=1)),
}
"""By name: bits an element, and the code."""
