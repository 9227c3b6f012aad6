"""Tuples of kernel parameters that belong together.

The engine passes the fields of a tuple one after the other. The structs in csrc/devices/kernel_launch.h have the same
fields in the same order.
"""

from typing import NamedTuple

import torch


class Slices(NamedTuple):
    """A slice list in tables on the device, by runs: slices that follow each other in memory and in the list. See
    csrc/devices/slice_table.h."""

    tile_offset: torch.Tensor  # int64 [tiles]: elements from the bucket's origin to the tile's first one; 0: unknown
    tile_run: torch.Tensor  # int32 [tiles]: TILE: in one run, aligned; 0: in aligned runs; -1: a run is not aligned
    first: torch.Tensor  # int32 [tiles + 1]: the run of the tile's first element, or the last to begin before it
    vectors: torch.Tensor  # int32 [runs]: number of each run's first vector in the list
    starts: torch.Tensor  # int64 [runs]: each run's first element in the list
    ends: torch.Tensor  # int64 [runs]: the element behind its last one
    deltas: torch.Tensor  # int64 [runs]: elements from the origin, less elements of the list


class CountedSlices(NamedTuple):
    """Slices for pack, which also counts elements that are not finite."""

    tile_offset: torch.Tensor
    tile_run: torch.Tensor
    first: torch.Tensor
    vectors: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    deltas: torch.Tensor
    slice_starts: torch.Tensor  # int64 [num_slices + 1]: each slice's first element in the list, then the list's numel
    counts: torch.Tensor  # int64: pack adds the number of each slice's elements that are not finite
    slots: torch.Tensor  # int64 [num_slices]: the element of `counts` that is each slice's; may be negative
    num_slices: int


class Counts(NamedTuple):
    """The counts of slices that follow each other in memory."""

    slice_starts: torch.Tensor  # these as in CountedSlices
    counts: torch.Tensor
    slots: torch.Tensor
    num_slices: int


class Sections(NamedTuple):
    """The sections of a message's first part. The exact one is int32, of fp32 bits."""

    exact: torch.Tensor
    scales: torch.Tensor
    codes: torch.Tensor


class PartShape(NamedTuple):
    """The shape of a message's parts. Every field is int64."""

    stride: int  # bytes from one part of the message to the next
    numel: int  # lossy elements of a part
    exact_numel: int  # exact elements of a part
