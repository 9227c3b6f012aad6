"""A bucket as the kernels take it: its layout, its gradients, and device tables that say where each slice lies."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusedcomm.native import _C

from .variants import TILE


@dataclass(frozen=True)
class SliceList:
    """Slices laid end to end, in tables on the gradients' device (csrc/devices/slice_table.h)."""

    starts: torch.Tensor  # int64 [num_slices + 1]: each slice's first element in the list, then numel
    offsets: torch.Tensor  # int64 [num_slices]: elements from the bucket's origin to each slice
    first: torch.Tensor  # int32 [tiles of the bucket]: the slice that holds the tile's first element
    counts: torch.Tensor  # int64 [num_slices]: pack and scale add the number of each slice's non-finite elements
    numel: int
    num_slices: int


@dataclass(frozen=True)
class Bucket:
    """Made by make_bucket()."""

    layout: "_C.BucketLayout"
    grads: torch.Tensor  # [any], fp32, bf16 or fp16, 16-byte aligned; its first element is the bucket's origin
    lossy: SliceList
    exact: SliceList
    flat: bool  # the lossy elements are grads[:numel] in order, and there are no exact ones
    tile: int  # elements of a tile, for which the tables `first` are made


def make_bucket(
    layout: "_C.BucketLayout",
    grads: torch.Tensor,
    lossy_slices: Sequence[tuple[int, int]],
    exact_slices: Sequence[tuple[int, int]],
    tile: int = TILE,
) -> Bucket:
    """Makes a bucket, with its tables on the device of `grads`.

    Args:
        grads: 1-D, contiguous, fp32, bf16 or fp16; starts at a multiple of 16 bytes.
        lossy_slices: (offset from grads[0], numel) of each lossy slice, in elements.
        exact_slices: the same for the exact slices.
        tile: elements of a tile: a power of two, at least 64 and at least the layout's block.

    Raises:
        ValueError: an argument is not as described, the slices do not hold the layout's elements, or a slice does not
            lie within `grads`.
    """
    if grads.dim() != 1 or grads.dtype not in _C.GRAD_DTYPES or not grads.is_contiguous():
        raise ValueError(f"grads must be 1-D, contiguous, fp32, bf16 or fp16, not {grads.dtype} {list(grads.shape)}")
    if grads.data_ptr() % _C.ALIGN_NBYTES:
        raise ValueError(f"grads must start at a multiple of {_C.ALIGN_NBYTES} bytes")
    if tile & (tile - 1) or tile < max(64, layout.block_numel):
        raise ValueError(f"tile={tile} is not possible: use a power of two from {max(64, layout.block_numel)}")
    for offset, numel in (*lossy_slices, *exact_slices):
        if offset < 0 or numel < 0 or offset + numel > grads.numel():
            raise ValueError(
                f"the slice ({offset}, {numel}), an offset and a numel, does not lie within the {grads.numel()} "
                "elements of grads"
            )
    return Bucket(
        layout=layout,
        grads=grads,
        lossy=_make_list(layout, False, lossy_slices, tile, grads.device),
        exact=_make_list(layout, True, exact_slices, tile, grads.device),
        flat=layout.exact_numel == 0 and _is_one_run(lossy_slices),
        tile=tile,
    )


def _make_list(
    layout: "_C.BucketLayout", exact: bool, slices: Sequence[tuple[int, int]], tile: int, device: torch.device
) -> SliceList:
    starts, offsets, first = (table.to(device) for table in _C.slice_table(layout, exact, list(slices), tile))
    counts = torch.zeros(len(slices), dtype=torch.int64, device=device)
    numel = layout.exact_numel if exact else layout.lossy_numel
    return SliceList(starts, offsets, first, counts, numel, len(slices))


def _is_one_run(slices: Sequence[tuple[int, int]]) -> bool:
    end = 0
    for offset, numel in slices:
        if numel and offset != end:
            return False
        end += numel
    return True
