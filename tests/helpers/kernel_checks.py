"""One launch of one kernel variant on a small bucket, against the oracle: all memory that it writes, and nothing else.

It launches what fusedcomm.kernels has, whichever kernels these are: interpreted, executed from their PTX, or
on a GPU.
"""

import reference
import torch
from launchers import make_bucket, pack, reduce, unpack
from reference.stages import store_residual
from test_kernels import (
    GAP,
    Encoder,
    assert_bytes,
    assert_same_bits,
    bucket_layout,
    count,
    gather,
    guarded,
    lay_out,
    nonfinite_by_slice,
    place,
    signed,
    test_scales_in_place,
    with_holes,
)

from fusedcomm.kernels.variants import TILE
from fusedcomm.native import _C

SCALE = 0.3
PROGRAMS = 2


def check_variant(variant: "_C.KernelKey", device: str = "cpu") -> None:
    """Raises AssertionError if the variant, launched for the real tile, writes anything that the oracle does not."""
    {"pack": check_pack, "unpack": check_unpack, "reduce": check_reduce, "scale": check_scale}[variant.kernel](
        variant, device
    )


def check_scale(variant: "_C.KernelKey", device: str) -> None:
    test_scales_in_place(device, 2 * TILE + 3, TILE)


def wire_format(variant: "_C.KernelKey") -> str:
    return variant.wire + "-rotated" * variant.rotated


GAPS = [0, 3]


def elements(dtype: torch.dtype) -> tuple[tuple, tuple, torch.Tensor]:
    """(values of each list, slices of each, gradients that hold them), lossy before exact. Parts of half the elements
    have tiles in one run and others."""
    numels = with_holes(([2 * TILE + 4, 7, 64, 2 * TILE + 1], [TILE + 20]), GAPS, dtype)
    lossy, end = lay_out(numels[0], GAPS, 0)
    exact, end = lay_out(numels[1], GAPS, end)
    gradients = torch.full((end + 23 - end % 8,), GAP, dtype=dtype)
    values = []
    for i, slices in enumerate((lossy, exact)):
        place(slices, signed(count(numels[i]), dtype, 8 + i, specials=True), gradients)
        values.append(gather(gradients, slices))
    return tuple(values), (lossy, exact), gradients


def with_residual(variant: "_C.KernelKey", numel: int, device: str) -> Encoder:
    """The variant's encoder. Its residual is not zero."""
    encoder = Encoder(variant.feedback, numel, device)
    if variant.feedback:
        store_residual(encoder.expected, signed(numel, seed=5), 0, variant.feedback)
        encoder.residual.copy_(encoder.expected)
    return encoder


def check_pack(variant: "_C.KernelKey", device: str) -> None:
    flats, slices, original = elements(variant.grad_dtype)
    layout = bucket_layout(wire_format(variant), variant.block, 2, len(flats[1]), len(flats[0]))
    gradients = original.to(device)
    bucket = make_bucket(layout, gradients, *slices)
    encoder = with_residual(variant, layout.padded_numel, device)
    memory, message = guarded(layout.chunk_nbytes, device)
    pack(bucket, 0, SCALE, message, PROGRAMS, encoder.of_kernel())
    assert_bytes(memory, reference.pack(layout, 0, *flats, SCALE, encoder.of_reference()))
    encoder.check()
    assert_same_bits(gradients, original)
    for listed, flat, of_list in zip((bucket.lossy, bucket.exact), flats, slices, strict=True):
        assert listed.counts.tolist() == nonfinite_by_slice(flat, of_list, SCALE)


def check_unpack(variant: "_C.KernelKey", device: str) -> None:
    num_messages, num_parts = (3, 1) if variant.sums else (1, 2)
    dtype = variant.grad_dtype
    flats, slices, original = elements(dtype)
    layout = bucket_layout(wire_format(variant), variant.block, num_parts, len(flats[1]), len(flats[0]))
    sent = [tuple(flat.roll(8 * i) * (-1) ** i for flat in flats) for i in range(num_messages)]
    messages = torch.cat([reference.pack(layout, 0, *of_rank, SCALE) for of_rank in sent])
    gradients = torch.full_like(original, GAP, device=device)
    unpack(make_bucket(layout, gradients, *slices), 0, messages.to(device), 3.0, PROGRAMS, num_messages=num_messages)
    for of_list, flat in zip(slices, reference.unpack(layout, 0, messages, 3.0, dtype, num_messages), strict=True):
        place(of_list, flat, original)
    assert_same_bits(gradients, original)


def check_reduce(variant: "_C.KernelKey", device: str) -> None:
    """Three ranks. With another input wire, each rank's part becomes two parts."""
    in_wire = variant.in_wire or variant.wire
    num_parts = 1 if in_wire == variant.wire else 2
    part_numel, exact_numel = TILE + 512, TILE // 4 + 8
    numels = 3 * num_parts * exact_numel, 3 * num_parts * part_numel
    layout = bucket_layout(in_wire + "-rotated" * (variant.rotated and num_parts == 1), variant.block, 3, *numels)
    to = bucket_layout(wire_format(variant), variant.block, 3 * num_parts, *numels)
    assert layout.part.lossy_numel == num_parts * to.part.lossy_numel
    flats = signed(numels[1], seed=2, specials=True), signed(numels[0], seed=9)
    parts = reference.pack(layout, 0, *flats, 1.0)
    encoder = with_residual(variant, num_parts * to.part.lossy_numel, device)
    memory, reduced = guarded(num_parts * to.part_stride, device)
    how = {"chunk": 0, "to": to, "num_parts": num_parts}
    reduce(layout, parts.to(device), SCALE, reduced, PROGRAMS, TILE, encoder.of_kernel(), **how)
    assert_bytes(memory, reference.reduce(layout, parts, SCALE, encoder.of_reference(), **how))
    encoder.check()
