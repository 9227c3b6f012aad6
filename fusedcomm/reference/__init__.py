"""The oracle: the codec in plain eager PyTorch. Slow, obvious, right.

The C++ codec and any device kernel must produce the same bytes as `pack` and `reduce`, and the same bits as `unpack`.
Sizes and offsets are asked of the layout (csrc/wire/layout.h); the arithmetic is defined here:

    pack     y = float(x)·scale                       one fp32 multiplication, also by 1
    fp32     code = y
    bf16     code = y rounded to nearest even         overflow becomes Inf
    fp16     code = y rounded to nearest even         overflow becomes Inf, subnormals are kept
    blocks   absmax = max |y| of a block; L is the greatest code: 127 (int8), 448 (fp8), 7 (int4)
               scale = absmax / L, inverse = L / absmax; int4: scale = absmax / 7 rounded to bf16, inverse = 1 / scale
               code = y · inverse, to nearest even among whole numbers (int8, int4) or values of e4m3fn (fp8), which
               keep the sign of zero; what lies beyond L becomes L
               a block with absmax < 2^-100           scale = 0, code = 0
               a block with an Inf or a NaN           scale = Inf, code = ±L for ±Inf, 0 for all others
    rotate   y of 32 consecutive elements ← H·(signs·y) first, unnormalised; undone after decoding by signs·(H·y)/32
    decode   the code as fp32; of blocks code · scale, so 0 · Inf is NaN in a block that had an Inf or a NaN
               (and L · scale may overflow to Inf where absmax is near the greatest float)
    reduce   ((part 0 + part 1) + part 2) … in fp32, · scale, encoded again
    unpack   x = decoded · scale, rounded to the gradient's dtype

With stochastic rounding "to nearest even" becomes, with u in [0, 1) from `noise` (what is rotated has the noise of the
place where the rotation puts it; scales and what is not finite are not affected):

    int8, int4       floor(y · inverse + u)
    floats           magnitudes, as bits, plus u·2^(bits dropped), truncated; below the least normal number, where the
                     step is constant, floor(magnitude / step + u) steps

With error feedback an encoder adds to y what it has left out so far, before anything else, and keeps what it leaves out
now, in a residual for each element of the padded stream; so an element's errors do not add up over the steps:

    y += residual, then residual = y − decoded (rotated back, where y was rotated), or 0 where that is not finite
    residuals are fp32 or bf16 (rounded as on the wire)

Every NaN that is stored is the canonical one, 0x7FC00000 and its like in 16 bits.
"""

from fusedcomm.reference.elements import (
    GREATEST_CODE,
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
from fusedcomm.reference.sums import all_reduce_mean

__all__ = [
    "GREATEST_CODE",
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
]
