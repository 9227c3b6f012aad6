"""Residuals: the sum of an encoder's errors so far, for each element. Read before a tile is encoded, written after.

Residuals lie in the order of the slice list. A tile's residuals are therefore contiguous and aligned, wherever its
gradients lie.
"""

import triton
import triton.language as tl

from .elements import INF_BITS, magnitude_bits


@triton.jit
def places_of(residual, begin, numel, VEC: tl.constexpr, TILE: tl.constexpr):
    """(pointers [TILE], mask) of `numel` elements from `begin` on; `numel` and `begin` are multiples of VEC."""
    lane = tl.max_contiguous(tl.arange(0, TILE), VEC)
    return residual + begin // VEC * VEC + lane, lane < numel // VEC * VEC


@triton.jit
def load_residual(residual, begin, numel, VEC: tl.constexpr, TILE: tl.constexpr, FEEDBACK: tl.constexpr):
    """fp32 [TILE]: the residuals of `numel` elements from `begin` on, then zeros. Without FEEDBACK: 0.0."""
    if FEEDBACK:
        places, mask = places_of(residual, begin, numel, VEC, TILE)
        return tl.load(places, mask=mask, other=0)
    else:
        return 0.0


@triton.jit
def store_residual(residual, left_out, begin, numel, VEC: tl.constexpr):
    """Writes the first `numel` elements of `left_out` (fp32 [TILE]) from `begin` on; those not finite become zeros."""
    TILE: tl.constexpr = left_out.shape[0]
    places, mask = places_of(residual, begin, numel, VEC, TILE)
    left_out = tl.where(magnitude_bits(left_out) < INF_BITS, left_out, 0.0)
    tl.store(places, left_out, mask=mask)
