"""Noise for stochastic rounding, as tests/helpers/reference defines it: Philox4x32-10, 16 bits for each element.

One counter gives eight elements their bits. A thread that holds only four of them computes the same counter as its
neighbor. That costs less than an exchange through shared memory.
"""

import triton
import triton.language as tl


@triton.jit
def noise(key, begin, NUMEL: tl.constexpr, VEC: tl.constexpr):
    """uint32 [NUMEL], each less than 2^16: the noise of the elements from `begin` on.

    key: see Noise in arguments.py. begin: a multiple of 8. VEC: 4, or a multiple of 8.
    """
    seed, parameter, step, source = key
    low = seed.to(tl.uint32)
    high = (seed.to(tl.int64) >> 32).to(tl.uint32)
    first = (begin // 8).to(tl.uint32)
    if VEC == 4:
        vector = tl.arange(0, NUMEL // 4).to(tl.uint32)
        group = first + vector // 2
    else:
        tl.static_assert(VEC % 8 == 0)
        group = first + tl.arange(0, NUMEL // 8).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(
        group, parameter.to(tl.uint32), step.to(tl.uint32), source.to(tl.uint32), low, high, 10
    )
    if VEC == 4:
        odd = vector % 2 == 1
        words = tl.join(tl.where(odd, w2, w0), tl.where(odd, w3, w1))
    else:
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (NUMEL,))


@triton.jit
def fraction(noise):
    """fp32: noise·2^-16. The noise becomes the mantissa of a number in [1, 2), which saves a conversion."""
    return ((noise << 7) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
