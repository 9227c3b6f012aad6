"""pack, reduce and unpack: gradients → a chunk's message → the message of the mean → gradients."""

import torch

from fusedcomm.native import _C
from reference.elements import (
    GREATEST_CODE,
    WIRE_DTYPES,
    canonical,
    codes_nbytes,
    decode,
    encode,
    round_to,
    scale_dtype,
    scaled,
)


def pack(
    layout: "_C.BucketLayout",
    chunk: int,
    lossy_flat: torch.Tensor,
    exact_flat: torch.Tensor,
    scale: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The bytes of one chunk in this layout: uint8 [layout.num_parts · layout.part.nbytes].

    `lossy_flat` [layout.lossy_numel] and `exact_flat` [layout.exact_numel] are the bucket's elements, in fp32, bf16 or
    fp16. `scale` is the factor for every element. residual: with error feedback, fp32 [layout.padded_numel], read and
    overwritten. Raises ValueError if they have other lengths.
    """
    _check_numels(layout, lossy_flat, exact_flat)
    lossy_numel = layout.part.lossy_numel
    lossy = torch.cat(
        [_padded(lossy_flat, layout.lossy_range(chunk, p), lossy_numel, scale) for p in range(layout.num_parts)]
    )
    begin = chunk * layout.num_parts * lossy_numel
    codes, scales = _encode(layout, lossy, begin, residual)
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
    residual: torch.Tensor | None = None,
    chunk: int = 0,
    to: "_C.BucketLayout | None" = None,
    num_parts: int = 1,
) -> torch.Tensor:
    """The scaled sum of `parts`, encoded as `num_parts` parts of the layout `to`: uint8 [num_parts · to.part.nbytes].

    `parts`, uint8 [layout.num_parts · layout.part.nbytes], holds every rank's encoding of the same part, in rank order,
    which is the order of summation. `to` None means `layout`. A part of `layout` must have as many elements as
    `num_parts` parts of `to`. residual: with error feedback, which alone uses `chunk`,
    fp32 [elements of the parts that the rank encodes, chunk after chunk].
    """
    to = layout if to is None else to
    lossy_sum, exact_sum = None, None
    for part in parts.view(layout.num_parts, layout.part.nbytes):
        lossy, exact = _part_values(layout, part)
        lossy_sum = lossy if lossy_sum is None else lossy_sum + lossy
        exact_sum = exact if exact_sum is None else exact_sum + exact
    numel = to.part.lossy_numel * num_parts
    codes, scales = _encode(
        to,
        scaled(lossy_sum, scale),
        chunk * numel,
        residual,
    )
    exacts = scaled(exact_sum, scale).view(num_parts, -1)
    pieces = zip(_pieces(codes, num_parts), _pieces(scales, num_parts), exacts, strict=True)
    return torch.cat([part_bytes(to, *sections) for sections in pieces])


def _encode(
    layout: "_C.BucketLayout",
    y: torch.Tensor,
    begin: int,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of `y`, whose residual starts at element `begin`."""
    end = begin + y.numel()
    if residual is not None:
        y = y + residual[begin:end]
    codes, scales = encode(y, layout.wire, layout.block_numel)
    if residual is not None:
        left_out = y - decode(codes, scales, layout.wire, layout.block_numel)
        residual[begin:end] = torch.where(left_out.isfinite(), left_out, 0.0)
    return codes, scales


def unpack(
    layout: "_C.BucketLayout",
    chunk: int,
    parts: torch.Tensor,
    scale: float,
    dtype: torch.dtype,
    num_messages: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of one chunk, times `scale`, rounded to `dtype`.

    `parts`, uint8 [num_messages · layout.chunk_nbytes], holds one message after the other. Several messages are summed
    in fp32, in their order. Returns (lossy, exact) in `dtype`. `lossy` has the elements from the start of
    lossy_range(chunk, 0) to the end of the last part's range; `exact` has those of exact_range.
    """
    messages = []
    for message in parts.view(num_messages, layout.num_parts, layout.part.nbytes):
        lossy_values, exact_values = [], []
        for index, part in enumerate(message):
            lossy, exact = _part_values(layout, part)
            lossy_values.append(lossy[: _numel(layout.lossy_range(chunk, index))])
            exact_values.append(exact[: _numel(layout.exact_range(chunk, index))])
        messages.append((torch.cat(lossy_values), torch.cat(exact_values)))
    lossy, exact = (in_order(list(values)) for values in zip(*messages, strict=True))
    return round_to(scaled(lossy, scale), dtype), round_to(scaled(exact, scale), dtype)


def _check_numels(layout: "_C.BucketLayout", lossy_flat: torch.Tensor, exact_flat: torch.Tensor) -> None:
    for name, flat, numel in (("lossy", lossy_flat, layout.lossy_numel), ("exact", exact_flat, layout.exact_numel)):
        if tuple(flat.shape) != (numel,):
            raise ValueError(f"the {name} elements must have shape ({numel},) for this layout, not {tuple(flat.shape)}")


def _numel(bounds: tuple[int, int]) -> int:
    return bounds[1] - bounds[0]


def _padded(flat: torch.Tensor, bounds: tuple[int, int], numel: int, scale: float) -> torch.Tensor:
    """fp32 [numel]: the scaled elements within `bounds`, then zeros."""
    begin, end = bounds
    return torch.nn.functional.pad(scaled(flat[begin:end], scale), (0, numel - (end - begin)))


def _pieces(section: torch.Tensor, num_parts: int) -> torch.Tensor:
    """[num_parts, …]: the section of all parts, split by part."""
    return section.view(num_parts, -1) if section.numel() else section.view(1, 0).expand(num_parts, 0)


def part_bytes(
    layout: "_C.BucketLayout", codes: torch.Tensor, scales: torch.Tensor, exact: torch.Tensor
) -> torch.Tensor:
    """uint8 [layout.part.nbytes]: the bytes of a part with these sections. Padding is zeros."""
    part = layout.part
    out = torch.zeros(part.nbytes, dtype=torch.uint8, device=exact.device)
    for offset, section in ((0, canonical(exact)), (part.scale_offset, scales), (part.code_offset, codes)):
        section_bytes = section.view(torch.uint8)
        out[offset : offset + section_bytes.numel()] = section_bytes
    return out


def _part_values(layout: "_C.BucketLayout", part_bytes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(lossy, exact): the values of one part in fp32, padding elements included."""
    part, dtype = layout.part, WIRE_DTYPES[layout.wire]
    exact = part_bytes[: part.exact_numel * 4].view(torch.float32)
    num_scales = -(-part.lossy_numel // layout.block_numel) if layout.wire in GREATEST_CODE else 0
    scale_end = part.scale_offset + num_scales * scale_dtype(layout.wire).itemsize
    scales = part_bytes[part.scale_offset : scale_end].view(scale_dtype(layout.wire))
    code_end = part.code_offset + codes_nbytes(layout.wire, part.lossy_numel)
    codes = part_bytes[part.code_offset : code_end].view(dtype)
    return decode(codes, scales, layout.wire, layout.block_numel), exact


def in_order(values: list[torch.Tensor]) -> torch.Tensor:
    """((value 0 + value 1) + value 2) …, of at least one value."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total
