"""The definition of the codec, in plain eager PyTorch: slow, but easy to check.

The C++ codec and every device kernel must produce the same bytes as `pack` and `reduce`, and the same bits as `unpack`.
Sizes and offsets come from the layout (csrc/wire/layout.h). The arithmetic is defined here. x is an element of a
gradient, y the fp32 value that is encoded, and L the greatest value of a code: 127 (int8), 448 (fp8) or 6.69 (int4).

    pack     y = float(x)·scale                       one fp32 multiplication, also if scale is 1
    fp32     code = y
    bf16     code = y rounded to nearest even         overflow becomes Inf
    fp16     code = y rounded to nearest even         overflow becomes Inf, subnormals are kept
    blocks   absmax = max |y| of a block
               scale = absmax / L, inverse = L / absmax
               code = y · inverse, to nearest even among whole numbers (int8) or among the values of e4m3fn (fp8), which
               keep the sign of zero; magnitudes beyond L become L
               a block with absmax < 2^-100           scale = 0, code = 0
               a block with an Inf or a NaN           scale = Inf, code = ±L for ±Inf, 0 for all other elements
    int4     codes are c = -8 … 7, of the values level(c) = c·(832 + 3·c²) / 1024, so level(-8) = -8; -Inf has that code
               c = v·(9856 − 29·v²) / 8192 to nearest even, v = y · inverse: fp32 operations in this order, 9856 / 8192
               and 29 / 8192 being one number each. The level is the nearest one unless v is within 0.08 steps of the
               middle between two
               scale = absmax / 8 if the block has an element of -absmax, else -absmax / 8: one element of greatest
               magnitude has the code -8, and one with the other sign 7; absmax counts as at most the greatest bf16
               number; the scale is rounded to bf16; inverse = 1 / scale; codes beyond 7 become 7
               rounded stochastically: scale = absmax / level(7) rounded up to bf16, so that no value has to be cut off
    rotate   before a block is encoded, y of 32 consecutive elements ← H·(signs·y), unnormalized; H is the Hadamard
               matrix; after decoding, signs·(H·y)/32 undoes the rotation
    decode   the code's value as fp32; with blocks that · scale, so 0 · Inf is NaN in a block that had an Inf or a NaN
               (in int8 and fp8 L · scale may overflow to Inf where absmax is near the greatest float)
    reduce   ((part 0 + part 1) + part 2) … in fp32, · scale, encoded again
    unpack   x = decoded · scale, rounded to the gradient's dtype

Stochastic rounding replaces "to nearest even" as follows. u in [0, 1) comes from `noise`. A rotated element has the
noise of its place after the rotation. Scales and values that are not finite are rounded as above.

    int8             floor(y · inverse + u)
    int4             from the level at or below v up to the next one if v − level ≥ (1 − u)·(next − level)
    floats           add u·2^(bits dropped) to the bits of the magnitude, then truncate; below the least normal number,
                     where the step is constant, floor(magnitude / step + u) steps

With error feedback, an encoder keeps a residual for each lossy element, padding included: the rounding error of the
last step. It first adds the residual to y, so an element's rounding errors do not add up over the steps:

    y += residual, then residual = y − decoded (rotated back if y was rotated), or 0 where that is not finite
    residuals are fp32 or bf16 (rounded as on the wire)

Every stored NaN is the canonical one: 0x7FC00000 in fp32, 0x7FC0 in bf16, 0x7E00 in fp16.
"""

from fusedcomm.reference.elements import (
    GREATEST_CODE,
    LEAST_CODE,
    LEVELS,
    WIRE_DTYPES,
    canonical,
    decode,
    encode,
    rotate,
    round_to,
    scaled,
    unrotate,
    values_of_codes,
)
from fusedcomm.reference.noise import FIRST_HOST, REDUCER, NoiseKey, noise
from fusedcomm.reference.stages import Feedback, pack, part_bytes, reduce, unpack
from fusedcomm.reference.sums import all_reduce_mean, slice_list, taken

__all__ = [
    "GREATEST_CODE",
    "LEAST_CODE",
    "LEVELS",
    "WIRE_DTYPES",
    "canonical",
    "decode",
    "encode",
    "rotate",
    "round_to",
    "scaled",
    "unrotate",
    "values_of_codes",
    "FIRST_HOST",
    "REDUCER",
    "NoiseKey",
    "noise",
    "Feedback",
    "pack",
    "part_bytes",
    "reduce",
    "unpack",
    "all_reduce_mean",
    "slice_list",
    "taken",
]
