"""Launches the kernels of kernels/ from Python: one function for each, with the arguments that the engine passes. They
trust their arguments.

`num_programs` is the size of the launch's grid. Messages are uint8 and 16-byte aligned.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import fusedcomm.kernels.pack as of_pack
import fusedcomm.kernels.reduce as of_reduce
import fusedcomm.kernels.scale as of_scale
import fusedcomm.kernels.unpack as of_unpack
from fusedcomm.kernels.arguments import CountedSlices, Counts, PartShape, Sections, Slices
from fusedcomm.kernels.constants import CODE_NBYTES, CONVERTS_FP8, SCALE_NBYTES, WIRE_IDS, options
from fusedcomm.kernels.variants import plain_registers, tile_of
from fusedcomm.native import _C

# The dtypes as which kernels take codes and scales, by their width in bytes. Kernels round in integers, and bf16 is
# int16.
CODES = {4: torch.int32, 2: torch.int16, 1: torch.int8}
SCALES = {4: torch.float32, 2: torch.int16}


def residual_argument(residual: torch.Tensor | None, first: int, unused: torch.Tensor) -> torch.Tensor:
    """The kernel's parameter for an encoder's residual (fp32, read and overwritten; None: there is none), from element
    `first` on. unused: any uint8 tensor, passed if there is no residual."""
    return unused.view(torch.int8) if residual is None else residual[first:]


@dataclass(frozen=True)
class Bucket:
    """A bucket as the kernels take it, with its tables on the gradients' device."""

    layout: "_C.BucketLayout"
    grads: torch.Tensor  # [any], fp32, bf16 or fp16, 16-byte aligned; its first element is the bucket's origin
    lossy: CountedSlices
    exact: CountedSlices
    tile: int  # elements of a tile, for which the tables are made


def make_bucket(
    layout: "_C.BucketLayout",
    grads: torch.Tensor,
    lossy_slices: Sequence[tuple[int, int]],
    exact_slices: Sequence[tuple[int, int]],
    tile: int | None = None,
) -> Bucket:
    """Slices: (offset from grads[0], numel) of each; for a hole the offset is _C.HOLE. tile: None is the engine's."""
    tile = tile or tile_of(layout.wire, layout.block_numel)

    def tables(is_exact: bool, slices: Sequence[tuple[int, int]]) -> CountedSlices:
        made = _C.slice_table(layout, is_exact, list(slices), tile, grads.element_size())
        num_slices = len(made[-1]) - 1
        counts = torch.zeros(num_slices, dtype=torch.int64)
        slots = torch.arange(num_slices, dtype=torch.int64)
        return CountedSlices(*(table.to(grads.device) for table in (*made, counts, slots)), num_slices)

    return Bucket(layout, grads, tables(False, lossy_slices), tables(True, exact_slices), tile)


def sections(layout: "_C.BucketLayout", parts: torch.Tensor) -> Sections:
    """The layout's piece of the first part in `parts`. Each view reaches to the end of `parts`."""
    piece = parts[layout.part_offset :]
    scales, codes = piece[layout.part.scale_offset :], piece[layout.part.code_offset :]
    converted = (
        layout.wire == "fp8" and parts.is_cuda and torch.cuda.get_device_capability(parts.device) >= CONVERTS_FP8
    )
    return Sections(
        piece.view(torch.int32),
        scales.view(SCALES[SCALE_NBYTES[layout.wire]]),
        codes.view(torch.float8_e4m3fn if converted else CODES[CODE_NBYTES[layout.wire]]),
    )


def shape_of(layout: "_C.BucketLayout") -> PartShape:
    return PartShape(layout.part_stride, layout.part.lossy_numel, layout.part.exact_numel)


def pack(
    bucket: Bucket, chunk: int, scale: float, out: torch.Tensor, num_programs: int, residual: torch.Tensor | None = None
) -> None:
    """Packs a chunk into the message `out` [layout.chunk_nbytes]. Adds the number of each slice's elements that are not
    finite after scaling to the lists' `counts`."""
    layout = bucket.layout
    plain = plain_registers("pack", layout.wire, None, bucket.grads.element_size())
    of_pack.pack_kernel[(num_programs,)](
        *(bucket.grads, bucket.lossy, bucket.exact, sections(layout, out), shape_of(layout)),
        *(chunk * layout.num_parts, layout.num_parts, scale, residual_argument(residual, 0, out)),
        WIRE=WIRE_IDS[layout.wire],
        BLOCK=layout.block_numel,
        TILE=bucket.tile,
        FEEDBACK=residual is not None,
        **options(bucket.tile, plain, residual is not None),
    )


def reduce(
    layout: "_C.BucketLayout",
    parts: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    num_programs: int,
    tile: int | None = None,
    residual: torch.Tensor | None = None,
    chunk: int = 0,
    to: "_C.BucketLayout | None" = None,
    num_parts: int = 1,
) -> None:
    """Writes the scaled sum of `parts`, every rank's encoding of the same part, to `out` [num_parts · to.part_stride].

    to: the output's layout, which has the same elements in `num_parts` times as many parts. None: `layout`. The
    residual has the elements of to.num_chunks · num_parts parts.
    """
    to = to or layout
    tile = tile or tile_of(to.wire, to.block_numel)
    of_reduce.reduce_kernel[(num_programs,)](
        *(sections(layout, parts), sections(to, out), layout.part_stride, shape_of(to)),
        *(
            num_parts,
            layout.num_parts,
            scale,
            residual_argument(residual, chunk * num_parts * to.part.lossy_numel, out),
        ),
        IN_WIRE=WIRE_IDS[layout.wire],
        WIRE=WIRE_IDS[to.wire],
        BLOCK=to.block_numel,
        TILE=tile,
        FEEDBACK=residual is not None,
        **options(tile, plain_registers("reduce", to.wire, layout.wire, 4), residual is not None),
    )


def unpack(
    bucket: Bucket, chunk: int, parts: torch.Tensor, scale: float, num_programs: int, num_messages: int = 1
) -> None:
    """Decodes a chunk from `parts`, that many messages, which are summed, and writes it to the bucket's slices."""
    layout = bucket.layout
    lossy, exact = (Slices(*slices[: len(Slices._fields)]) for slices in (bucket.lossy, bucket.exact))
    of_unpack.unpack_kernel[(num_programs,)](
        *(bucket.grads, lossy, exact, sections(layout, parts), shape_of(layout)),
        *(chunk * layout.num_parts, layout.num_parts, num_messages, scale),
        WIRE=WIRE_IDS[layout.wire],
        BLOCK=layout.block_numel,
        TILE=bucket.tile,
        SUMS=num_messages > 1,
        **options(bucket.tile, sums=num_messages > 1),
    )


def scale_in_place(bucket: Bucket, scale: float, num_programs: int) -> None:
    """Multiplies the gradients of an fp32 bucket in one run by `scale`. Counts as pack()."""
    counts = Counts(*(getattr(bucket.lossy, field) for field in Counts._fields))
    of_scale.scale_kernel[(num_programs,)](
        bucket.grads, bucket.layout.lossy_numel, scale, counts, TILE=bucket.tile, **options(bucket.tile)
    )
