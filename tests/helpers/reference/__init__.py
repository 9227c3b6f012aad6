"""The definition of the codec, in plain eager PyTorch: slow, but easy to check.

The C++ codec and every device kernel must produce the same bytes as `pack` and `reduce`, and the same bits as `unpack`.
Sizes and offsets come from the layout (csrc/wire/layout.h). x is an element of a gradient, y the fp32 value that is
encoded. elements.py defines the codes of each wire.

    pack     y = float(x)·scale, one fp32 multiplication, also if scale is 1; encoded
    reduce   ((part 0 + part 1) + part 2) … in fp32, · scale, encoded again
    unpack   x = decoded · scale, rounded to the gradient's dtype

With error feedback, an encoder keeps a residual for each lossy element, padding included: the rounding error of the
last step. It first adds the residual to y, so an element's rounding errors do not add up over the steps:

    y += residual, then residual = y − decoded, or 0 where that is not finite
    residuals are fp32

Every stored NaN is the canonical one: 0x7FC00000 in fp32, 0x7FC0 in bf16, 0x7E00 in fp16.
"""

from reference.elements import (
    GREATEST_CODE,
    LEAST_CODE,
    LEVELS,
    WIRE_DTYPES,
    canonical,
    decode,
    encode,
    round_to,
    scaled,
    values_of_codes,
)
from reference.stages import pack, part_bytes, reduce, unpack
from reference.sums import all_reduce_mean, slice_list, taken

__all__ = [
    "GREATEST_CODE",
    "LEAST_CODE",
    "LEVELS",
    "WIRE_DTYPES",
    "canonical",
    "decode",
    "encode",
    "round_to",
    "scaled",
    "values_of_codes",
    "pack",
    "part_bytes",
    "reduce",
    "unpack",
    "all_reduce_mean",
    "slice_list",
    "taken",
]
