"""The rotation of tests/helpers/reference, bit for bit: each run of 32 elements changes signs, then is multiplied by
the Hadamard matrix of order 32.

A thread that holds an element and its partner adds them in registers; otherwise they meet through a warp shuffle.
Shared memory is not needed, because a run never lies in more than one warp.
"""

import triton
import triton.language as tl

from fusedcomm.native import _C

from .elements import SIGN_BIT

RUN_MASK = tl.constexpr(_C.ROTATION_NUMEL - 1)
INVERSE = tl.constexpr(1 / _C.ROTATION_NUMEL)
# Bit i is set if element i of a run changes its sign. As an i32.
SIGNS = tl.constexpr(_C.ROTATION_SIGNS - 2**32)


@triton.jit
def with_signs(y):
    """`y` (fp32 [n]) with the signs of each run changed as SIGNS says."""
    place = tl.arange(0, y.shape[0]) & RUN_MASK
    flip = (SIGNS << (RUN_MASK - place)) & SIGN_BIT
    return (y.to(tl.int32, bitcast=True) ^ flip).to(tl.float32, bitcast=True)


@triton.jit
def add_and_subtract(y, STEP: tl.constexpr):
    """(a, b) ← (a + b, a − b) for elements (i, i + STEP) of `y` (fp32 [n])."""
    NUMEL: tl.constexpr = y.shape[0]
    pairs = tl.reshape(y.to(tl.int32, bitcast=True), (NUMEL // (2 * STEP), 2, STEP))
    # (a + b) - own, in integers, is exactly the partner. The compiler sees that and adds nothing.
    partner = tl.sum(pairs, axis=1, keep_dims=True) - pairs
    flip = (tl.arange(0, 2) << 31)[None, :, None]
    result = partner.to(tl.float32, bitcast=True) + (pairs ^ flip).to(tl.float32, bitcast=True)
    return tl.reshape(result, (NUMEL,))


@triton.jit
def butterfly(y):
    """H·y of each run, with additions in the reference's order."""
    y = add_and_subtract(y, 1)
    y = add_and_subtract(y, 2)
    y = add_and_subtract(y, 4)
    y = add_and_subtract(y, 8)
    return add_and_subtract(y, 16)


@triton.jit
def rotate(y):
    return butterfly(with_signs(y))


@triton.jit
def unrotate(y):
    return with_signs(butterfly(y) * INVERSE)
