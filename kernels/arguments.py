"""The kernels' parameters that belong together, as tuples.

The engine passes their fields one after the other: each has a struct of the same fields, in the same order, in
csrc/devices/kernel_launch.h.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from fusedcomm.native import _C

    from .bucket import Stream


class Slices(NamedTuple):
    """A stream's slices in tables on the device; see csrc/devices/slice_table.h."""

    starts: torch.Tensor  # int64 [num_slices + 1], stream elements; the last is numel
    offsets: torch.Tensor  # int64 [num_slices], elements from the bucket's origin
    first: torch.Tensor  # int32 [tiles of the bucket]: the slice that holds the tile's first element
    num_slices: int
    numel: int  # int64


class CountedSlices(NamedTuple):
    """The same for pack, which counts."""

    starts: torch.Tensor
    offsets: torch.Tensor
    first: torch.Tensor
    counts: torch.Tensor  # int64 [num_slices]: each slice's elements that are not finite are added
    num_slices: int
    numel: int


class Runs(NamedTuple):
    """Slices that follow each other in memory without a gap."""

    starts: torch.Tensor
    counts: torch.Tensor
    num_slices: int


class Sections(NamedTuple):
    """Where the sections of a message's first part begin; see sections.py for their types."""

    exact: torch.Tensor
    scales: torch.Tensor
    codes: torch.Tensor


class PartShape(NamedTuple):
    """int64, all of them."""

    stride: int  # bytes from one part of the message to the next
    numel: int  # lossy elements
    exact_numel: int


class Noise(NamedTuple):
    """Unsigned words, as signed ones of the same bits; see fusedcomm/reference."""

    seed: int  # int64
    parameter: int
    step: int
    source: int


def slices_of(stream: "Stream") -> Slices:
    return Slices(stream.starts, stream.offsets, stream.first, stream.num_slices, stream.numel)


def counted_slices_of(stream: "Stream") -> CountedSlices:
    return CountedSlices(stream.starts, stream.offsets, stream.first, stream.counts, stream.num_slices, stream.numel)


def shape_of(layout: "_C.BucketLayout") -> PartShape:
    return PartShape(layout.part_stride, layout.part.lossy_numel, layout.part.exact_numel)
