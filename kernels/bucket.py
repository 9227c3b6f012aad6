"""A bucket as the kernels take it: its layout, its gradients, and device tables that say where each slice lies."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusedcomm.native import _C

from .arguments import CountedSlices, Slices
from .variants import tile_of


@dataclass(frozen=True)
class Bucket:
    """Made by make_bucket()."""

    layout: "_C.BucketLayout"
    grads: torch.Tensor  # [any], fp32, bf16 or fp16, 16-byte aligned; its first element is the bucket's origin
    lossy: CountedSlices  # tables on the gradients' device
    exact: CountedSlices
    in_one_run: bool  # no exact elements, and the lossy ones lie from the origin on in order
    tile: int  # elements of a tile, for which the tables are made


def make_bucket(
    layout: "_C.BucketLayout",
    grads: torch.Tensor,
    lossy_slices: Sequence[tuple[int, int]],
    exact_slices: Sequence[tuple[int, int]],
    tile: int | None = None,
) -> Bucket:
    """Makes a bucket, with its tables on the device of `grads`.

    Args:
        grads: 1-D, contiguous, fp32, bf16 or fp16; starts at a multiple of 16 bytes.
        lossy_slices: (offset from grads[0], numel) of each lossy slice, in elements; for a hole the offset is
            _C.HOLE; see _C.with_holes.
        exact_slices: the same for the exact slices.
        tile: elements of a tile: a power of two, at least 64 and at least the layout's block. None: the engine's.

    Raises:
        ValueError: an argument is not as described, the slices do not hold the layout's elements, or a slice does not
            lie within `grads`.
    """
    if grads.dim() != 1 or grads.dtype not in _C.GRAD_DTYPES or not grads.is_contiguous():
        raise ValueError(f"grads must be 1-D, contiguous, fp32, bf16 or fp16, not {grads.dtype} {list(grads.shape)}")
    if grads.data_ptr() % _C.ALIGN_NBYTES:
        raise ValueError(f"grads must start at a multiple of {_C.ALIGN_NBYTES} bytes")
    tile = tile or tile_of(layout.wire, layout.block_numel)
    if tile & (tile - 1) or tile < max(64, layout.block_numel):
        raise ValueError(f"tile={tile} is not possible: use a power of two from {max(64, layout.block_numel)}")
    for offset, numel in (*lossy_slices, *exact_slices):
        if offset != _C.HOLE and (offset < 0 or numel < 0 or offset + numel > grads.numel()):
            raise ValueError(
                f"the slice ({offset}, {numel}), an offset and a numel, does not lie within the {grads.numel()} "
                "elements of grads"
            )
    lossy, exact = (
        _C.slice_table(layout, is_exact, list(slices), tile, grads.element_size())
        for is_exact, slices in ((False, lossy_slices), (True, exact_slices))
    )
    deltas = lossy[Slices._fields.index("deltas")]
    in_one_run = layout.exact_numel == 0 and deltas.tolist() == [0]
    return Bucket(layout, grads, _on(grads.device, lossy), _on(grads.device, exact), in_one_run, tile)


def _on(device: torch.device, tables: list[torch.Tensor]) -> CountedSlices:
    num_slices = len(tables[-1]) - 1
    counts = torch.zeros(num_slices, dtype=torch.int64, device=device)
    offset, run, first, vectors, starts, ends, deltas, slice_starts = (table.to(device) for table in tables)
    return CountedSlices(offset, run, first, vectors, starts, ends, deltas, slice_starts, counts, num_slices)
