"""The kernels as an implementation that codec_checks.py checks, whichever kernels fusedcomm.kernels has: interpreted,
executed from their PTX, or on a GPU."""

import dataclasses

import launchers
import reference
import torch
from codec_cases import GAP, Case, Slices, bucket_layout
from codec_checks import Residual, assert_same_bits, check, check_hosts, nonfinite_by_slice
from values import signed

from fusedcomm.kernels.variants import TILE, tile_of
from fusedcomm.native import _C


class Bucket(launchers.Bucket):
    def counts(self) -> list[int]:
        return [*self.lossy.counts.tolist(), *self.exact.counts.tolist()]


@dataclasses.dataclass
class Kernels:
    """tile: elements of a tile, or None for the engine's. Small tiles make geometry cheap to test; the kernels are
    executed from their PTX with the engine's alone."""

    device: str = "cpu"
    tile: int | None = 256
    num_programs: int = 3
    has_holes = True

    def tile_of(self, layout: "_C.BucketLayout") -> int:
        block = layout.block_numel if _C.has_scales(layout.wire) else 0
        return max(self.tile, block) if self.tile else tile_of(layout.wire, layout.block_numel)

    def bucket(self, layout: "_C.BucketLayout", gradients: torch.Tensor, lossy: Slices, exact: Slices) -> Bucket:
        """Behind each table is a 0: a kernel that reads it finds another slice."""
        bucket = launchers.make_bucket(layout, gradients, lossy, exact, self.tile_of(layout))

        def guarded_tables(listed):
            fields = (torch.nn.functional.pad(x, (0, 1))[:-1] if isinstance(x, torch.Tensor) else x for x in listed)
            return type(listed)(*fields)

        return Bucket(layout, gradients, guarded_tables(bucket.lossy), guarded_tables(bucket.exact), bucket.tile)

    def pack(self, bucket: Bucket, chunk: int, scale: float, message: torch.Tensor, residual: Residual) -> None:
        launchers.pack(bucket, chunk, scale, message, self.num_programs, residual.of_codec)

    def reduce(self, layout, parts, scale, out, residual, chunk, to=None, num_parts=1) -> None:
        tile = self.tile_of(to or layout)
        launchers.reduce(layout, parts, scale, out, self.num_programs, tile, residual.of_codec, chunk, to, num_parts)

    def unpack(self, bucket: Bucket, chunk: int, messages: torch.Tensor, scale: float, num_messages: int) -> None:
        launchers.unpack(bucket, chunk, messages, scale, self.num_programs, num_messages)


def check_scale(run: Kernels, numel: int) -> None:
    tile = run.tile or TILE
    memory = torch.full((numel + 16,), GAP, device=run.device)
    memory[:numel] = signed(numel, seed=1, specials=True)
    expected = reference.scaled(memory.cpu()[:numel], -1.7)
    slices = [(0, numel // 3), (numel // 3, 0), (numel // 3, numel - numel // 3)]
    bucket = launchers.make_bucket(bucket_layout("fp32", 32, 1, 0, numel), memory, slices, [], tile)
    launchers.scale_in_place(bucket, -1.7, run.num_programs)
    # Which NaN a multiplication gives depends on the device.
    assert_same_bits(reference.canonical(memory[:numel].cpu()), reference.canonical(expected))
    assert torch.all(memory[numel:] == GAP)
    assert bucket.lossy.counts.tolist() == nonfinite_by_slice(expected, slices)


REAL_TILES = Case(numels=([2 * TILE + 4, 7, 64, 2 * TILE + 1], [TILE + 20]), gaps=[0, 3], block=128)
"""Each part has tiles in one run and others."""


def check_variant(variant: "_C.KernelKey", device: str = "cpu") -> None:
    """Raises AssertionError if the variant, launched for the real tile, writes anything that the oracle does not."""
    run = Kernels(device, tile=None, num_programs=2)
    if variant.kernel == "scale":
        return check_scale(run, 2 * TILE + 3)
    if variant.in_wire not in (None, variant.wire):
        return check_hosts(run, variant.in_wire, variant.wire, variant.feedback, variant.block, TILE // 2 + 256)
    case = dataclasses.replace(
        REAL_TILES,
        wires=(variant.wire,),
        dtype=variant.grad_dtype or torch.float32,
        block=variant.block,
        feedback=variant.feedback,
        num_parts=3 if variant.kernel == "reduce" else 1 if variant.sums else 2,
        num_messages=3 if variant.sums else 1,
    )
    check(run, case, stages=(variant.kernel,))
