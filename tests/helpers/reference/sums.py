"""The mean that every rank ends with."""

import torch

from fusedcomm.native import _C
from reference.elements import WIRE_DTYPES, decode, encode, round_to, scaled
from reference.stages import in_order


def all_reduce_mean(
    grads: list[torch.Tensor],
    wire: str,
    sum: str = "two-shot",
    block: int = 128,
    exempt_mask: torch.Tensor | None = None,
    ranks_per_host: int = 1,
    local_wire: str = "bf16",
) -> torch.Tensor:
    """The mean on every rank after a two-shot or one-shot sum, bit for bit: [numel] in the gradients' dtype.

    `grads` has one flat tensor [numel] (fp32, bf16 or fp16) for each rank, in rank order. Elements where `exempt_mask`
    (bool [numel]) is True are sent in fp32. The result depends neither on chunks nor on parts, so they do not appear
    here. If `ranks_per_host` exceeds 1, the consecutive ranks of each host are summed first, in `local_wire`, and then
    the sums of the hosts, in `wire`. With sum="reduce-scatter" it is what one rank ends with, of all ranks' rows for it
    in `grads`.

    Raises ValueError for an unknown `wire`, for other sums, where the transport chooses the order of addition, and for
    a one-shot sum on two levels.
    """
    if sum not in ("two-shot", "one-shot", "reduce-scatter"):
        raise ValueError(
            f"sum='{sum}' has no reference: the transport chooses its order of addition; use 'two-shot' or 'one-shot'"
        )
    if sum == "one-shot" and ranks_per_host > 1:
        raise ValueError(f"sum='one-shot' has one level: use sum='two-shot' with ranks_per_host={ranks_per_host}")
    if wire not in WIRE_DTYPES:
        raise ValueError(f"wire='{wire}' is not possible: use one of {', '.join(WIRE_DTYPES)}")
    exempt = torch.zeros_like(grads[0], dtype=torch.bool) if exempt_mask is None else exempt_mask
    result = torch.empty_like(grads[0])
    for mask, elements_wire in ((~exempt, wire), (exempt, "fp32")):
        # Rows have the same holes whatever their dtype is.
        places = slice_list(mask, 2 if sum == "reduce-scatter" else grads[0].element_size())
        numel = len(places)
        values = [torch.nn.functional.pad(scaled(taken(grad, places), 1.0), (0, -numel % block)) for grad in grads]
        if ranks_per_host > 1:
            local = local_wire if elements_wire == wire else "fp32"
            values = [_through_wire(y, local, block) for y in values]
            values = [
                scaled(in_order(values[first : first + ranks_per_host]), 1.0)
                for first in range(0, len(values), ranks_per_host)
            ]
        decoded = [_through_wire(y, elements_wire, block) for y in values]
        if sum != "two-shot":
            mean = scaled(in_order(decoded), 1 / len(grads))
        else:
            mean = _through_wire(scaled(in_order(decoded), 1 / len(grads)), elements_wire, block)
        result[places[places >= 0]] = round_to(scaled(mean[:numel][places >= 0], 1.0), result.dtype)
    return result


def slice_list(mask: torch.Tensor, element_size: int) -> torch.Tensor:
    """The slice list of the elements where `mask` (bool [numel], of a bucket in one run) is True: int64, of each
    element of the list its index in the bucket, or -1 in a hole. element_size: bytes of an element of the gradients.

    A slice that does not follow the one before it in memory begins in a new vector of 16 bytes, at the place in it
    that it has in memory.
    """
    vector = _C.ALIGN_NBYTES // element_size
    places: list[int] = []
    end = 0
    for index in mask.nonzero().view(-1).tolist():
        if index != end:
            places += [-1] * (-len(places) % vector + index % vector)
        places.append(index)
        end = index + 1
    return torch.tensor(places, dtype=torch.int64)


def taken(flat: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The elements of a slice list, zeros in its holes: [len(places)] in the dtype of `flat`."""
    return torch.where(places < 0, 0, flat[places.clamp(min=0)]).to(flat.dtype)


def _through_wire(y: torch.Tensor, wire: str, block: int) -> torch.Tensor:
    """`y` (fp32 [numel]) encoded and decoded again."""
    return decode(*encode(y, wire, block), wire, block)
