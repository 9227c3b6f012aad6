"""A bucket as the kernels see it: the layout, one origin in memory, and tables on the device of what lies where."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusedcomm.native import _C

from .variants import TILE


@dataclass(frozen=True)
class Stream:
    """Slices laid end to end, in tables on the gradients' device (csrc/devices/slice_table.h)."""

    starts: torch.Tensor  # int64 [num_slices + 1], stream elements; the last is numel
    offsets: torch.Tensor  # int64 [num_slices], elements from the bucket's origin
    first: torch.Tensor  # int32 [tiles of the bucket]: the slice that holds the tile's first element
    counts: torch.Tensor  # int64 [num_slices]: pack and scale add their non-finite elements to it
    numel: int
    num_slices: int


@dataclass(frozen=True)
class Bucket:
    layout: "_C.BucketLayout"
    grads: torch.Tensor  # [any], fp32, bf16 or fp16, 16-byte aligned; its first element is the origin
    lossy: Stream
    exact: Stream
    flat: bool  # the lossy stream is grads[:numel] in order and there is no exact stream
    tile: int  # elements; what `first` was made for


def make_bucket(
    layout: "_C.BucketLayout",
    grads: torch.Tensor,
    lossy_slices: Sequence[tuple[int, int]],
    exact_slices: Sequence[tuple[int, int]],
    tile: int = TILE,
) -> Bucket:
    """Tables for `grads`, 1-D, whose slices are (offset from grads[0], numel), both in elements.

    `tile`: a power of two ≥ the block, and ≥ 64. ValueError if the slices do not hold the layout's elements or do not
    lie within `grads`, or if `grads` has another dtype, is strided, or does not start at a multiple of 16 bytes.
    """
    if grads.dim() != 1 or grads.dtype not in _C.GRAD_DTYPES or not grads.is_contiguous():
        raise ValueError(f"grads must be 1-D, contiguous, fp32, bf16 or fp16, not {grads.dtype} {list(grads.shape)}")
    if grads.data_ptr() % _C.ALIGN_NBYTES:
        raise ValueError(f"grads must start at a multiple of {_C.ALIGN_NBYTES} bytes")
    if tile & (tile - 1) or tile < max(64, layout.block_numel):
        raise ValueError(f"tile={tile} is not possible: use a power of two from {max(64, layout.block_numel)}")
    for offset, numel in (*lossy_slices, *exact_slices):
        if offset < 0 or numel < 0 or offset + numel > grads.numel():
            raise ValueError(f"the slice ({offset}, {numel}) does not lie within {grads.numel()} elements")
    return Bucket(
        layout=layout,
        grads=grads,
        lossy=_make_stream(layout, False, lossy_slices, tile, grads.device),
        exact=_make_stream(layout, True, exact_slices, tile, grads.device),
        flat=layout.exact_numel == 0 and _is_one_run(lossy_slices),
        tile=tile,
    )


def _make_stream(
    layout: "_C.BucketLayout", exact: bool, slices: Sequence[tuple[int, int]], tile: int, device: torch.device
) -> Stream:
    starts, offsets, first = (table.to(device) for table in _C.stream_table(layout, exact, list(slices), tile))
    counts = torch.zeros(len(slices), dtype=torch.int64, device=device)
    numel = layout.exact_numel if exact else layout.lossy_numel
    return Stream(starts, offsets, first, counts, numel, len(slices))


def _is_one_run(slices: Sequence[tuple[int, int]]) -> bool:
    end = 0
    for offset, numel in slices:
        if numel and offset != end:
            return False
        end += numel
    return True
