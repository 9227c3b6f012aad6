"""Elements and blocks: fp32 → codes and scales → fp32.

y is the fp32 value that is encoded, and L the greatest value of a code: GREATEST_CODE.

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
    decode   the code's value as fp32; with blocks that · scale, so 0 · Inf is NaN in a block that had an Inf or a NaN
               (in int8 and fp8 L · scale may overflow to Inf where absmax is near the greatest float)
"""

import torch

WIRE_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "int4": torch.uint8,
}
"""Dtype of each wire's codes. int4 has two codes in a byte, the first element's in the lowest bits."""

LEVELS = tuple(n * (832 + 3 * n * n) / 1024 for n in range(-8, 8))
"""The values of int4's codes, in order: of -8 first. Exact in fp32."""

# The greatest and the least value of a code in each wire that has scales.
GREATEST_CODE = {"int8": 127.0, "fp8": 448.0, "int4": LEVELS[-1]}
LEAST_CODE = {"int8": -127.0, "fp8": -448.0, "int4": LEVELS[0]}

# Bits of the wires in which several codes share a byte. Their scales are bf16.
_NBITS = {"int4": 4}

_LEAST_ABSMAX = 2.0**-100
"""Blocks with a smaller absmax become zeros, so that scale and inverse are never near overflow or denormal."""


_BF16_GREATEST = 2.0**128 - 2.0**120


def scale_dtype(wire: str) -> torch.dtype:
    """Dtype of a wire's scales, fp32 also for wires that have none."""
    return torch.bfloat16 if wire in _NBITS else torch.float32


def codes_nbytes(wire: str, numel: int) -> int:
    """Bytes of the codes of `numel` elements, which fill whole bytes."""
    return numel * _NBITS[wire] // 8 if wire in _NBITS else numel * WIRE_DTYPES[wire].itemsize


def canonical(x: torch.Tensor) -> torch.Tensor:
    """`x` (fp32, bf16 or fp16) with every NaN replaced by the positive quiet NaN without payload."""
    bits, nan = {
        torch.float32: (torch.int32, 0x7FC00000),
        torch.bfloat16: (torch.int16, 0x7FC0),
        torch.float16: (torch.int16, 0x7E00),
    }[x.dtype]
    return torch.where(x.isnan(), torch.tensor(nan, dtype=bits, device=x.device), x.view(bits)).view(x.dtype)


def scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    """float(x)·float(scale) in fp32, rounded once. `x` has any float dtype and shape."""
    return x.float() * torch.tensor(scale, dtype=torch.float32, device=x.device)


def round_to(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`y` (fp32) rounded to nearest even in `dtype` (fp32, bf16 or fp16), with canonical NaNs."""
    if dtype == torch.bfloat16:
        # In integers, because not every conversion instruction keeps denormals. Adding half an ulp less one, plus the
        # lowest kept bit, carries exactly when rounding to nearest even rounds up.
        bits = canonical(y).view(torch.int32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).to(torch.int16).view(torch.bfloat16)
    return canonical(y.to(dtype))


def encode(y: torch.Tensor, wire: str, block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Wire codes of `y` (fp32 [numel]) and the scales of its blocks of `block` elements.

    Returns (codes, scales): codes [numel] in the wire's dtype, for int4 [ceil(numel / 2)]; scales
    [ceil(numel / block)] in fp32, for int4 in bf16, and empty if the wire has no scales. Elements missing from
    the last block count as zeros.
    """
    if wire not in GREATEST_CODE:
        return round_to(y, WIRE_DTYPES[wire]), y.new_empty(0)
    if y.numel() == 0:
        return y.new_empty(0, dtype=WIRE_DTYPES[wire]), y.new_empty(0, dtype=scale_dtype(wire))
    blocks = torch.nn.functional.pad(y, (0, -y.numel() % block)).view(-1, block)
    absmax = blocks.abs().amax(dim=1)
    finite = blocks.isfinite().all(dim=1)
    normal = finite & (absmax >= _LEAST_ABSMAX)
    # L is a tensor because torch may divide by a Python number by multiplying by its reciprocal.
    greatest = torch.full_like(absmax, GREATEST_CODE[wire])
    absmax = torch.where(normal, absmax, greatest)
    if wire in _NBITS:
        is_negative = (blocks == -absmax[:, None]).any(dim=1)
        scales = _signed_scales(wire, absmax, is_negative)
        inverse = torch.ones_like(scales) / scales
    else:
        scales = absmax / greatest
        inverse = greatest / absmax
    v = blocks * inverse[:, None]
    codes = torch.where(normal[:, None], _nearest_code(v, wire), 0.0)
    codes = torch.where(blocks == torch.inf, GREATEST_CODE[wire], codes)
    codes = torch.where(blocks == -torch.inf, LEAST_CODE[wire], codes)
    scales = torch.where(normal, scales, 0.0)
    scales = torch.where(finite, scales, torch.inf).to(scale_dtype(wire))
    return _stored(codes.view(-1)[: y.numel()], wire), scales


def _signed_scales(wire: str, absmax: torch.Tensor, is_negative: torch.Tensor) -> torch.Tensor:
    """fp32 [num_blocks], each a bf16 number: the scales of blocks by their absmax (fp32 [num_blocks]).

    The element of greatest magnitude gets the least code, and if both signs have that magnitude, the negative one does:
    `is_negative` (bool [num_blocks]) tells whether an element is -absmax.
    """
    absmax = absmax.clamp(max=_BF16_GREATEST)
    return round_to(torch.where(is_negative, absmax, -absmax) / -LEAST_CODE[wire], torch.bfloat16).float()


def _levels(like: torch.Tensor) -> torch.Tensor:
    """fp32 [16]: what the codes of int4 stand for, from the least on."""
    return torch.tensor(LEVELS, dtype=torch.float32, device=like.device)


def _nearest_code(v: torch.Tensor, wire: str) -> torch.Tensor:
    """fp32: each element of `v` (fp32) rounded to a value that the wire has a code for."""
    least, greatest = LEAST_CODE[wire], GREATEST_CODE[wire]
    if wire == "int4":
        # Hardly ever another level than the nearest; NaNs get any.
        code = (v * (9856 / 8192 - v * v * (29 / 8192))).round().clamp(-8, 7).nan_to_num()
        return _levels(v)[(code + 8).long()]
    if wire == "int8":
        return v.round().clamp(least, greatest)
    return v.clamp(least, greatest).to(WIRE_DTYPES[wire]).float()


def _stored(codes: torch.Tensor, wire: str) -> torch.Tensor:
    """The codes in the wire's dtype, of `codes` (fp32 [numel]), each of which has an exact code."""
    if wire not in _NBITS:
        return codes.to(WIRE_DTYPES[wire])
    nbits = _NBITS[wire]
    codes = torch.nn.functional.pad(codes, (0, -codes.numel() % (8 // nbits)))
    levels = _levels(codes)
    # Two's complement of the code's own width: the upper half of the levels has the codes from 0 on.
    numbers = (torch.bucketize(codes, levels) - len(levels) // 2) % len(levels)
    places = torch.arange(0, 8, nbits, dtype=torch.int64, device=codes.device)
    return (numbers.view(-1, 8 // nbits) << places).sum(dim=1).to(torch.uint8)


def values_of_codes(codes: torch.Tensor, wire: str) -> torch.Tensor:
    """fp32: the values of stored codes, without scales. Each byte of `codes` has two values in int4."""
    if wire not in _NBITS:
        return codes.float()
    nbits = _NBITS[wire]
    levels = _levels(codes)
    places = torch.arange(0, 8, nbits, dtype=torch.int64, device=codes.device)
    numbers = (codes.long()[:, None] >> places & (1 << nbits) - 1).view(-1)
    return levels[(numbers + len(levels) // 2) % len(levels)]


def decode(codes: torch.Tensor, scales: torch.Tensor, wire: str, block: int = 128) -> torch.Tensor:
    """fp32 [numel]: the values of codes and scales from `encode`. numel is rounded up to what fills whole bytes."""
    values = values_of_codes(codes, wire)
    if wire in GREATEST_CODE:
        values = values * scales.float().repeat_interleave(block)[: values.numel()]
    return canonical(values)
