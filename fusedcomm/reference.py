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

import dataclasses

import torch

from fusedcomm.native import _C

WIRE_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "int4": torch.uint8,
}
"""Of the codes; int4 has two in a byte, the even element's in the low half."""

GREATEST_CODE = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}

_LEAST_ABSMAX = 2.0**-100
"""Blocks below it become zeros, so that neither scale nor inverse comes near overflow or a denormal."""


# ---- elements


def canonical(x: torch.Tensor) -> torch.Tensor:
    """`x` (fp32, bf16 or fp16) with every NaN replaced by the positive quiet NaN without payload."""
    bits, nan = {
        torch.float32: (torch.int32, 0x7FC00000),
        torch.bfloat16: (torch.int16, 0x7FC0),
        torch.float16: (torch.int16, 0x7E00),
    }[x.dtype]
    return torch.where(x.isnan(), torch.tensor(nan, dtype=bits, device=x.device), x.view(bits)).view(x.dtype)


def scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    """float(x)·float(scale): fp32, rounded once."""
    return x.float() * torch.tensor(scale, dtype=torch.float32, device=x.device)


def round_to(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`y` (fp32) to nearest even in `dtype` (fp32, bf16 or fp16), NaNs canonical."""
    if dtype == torch.bfloat16:
        # By integers, because not every conversion instruction keeps denormals: half an ulp less one, plus the lowest
        # kept bit, carries exactly where nearest-even rounds up.
        bits = canonical(y).view(torch.int32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).to(torch.int16).view(torch.bfloat16)
    return canonical(y.to(dtype))


def encode(
    y: torch.Tensor, wire: str, block: int = _C.DEFAULT_BLOCK_NUMEL, u: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Wire codes of `y` (fp32, [numel]) and the scales of its blocks; rounded stochastically by `u` (fp32, [numel]).

    Returns (codes [numel] in the wire's dtype, int4 [ceil(numel / 2)]; scales [ceil(numel / block)] in fp32, int4 in
    bf16; no scales unless the wire has blocks). Elements missing from the last block count as zeros.
    """
    if wire not in GREATEST_CODE:
        if u is not None and wire != "fp32":
            y = torch.where(y.isfinite(), _stochastic_float(y, u, WIRE_DTYPES[wire]), y)
        return round_to(y, WIRE_DTYPES[wire]), y.new_empty(0)
    scale_dtype = torch.bfloat16 if wire == "int4" else torch.float32
    if y.numel() == 0:
        return y.new_empty(0, dtype=WIRE_DTYPES[wire]), y.new_empty(0, dtype=scale_dtype)
    blocks = torch.nn.functional.pad(y, (0, -y.numel() % block)).view(-1, block)
    absmax = blocks.abs().amax(dim=1)
    finite = blocks.isfinite().all(dim=1)
    normal = finite & (absmax >= _LEAST_ABSMAX)
    # Tensors of L: dividing by a Python number may be done as multiplying by its reciprocal.
    greatest = torch.full_like(absmax, GREATEST_CODE[wire])
    absmax = torch.where(normal, absmax, greatest)
    scales = absmax / greatest
    inverse = greatest / absmax
    if wire == "int4":
        scales = round_to(scales, torch.bfloat16).float()
        inverse = torch.ones_like(scales) / scales
    v = blocks * inverse[:, None]
    if u is None:
        codes = _nearest_code(v, wire)
    else:
        codes = _stochastic_code(v, torch.nn.functional.pad(u, (0, -u.numel() % block)).view_as(v), wire)
    codes = torch.where(normal[:, None], codes, 0.0)
    codes = torch.where(blocks.isinf(), greatest[:, None] * blocks.sign(), codes)
    scales = torch.where(normal, scales, 0.0)
    scales = torch.where(finite, scales, torch.inf).to(scale_dtype)
    return _stored(codes.view(-1)[: y.numel()], wire), scales


def _nearest_code(v: torch.Tensor, wire: str) -> torch.Tensor:
    """fp32: each element of `v` (fp32) rounded to a value that the wire has a code for."""
    greatest = GREATEST_CODE[wire]
    if wire in ("int8", "int4"):
        return v.round().clamp(-greatest, greatest)
    return v.clamp(-greatest, greatest).to(WIRE_DTYPES[wire]).float()


def _stochastic_code(v: torch.Tensor, u: torch.Tensor, wire: str) -> torch.Tensor:
    """As `_nearest_code`, but rounded up with a probability that is the distance from the value below."""
    greatest = GREATEST_CODE[wire]
    rounded = (v + u).floor() if wire in ("int8", "int4") else _stochastic_float(v, u, WIRE_DTYPES[wire])
    return rounded.clamp(-greatest, greatest)


def _stochastic_float(v: torch.Tensor, u: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32: finite `v` (fp32) as a value of a float `dtype`, which may be beyond its greatest."""
    mantissa_nbits, least_exponent = {
        torch.bfloat16: (7, -126),
        torch.float16: (10, -14),
        torch.float8_e4m3fn: (3, -6),
    }[dtype]
    magnitude = v.abs()
    dropped = 23 - mantissa_nbits
    bits = magnitude.view(torch.int32) + (u * 2.0**dropped).to(torch.int32)
    value = (bits >> dropped << dropped).view(torch.float32)
    if dtype != torch.bfloat16:  # whose subnormals have the step of fp32's
        step = 2.0 ** (least_exponent - mantissa_nbits)
        value = torch.where(magnitude < 2.0**least_exponent, (magnitude / step + u).floor() * step, value)
    return value.copysign(v)


def _stored(codes: torch.Tensor, wire: str) -> torch.Tensor:
    """Codes as they lie in memory, of exact values in fp32."""
    if wire != "int4":
        return codes.to(WIRE_DTYPES[wire])
    nibbles = torch.nn.functional.pad(codes, (0, codes.numel() % 2)).to(torch.int8).view(torch.uint8) & 0xF
    return nibbles[0::2] | nibbles[1::2] << 4


def _values(codes: torch.Tensor, wire: str) -> torch.Tensor:
    """fp32: what stored codes stand for."""
    if wire != "int4":
        return codes.float()
    nibbles = torch.stack([codes & 0xF, codes >> 4], dim=1).view(-1).to(torch.int16)
    return torch.where(nibbles > 7, nibbles - 16, nibbles).float()


def decode(codes: torch.Tensor, scales: torch.Tensor, wire: str, block: int = _C.DEFAULT_BLOCK_NUMEL) -> torch.Tensor:
    """fp32 of what `encode` returned: [numel], of int4 an even number."""
    values = _values(codes, wire)
    if wire in GREATEST_CODE:
        values = values * scales.float().repeat_interleave(block)[: values.numel()]
    return canonical(values)


# ---- noise


@dataclasses.dataclass(frozen=True)
class NoiseKey:
    """Whose noise it is: the draws of two keys are independent."""

    seed: int
    """64 bits, the same on every rank."""
    parameter: int
    """Number of the first parameter of the stream; elements are counted from its beginning."""
    step: int
    """Backward passes before this one."""
    source: int
    """The rank that packs, FIRST_HOST plus the host whose sum is encoded, or REDUCER for who encodes the mean."""


FIRST_HOST, REDUCER = 0x40000000, 0xFFFFFFFF


def noise(key: NoiseKey, first: int, numel: int, device: torch.device | None = None) -> torch.Tensor:
    """u in [0, 1) for the stream's elements from `first` on: fp32 [numel], multiples of 2^-16.

    Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011), key (seed's low word, its high
    word), counter (element // 8, parameter, step, source): 128 bits, of which an element has 16, from bit
    16·(element % 8) on.
    """
    group = torch.arange(first // 8, -(-(first + numel) // 8), device=device)
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
    """(high, low) words of a·b, of 32-bit words in int64."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


# ---- residuals

RESIDUAL_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load_residual(residual: torch.Tensor, format: str) -> torch.Tensor:
    """fp32 [numel] of a residual, uint8 [_C.residual_nbytes(format, numel)]."""
    return residual.view(RESIDUAL_DTYPES[format]).float()


def store_residual(residual: torch.Tensor, values: torch.Tensor, begin: int, format: str) -> None:
    """Writes `values` (fp32), zeros for what is not finite, to a residual, from element `begin` on."""
    values = torch.where(values.isfinite(), values, 0.0)
    stored = round_to(values, RESIDUAL_DTYPES[format])
    residual.view(RESIDUAL_DTYPES[format])[begin : begin + values.numel()] = stored


# ---- rotation


def rotate(y: torch.Tensor) -> torch.Tensor:
    """Each run of 32 elements of `y` (fp32, [32·n]), signs changed, multiplied by the Hadamard matrix of order 32.

    It spreads an outlier over its run, so that it costs the other elements of its block less. Order and pairs of the
    additions as in the fast Walsh-Hadamard transform, for h = 1, 2, 4, 8, 16: (a, b) ← (a + b, a − b).
    """
    return _butterfly(y.view(-1, _C.ROTATION_NUMEL) * _signs(y)).view(-1)


def unrotate(y: torch.Tensor) -> torch.Tensor:
    """The inverse of `rotate`, but for rounding: signs · 2^-5 · (H·y)."""
    return (_butterfly(y.view(-1, _C.ROTATION_NUMEL)) * (_signs(y) / _C.ROTATION_NUMEL)).view(-1)


def _signs(like: torch.Tensor) -> torch.Tensor:
    """Signs change before a rotation, since a constant run, which is common, would end up in one element else."""
    bits = [_C.ROTATION_SIGNS >> i & 1 for i in range(_C.ROTATION_NUMEL)]
    return torch.tensor([-1.0 if bit else 1.0 for bit in bits], device=like.device)


def _butterfly(runs: torch.Tensor) -> torch.Tensor:
    h = 1
    while h < _C.ROTATION_NUMEL:
        pairs = runs.view(-1, _C.ROTATION_NUMEL // (2 * h), 2, h)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        runs = torch.stack([a + b, a - b], dim=2).view(-1, _C.ROTATION_NUMEL)
        h *= 2
    return runs


# ---- parts and chunks


@dataclasses.dataclass
class Feedback:
    """A residual and its format; `pack` and `reduce` read and overwrite it."""

    format: str
    residual: torch.Tensor
    """uint8, for the elements that the whole stream has on this rank: for pack [layout.padded_numel] elements, for
    reduce those of the parts that it encodes, chunk by chunk."""


def pack(
    layout: "_C.BucketLayout",
    chunk: int,
    lossy_flat: torch.Tensor,
    exact_flat: torch.Tensor,
    scale: float,
    key: NoiseKey | None = None,
    feedback: Feedback | None = None,
) -> torch.Tensor:
    """One chunk's bytes in this layout: uint8 [num_parts · part.nbytes].

    `lossy_flat` [layout.lossy_numel] and `exact_flat` [layout.exact_numel] are the bucket's streams, in fp32, bf16 or
    fp16. With `key`, rounded stochastically. Raises ValueError if the streams have other lengths.
    """
    _check_streams(layout, lossy_flat, exact_flat)
    lossy_numel = layout.part.lossy_numel
    begin = chunk * layout.num_parts * lossy_numel
    lossy = torch.cat(
        [_padded(lossy_flat, layout.lossy_range(chunk, p), lossy_numel, scale) for p in range(layout.num_parts)]
    )
    codes, scales = _encode_stream(layout, lossy, begin, begin, key, feedback, rotated=layout.rotated)
    exacts = [
        _padded(exact_flat, layout.exact_range(chunk, p), layout.part.exact_numel, scale)
        for p in range(layout.num_parts)
    ]
    pieces = zip(_pieces(codes, layout.num_parts), _pieces(scales, layout.num_parts), exacts, strict=True)
    return torch.cat([part_bytes(layout, *sections) for sections in pieces])


def reduce(
    layout: "_C.BucketLayout",
    parts: torch.Tensor,
    scale: float,
    key: NoiseKey | None = None,
    feedback: Feedback | None = None,
    chunk: int = 0,
    first_part: int = 0,
    to: "_C.BucketLayout | None" = None,
    num_parts: int = 1,
) -> torch.Tensor:
    """`num_parts` parts' bytes in the layout `to`, uint8 [num_parts · to.part.nbytes]: the scaled sum of `parts`.

    `parts`, uint8 [layout.num_parts · layout.part.nbytes], holds every rank's encoding of the same part, in rank order,
    which is the order of summation. `to` is None for the same layout, else one that has the same elements in
    `num_parts` times as many parts. `chunk` and `first_part`, the number of the first part written, matter with `key`
    and `feedback` only.
    """
    to = layout if to is None else to
    lossy_sum, exact_sum = None, None
    for part in parts.view(layout.num_parts, layout.part.nbytes):
        lossy, exact = _part_values(layout, part)
        lossy_sum = lossy if lossy_sum is None else lossy_sum + lossy
        exact_sum = exact if exact_sum is None else exact_sum + exact
    numel = to.part.lossy_numel * num_parts
    first = (chunk * to.num_parts + first_part) * to.part.lossy_numel
    codes, scales = _encode_stream(
        to,
        scaled(lossy_sum, scale),
        chunk * numel,
        first,
        key,
        feedback,
        rotated=to.rotated and not layout.rotated,  # what has been rotated stays so, and what it leaves out, too
    )
    exacts = scaled(exact_sum, scale).view(num_parts, -1)
    pieces = zip(_pieces(codes, num_parts), _pieces(scales, num_parts), exacts, strict=True)
    return torch.cat([part_bytes(to, *sections) for sections in pieces])


def _encode_stream(
    layout: "_C.BucketLayout",
    y: torch.Tensor,
    begin: int,
    first: int,
    key: NoiseKey | None,
    feedback: Feedback | None,
    rotated: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of `y`: elements of the stream from `first` on, of the residual from `begin` on."""
    end = begin + y.numel()
    if feedback is not None:
        residual = load_residual(feedback.residual, feedback.format)
        y = y + residual[begin:end]
    u = None if key is None else noise(key, first, y.numel(), y.device)
    codes, scales = encode(rotate(y) if rotated else y, layout.wire, layout.block_numel, u)
    if feedback is not None:
        decoded = decode(codes, scales, layout.wire, layout.block_numel)
        left_out = y - (unrotate(decoded) if rotated else decoded)
        store_residual(feedback.residual, left_out, begin, feedback.format)
    return codes, scales


def unpack(
    layout: "_C.BucketLayout",
    chunk: int,
    parts: torch.Tensor,
    scale: float,
    dtype: torch.dtype,
    num_messages: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The values that a chunk's `parts`, uint8 [num_messages · layout.chunk_nbytes], hold for its two streams: of
    several messages their fp32 sum, in their order.

    Returns (lossy, exact) in `dtype`: the elements from lossy_range(chunk, 0)'s begin to the end of the last part's
    range, likewise for the exact stream.
    """
    messages = []
    for message in parts.view(num_messages, layout.num_parts, layout.part.nbytes):
        lossy_values, exact_values = [], []
        for index, part in enumerate(message):
            lossy, exact = _part_values(layout, part)
            lossy = unrotate(lossy) if layout.rotated else lossy
            lossy_values.append(lossy[: _numel(layout.lossy_range(chunk, index))])
            exact_values.append(exact[: _numel(layout.exact_range(chunk, index))])
        messages.append((torch.cat(lossy_values), torch.cat(exact_values)))
    lossy, exact = (_in_order(list(values)) for values in zip(*messages, strict=True))
    return round_to(scaled(lossy, scale), dtype), round_to(scaled(exact, scale), dtype)


def _check_streams(layout: "_C.BucketLayout", lossy_flat: torch.Tensor, exact_flat: torch.Tensor) -> None:
    for name, flat, numel in (("lossy", lossy_flat, layout.lossy_numel), ("exact", exact_flat, layout.exact_numel)):
        if tuple(flat.shape) != (numel,):
            raise ValueError(f"the {name} stream must have shape ({numel},) for this layout, not {tuple(flat.shape)}")


def _numel(bounds: tuple[int, int]) -> int:
    return bounds[1] - bounds[0]


def _padded(flat: torch.Tensor, bounds: tuple[int, int], numel: int, scale: float) -> torch.Tensor:
    """fp32 [numel]: the scaled elements within `bounds`, then zeros."""
    begin, end = bounds
    return torch.nn.functional.pad(scaled(flat[begin:end], scale), (0, numel - (end - begin)))


def _pieces(section: torch.Tensor, num_parts: int) -> torch.Tensor:
    """[num_parts, …]: what each part has of a section of all of them."""
    return section.view(num_parts, -1) if section.numel() else section.view(1, 0).expand(num_parts, 0)


def part_bytes(
    layout: "_C.BucketLayout", codes: torch.Tensor, scales: torch.Tensor, exact: torch.Tensor
) -> torch.Tensor:
    """uint8 [layout.part.nbytes] of one part's sections; padding is zeros."""
    part = layout.part
    out = torch.zeros(part.nbytes, dtype=torch.uint8, device=exact.device)
    for offset, section in ((0, canonical(exact)), (part.scale_offset, scales), (part.code_offset, codes)):
        section_bytes = section.view(torch.uint8)
        out[offset : offset + section_bytes.numel()] = section_bytes
    return out


def _part_values(layout: "_C.BucketLayout", part_bytes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(lossy, exact) of one part as fp32, padding elements included."""
    part, dtype = layout.part, WIRE_DTYPES[layout.wire]
    exact = part_bytes[: part.exact_numel * 4].view(torch.float32)
    num_scales = -(-part.lossy_numel // layout.block_numel) if layout.wire in GREATEST_CODE else 0
    scale_dtype = torch.bfloat16 if layout.wire == "int4" else torch.float32
    scale_end = part.scale_offset + num_scales * scale_dtype.itemsize
    scales = part_bytes[part.scale_offset : scale_end].view(scale_dtype)
    code_nbytes = part.lossy_numel // 2 if layout.wire == "int4" else part.lossy_numel * dtype.itemsize
    code_end = part.code_offset + code_nbytes
    codes = part_bytes[part.code_offset : code_end].view(dtype)
    return decode(codes, scales, layout.wire, layout.block_numel), exact


# ---- all ranks


def all_reduce_mean(
    grads: list[torch.Tensor],
    wire: str,
    sum: str = "two-shot",
    block: int = _C.DEFAULT_BLOCK_NUMEL,
    predivide: float = 1.0,
    exempt_mask: torch.Tensor | None = None,
    rotated: bool = False,
    ranks_per_host: int = 1,
    local_wire: str = "bf16",
) -> torch.Tensor:
    """What every rank ends with after a two-shot or a one-shot sum, bit for bit: [numel] in the gradients' dtype.

    `grads` has one flat tensor [numel] (fp32, bf16 or fp16) for each rank, in rank order. Elements where `exempt_mask`
    (bool [numel]) is True travel in fp32. Neither the cut into chunks nor into parts appears here: the result does not
    depend on them. With several `ranks_per_host`, each host's consecutive ranks are summed first, in `local_wire`,
    and then the hosts' sums, in `wire`. Raises ValueError for other sums, whose order of addition is the transport's,
    and for a one-shot sum on two levels.
    """
    if sum not in ("two-shot", "one-shot"):
        raise ValueError(
            f"sum='{sum}' has no reference: the transport chooses its order of addition; use 'two-shot' or 'one-shot'"
        )
    if sum == "one-shot" and ranks_per_host > 1:
        raise ValueError(f"sum='one-shot' has one level: use sum='two-shot' with ranks_per_host={ranks_per_host}")
    if wire not in WIRE_DTYPES:
        raise ValueError(f"wire='{wire}' is not possible: use one of {', '.join(WIRE_DTYPES)}")
    exempt = torch.zeros_like(grads[0], dtype=torch.bool) if exempt_mask is None else exempt_mask
    result = torch.empty_like(grads[0])
    for mask, wire_of_stream in ((~exempt, wire), (exempt, "fp32")):
        is_rotated = rotated and wire_of_stream == wire
        numel = int(mask.sum())
        values = [
            torch.nn.functional.pad(scaled(grad[mask], 1 / predivide), (0, -numel % _C.ROTATION_NUMEL))
            for grad in grads
        ]
        if ranks_per_host > 1:
            local = local_wire if wire_of_stream == wire else "fp32"
            values = [_through_wire(y, local, block) for y in values]
            values = [
                scaled(_in_order(values[first : first + ranks_per_host]), 1.0)
                for first in range(0, len(values), ranks_per_host)
            ]
        decoded = [_through_wire(rotate(y) if is_rotated else y, wire_of_stream, block) for y in values]
        if sum == "one-shot":
            mean = scaled(_in_order([unrotate(y) if is_rotated else y for y in decoded]), predivide / len(grads))
        else:
            mean = _through_wire(scaled(_in_order(decoded), predivide / len(grads)), wire_of_stream, block)
            mean = unrotate(mean) if is_rotated else mean
        result[mask] = round_to(scaled(mean[:numel], 1.0), result.dtype)
    return result


def _in_order(values: list[torch.Tensor]) -> torch.Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def _through_wire(y: torch.Tensor, wire: str, block: int) -> torch.Tensor:
    return decode(*encode(y, wire, block), wire, block)
