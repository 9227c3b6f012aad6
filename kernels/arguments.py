"""Tuples of kernel parameters that belong together.

The engine passes the fields of a tuple one after the other. The structs in csrc/devices/kernel_launch.h have the same
fields in the same order.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from fusedcomm.native import _C

    from .bucket import SliceList


class Slices(NamedTuple):
    """A slice list in tables on the device; see csrc/devices/slice_table.h."""

    starts: torch.Tensor  # int64 [num_slices + 1]: each slice's first element in the list, then numel
    offsets: torch.Tensor  # int64 [num_slices]: elements from the bucket's origin to each slice
    first: torch.Tensor  # int32 [tiles of the bucket]: the slice that holds the tile's first element
    num_slices: int
    numel: int  # int64


class CountedSlices(NamedTuple):
    """Slices for pack, which also counts elements that are not finite."""

    starts: torch.Tensor
    offsets: torch.Tensor
    first: torch.Tensor
    counts: torch.Tensor  # int64 [num_slices]: pack adds the number of each slice's elements that are not finite
    num_slices: int
    numel: int


class Runs(NamedTuple):
    """Slices that follow each other in memory without a gap."""

    starts: torch.Tensor  # as in CountedSlices
    counts: torch.Tensor  # as in CountedSlices
    num_slices: int


class Sections(NamedTuple):
    """The sections of a message's first part; sections.py gives their types."""

    exact: torch.Tensor
    scales: torch.Tensor
    codes: torch.Tensor


class PartShape(NamedTuple):
    """The shape of a message's parts. Every field is int64."""

    stride: int  # bytes from one part of the message to the next
    numel: int  # lossy elements of a part
    exact_numel: int  # exact elements of a part


class Noise(NamedTuple):
    """A noise key; fusedcomm/reference/noise.py gives its fields. Each is unsigned there and is passed as the signed
    integer with the same bits."""

    seed: int  # int64
    parameter: int  # int32
    step: int  # int32
    source: int  # int32


def slices_of(slices: "SliceList") -> Slices:
    return Slices(slices.starts, slices.offsets, slices.first, slices.num_slices, slices.numel)


def counted_slices_of(slices: "SliceList") -> CountedSlices:
    return CountedSlices(slices.starts, slices.offsets, slices.first, slices.counts, slices.num_slices, slices.numel)


def shape_of(layout: "_C.BucketLayout") -> PartShape:
    return PartShape(layout.part_stride, layout.part.lossy_numel, layout.part.exact_numel)
