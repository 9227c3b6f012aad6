"""What every implementation of the codec must give: the oracle's messages, gradients, residuals and counts. Nothing
else may change in memory.

Implementations are the C++ codec (Cpp, here) and the kernels (Kernels in kernel_checks.py): interpreted, executed from
their PTX, or on a GPU.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import reference
import torch
from hypothesis import strategies as st
from reference.stages import store_residual
from values import (
    DTYPES,
    WIRE_FORMATS,
    around_codes,
    blocks_of_32,
    every_16_bits,
    signed,
    special_fp32,
)

from fusedcomm.native import _C

POISON = 0xA5
GUARD_NBYTES = 64
GAP = 7.0  # the value of the elements between slices
CHUNK_NBYTES = 1 << 40  # more than any bucket here
STAGES = ("pack", "reduce", "unpack")

Slices = list[tuple[int, int]]
"""(offset from the gradients' first element, numel) of each slice, holes included."""


# ---- cases


@dataclass(frozen=True, kw_only=True)
class Case:
    """A bucket, and what is done with it."""

    numels: Sequence[Sequence[int]] = ()
    """Elements of each slice: of the lossy elements of each of `wires`, then of the exact elements."""
    values: "Callable[[Case], list[torch.Tensor]] | None" = None
    """The elements, in place of random ones. Without `numels` each list is one slice."""
    wires: Sequence[str] = ("bf16",)
    """The message's layouts, for example "int8-rotated"."""
    dtype: torch.dtype = torch.float32
    gaps: Sequence[int] = (0,)
    """Other elements before each slice, in turn."""
    shift: int = 0
    """Elements by which the gradients lie after the place that the slice lists were made for."""
    block: int = 32
    num_parts: int = 2
    num_chunks: int = 1
    """At least so many, if the elements suffice."""
    num_messages: int = 1
    """Messages whose sum is unpacked."""
    feedback: str | None = None
    scale: float = 0.3
    unpack_scale: float = 3.0
    seed: int = 0

    def flats(self) -> list[torch.Tensor]:
        """The real elements of each list."""
        if self.values:
            return self.values(self)
        return [signed(sum(n), self.dtype, self.seed + i, specials=True) for i, n in enumerate(self.numels)]

    def lists(self, with_holes: bool) -> list[Slices]:
        end, lists = 0, []
        for numels in self.numels or [[len(flat)] for flat in self.flats()]:
            gaps, slices = itertools.cycle(self.gaps), []
            for numel in numels:
                end += next(gaps)
                slices.append((end, numel))
                end += numel
            slices = _C.with_holes(slices, self.dtype.itemsize) if with_holes else slices
            lists.append([(at if at == _C.HOLE else at + self.shift, numel) for at, numel in slices])
        return lists

    def layouts(self, lists: list[Slices]) -> list["_C.BucketLayout"]:
        *lossy, exact = (sum(numel for _, numel in slices) for slices in lists)
        formats = [(*split(wire), numel) for wire, numel in zip(self.wires, lossy, strict=True)]
        formats = [(wire, self.block, rotated, numel) for wire, rotated, numel in formats]
        whole = _C.bucket_layouts(formats, self.num_parts, exact, CHUNK_NBYTES)
        return _C.bucket_layouts(formats, self.num_parts, exact, max(1, whole[0].chunk_nbytes // self.num_chunks))

    def gradients(self, lists: list[Slices]) -> torch.Tensor:
        end = max((at + numel for slices in lists for at, numel in slices if at != _C.HOLE), default=0)
        memory = torch.full((end + 23 - end % 8,), GAP, dtype=self.dtype)  # a multiple of 16 bytes
        for slices, flat in zip(lists, self.flats(), strict=True):
            taken = 0
            for _, at, numel in real(slices):
                memory[at : at + numel] = flat[taken : taken + numel]
                taken += numel
        return memory


def split(wire_format: str) -> tuple[str, bool]:
    wire, _, rotated = wire_format.partition("-")
    return wire, bool(rotated)


def bucket_layout(wire_format: str, block: int, num_parts: int, exact_numel: int, lossy_numel: int, *chunk_nbytes: int):
    """As _C.bucket_layout, of one chunk unless `chunk_nbytes` says otherwise."""
    wire, rotated = split(wire_format)
    return _C.bucket_layout(wire, block, num_parts, exact_numel, lossy_numel, *chunk_nbytes or [CHUNK_NBYTES], rotated)


def special_values(case: Case) -> list[torch.Tensor]:
    return [torch.cat([blocks_of_32().flatten(), special_fp32()]).to(case.dtype), special_fp32().to(case.dtype)]


def values_around_codes(case: Case) -> list[torch.Tensor]:
    return [around_codes(split(case.wires[0])[0]).to(case.dtype), torch.empty(0, dtype=case.dtype)]


def every_gradient(case: Case) -> list[torch.Tensor]:
    """Every 16-bit pattern. Of fp32 the high half has it."""
    patterns = every_16_bits(torch.int16)
    every = (patterns.int() << 16).view(torch.float32) if case.dtype == torch.float32 else patterns.view(case.dtype)
    return [every, every[:0]]


RAGGED = (  # tiny slices, empty ones at both ends and side by side, and one that crosses tiles, parts and chunks
    [0, 1, 31, 129, 0, 0, 300, 64, 7, 900, 33, 2, 2, 2, 256, 0],
    [5, 0, 1, 301, 0],
)
GAPS = (0, 1, 0, 0, 3, 0, 8)
SMALL = ([30, 100], [3])

CASES = {
    "one run": Case(numels=([1000, 1, 2001], []), num_chunks=2),
    "ragged": Case(numels=RAGGED, gaps=GAPS, num_chunks=2),
    "views": Case(numels=RAGGED, gaps=GAPS, shift=1),
    "slices of one element": Case(numels=([1] * 333, [1] * 7), gaps=[1]),
    "a full last tile": Case(numels=([100, 300, 112], [60, 68, 128]), gaps=[4], num_parts=1),
    "nothing": Case(numels=([], [])),
    "one element": Case(numels=([1], []), num_parts=3),
    "one exact element": Case(numels=([], [1]), gaps=[2], num_parts=3),
    "only exact elements": Case(numels=([0], [3, 774]), gaps=[2], num_parts=3, num_chunks=3),
    "one slice": Case(numels=([777], []), num_parts=3, num_chunks=3),
    "more parts than blocks": Case(numels=([100], [1]), num_parts=7),
    "one part": Case(numels=([700, 333], [50]), num_parts=1, scale=-3.0),
    "nine parts": Case(numels=([1700, 2333], [50]), num_parts=9, scale=1 / 9),
    "blocks of 128": Case(numels=([1124, 3, 1541], [70]), gaps=[0, 4], block=128),
    "blocks of 4096": Case(numels=([2 * 4096 + 100, 3, 3 * 4096 + 5], []), gaps=[0, 4], block=4096),
    **{
        f"scale {scale}": Case(numels=SMALL, gaps=[1], num_parts=4, scale=scale, unpack_scale=unpack_scale)
        for scale, unpack_scale in ((1.0, 0.0), (0.0, math.inf), (math.inf, 1.0), (math.nan, -1.0), (1e30, 1e-30))
    },
    "two messages": Case(numels=([524, 9, 600], [100]), num_parts=1, num_messages=2, num_chunks=2),
    "three messages": Case(numels=([1, 40, 500, 396], [33, 300]), gaps=[3], num_parts=1, num_messages=3),
    "residuals in fp32": Case(numels=([700, 1, 301], []), feedback="fp32", num_chunks=2),
    "residuals in bf16": Case(numels=RAGGED, gaps=GAPS, feedback="bf16", num_chunks=2),
    "special values": Case(values=special_values, num_parts=1, scale=1.0, unpack_scale=-0.5),
    "special values with residuals": Case(values=special_values, num_parts=1, scale=0.5, feedback="fp32"),
    "values around codes": Case(values=values_around_codes, num_parts=1, scale=1.0, unpack_scale=1.0),
    "every gradient of 16 bits": Case(values=every_gradient, num_parts=1, scale=1.0, unpack_scale=1.0),
}
"""By name. Every wire and every dtype of gradients takes the place of those here."""

SEVERAL_WIRES = Case(
    numels=([1, 300, 0, 77], [500], [9, 9, 200], [50, 5]),
    wires=("int8", "int4-rotated", "bf16"),
    gaps=GAPS,
    num_chunks=3,
)
"""Layouts that share a message."""


def case_of(name: str, wire_format: str, dtype: torch.dtype) -> Case:
    return replace(CASES[name], wires=(wire_format,), dtype=dtype)


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    numels = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 500)), max_size=12)
    return Case(
        numels=(draw(numels), draw(numels)),
        wires=(draw(st.sampled_from(WIRE_FORMATS)),),
        dtype=draw(st.sampled_from(DTYPES)),
        gaps=draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)),
        shift=draw(st.sampled_from([0, 0, 1])),
        block=draw(st.sampled_from([32, 64])),
        num_parts=draw(st.integers(1, 4)),
        num_chunks=draw(st.sampled_from([1, 2, 5])),
        feedback=draw(st.sampled_from([None, None, "fp32", "bf16"])),
        scale=draw(st.sampled_from([1.0, 0.25, 1 / 3, -3.0])),
        seed=draw(st.integers(0, 1000)),
    )


# ---- implementations


@dataclass
class Views:
    """A bucket of the C++ codec: its slices are views of the gradients."""

    layout: "_C.BucketLayout"
    lossy: list[torch.Tensor]
    exact: list[torch.Tensor]
    num_nonfinite: int = 0

    def counts(self) -> list[int]:
        return [self.num_nonfinite]


@dataclass
class Cpp:
    """The C++ codec. Holes of slice lists are the engine's, so buckets here have none."""

    isa: str
    num_threads: int
    device = "cpu"
    has_holes = False
    codec: "_C.Codec" = field(init=False)

    def __post_init__(self) -> None:
        self.codec = _C.Codec(self.isa, self.num_threads)

    def bucket(self, layout: "_C.BucketLayout", gradients: torch.Tensor, lossy: Slices, exact: Slices) -> Views:
        return Views(layout, *([gradients[at : at + numel] for at, numel in slices] for slices in (lossy, exact)))

    def pack(self, bucket: Views, chunk: int, scale: float, message: torch.Tensor, residual: "Residual") -> None:
        slices = bucket.lossy, bucket.exact
        bucket.num_nonfinite += self.codec.pack(bucket.layout, chunk, *slices, scale, message, residual.of_codec())

    def reduce(self, layout, parts, scale, out, residual, chunk, to=None, num_parts=1) -> None:
        self.codec.reduce(layout, parts, scale, out, residual.of_codec(), chunk, to, num_parts)

    def unpack(self, bucket: Views, chunk: int, messages: torch.Tensor, scale: float, num_messages: int) -> None:
        self.codec.unpack(bucket.layout, chunk, messages, scale, bucket.lossy, bucket.exact, num_messages)


CODECS = {f"{isa}-{num_threads}": Cpp(isa, num_threads) for isa in _C.available_isas() for num_threads in (1, 3)}


class Residual:
    """An encoder's residual, for an implementation and for the oracle. It starts with random values."""

    def __init__(self, feedback: str | None, numel: int, device: str) -> None:
        self.feedback, self.numel = feedback, numel
        self.expected = torch.zeros(_C.residual_nbytes(feedback, numel) if feedback else 0, dtype=torch.uint8)
        self.memory, self.residual = guarded(len(self.expected), device)
        if feedback:
            store_residual(self.expected, signed(numel, seed=5), 0, feedback)
        self.residual.copy_(self.expected)

    def of_codec(self) -> tuple[str, torch.Tensor, int] | None:
        return (self.feedback, self.residual, self.numel) if self.feedback else None

    def of_reference(self) -> reference.Feedback | None:
        return reference.Feedback(self.feedback, self.expected) if self.feedback else None

    def check(self) -> None:
        assert_bytes(self.memory, self.expected)


# ---- memory


def guarded(nbytes: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(memory, its first nbytes), filled with POISON: a byte that is not written shows, and a byte written past the
    end, too."""
    memory = torch.full((nbytes + GUARD_NBYTES,), POISON, dtype=torch.uint8, device=device)
    return memory, memory[:nbytes]


def assert_bytes(memory: torch.Tensor, expected: torch.Tensor) -> None:
    """`memory` holds the expected bytes, and its guard is untouched."""
    result, guard = memory.cpu().split([expected.numel(), GUARD_NBYTES])
    different = (result != expected).nonzero()
    assert len(different) == 0, f"{len(different)} of {expected.numel()} bytes differ, first at {int(different[0])}"
    assert torch.all(guard == POISON)


def assert_same_bits(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert result.dtype == expected.dtype
    integers = torch.int32 if result.dtype == torch.float32 else torch.int16
    different = (result.cpu().view(integers) != expected.view(integers)).nonzero()
    assert len(different) == 0, (
        f"{len(different)} of {len(expected)} elements differ, first at {int(different[0])}: "
        f"{result[different[0]]} instead of {expected[different[0]]}"
    )


def real(slices: Slices) -> list[tuple[int, int, int]]:
    """(begin in the list, offset, numel) of each slice that is no hole."""
    begins = itertools.accumulate((numel for _, numel in slices), initial=0)
    return [(begin, *of_slice) for begin, of_slice in zip(begins, slices, strict=False) if of_slice[0] != _C.HOLE]


def products(gradients: torch.Tensor, slices: Slices, scale: float) -> torch.Tensor:
    """fp32: a list's elements times `scale`; +0 in holes, whatever the scale."""
    result = torch.zeros(sum(numel for _, numel in slices))
    for begin, at, numel in real(slices):
        result[begin : begin + numel] = reference.scaled(gradients[at : at + numel], scale)
    return result


def nonfinite_by_slice(y: torch.Tensor, slices: Slices) -> list[int]:
    return [int((~y[begin : begin + numel].isfinite()).sum()) for begin, _, numel in real(slices)]


def place(values: torch.Tensor, begin: int, slices: Slices, gradients: torch.Tensor) -> None:
    """Writes a list's elements from number `begin` on where they lie."""
    for first, at, numel in real(slices):
        low, high = max(begin, first), min(begin + len(values), first + numel)
        if low < high:
            gradients[at + low - first : at + high - first] = values[low - begin : high - begin]


def piece(layout: "_C.BucketLayout", parts: torch.Tensor) -> torch.Tensor:
    """The layout's piece of each part: uint8 [number of parts, layout.part.nbytes], a view."""
    return parts.view(-1, layout.part_stride)[:, layout.part_offset :][:, : layout.part.nbytes]


# ---- checks


def check(run, case: Case, stages: Sequence[str] = STAGES) -> list["_C.BucketLayout"]:
    """Packs every chunk of a bucket, sums the parts of each message as if they were one part of several ranks, and
    unpacks. Compares all memory with the oracle's, written or not. Returns the layouts.

    `run` is the implementation. Stages that are not in `stages` are left out. Each stage gets what the oracle gives.
    """
    *lossy_lists, exact_list = lists = case.lists(run.has_holes)
    layouts, original = case.layouts(lists), case.gradients(lists)
    gradients = original.to(run.device)
    buckets = [
        run.bucket(layout, gradients, slices, exact_list if i == 0 else [])
        for i, (layout, slices) in enumerate(zip(layouts, lossy_lists, strict=True))
    ]
    *lossy, exact = (products(original, slices, case.scale) for slices in lists)
    inputs = [(y, exact if i == 0 else exact[:0]) for i, y in enumerate(lossy)]
    num_chunks = layouts[0].num_chunks
    residuals = [Residual(case.feedback, layout.padded_numel, run.device) for layout in layouts]
    of_sums = [Residual(case.feedback, num_chunks * layout.part.lossy_numel, run.device) for layout in layouts]

    messages = []
    for chunk in range(num_chunks):
        memory, message = guarded(layouts[0].chunk_nbytes, run.device)
        expected = torch.full((layouts[0].chunk_nbytes,), POISON, dtype=torch.uint8)
        for layout, bucket, of_bucket, residual in zip(layouts, buckets, inputs, residuals, strict=True):
            packed = reference.pack(layout, chunk, *of_bucket, 1.0, residual.of_reference())
            piece(layout, expected).copy_(packed.view(layout.num_parts, -1))
            if "pack" in stages:
                run.pack(bucket, chunk, case.scale, message, residual)
        if "pack" in stages:
            assert_bytes(memory, expected)
        messages.append(expected)
        if "reduce" in stages:
            check_reduce(run, layouts, chunk, expected, case.scale, of_sums)
    if "pack" in stages:
        for residual in residuals:
            residual.check()
        check_counts(buckets, inputs, lossy_lists, exact_list)
    assert_same_bits(gradients, original)

    for chunk, message in enumerate(messages if "unpack" in stages else []):
        others = [reference.pack(layouts[0], chunk, *(y.roll(8 * i) * (-1) ** i for y in inputs[0]), 1.0)
                  for i in range(1, case.num_messages)]  # fmt: skip
        message = torch.cat([message, *others])
        for i, (layout, bucket) in enumerate(zip(layouts, buckets, strict=True)):
            run.unpack(bucket, chunk, message.to(run.device), case.unpack_scale, case.num_messages)
            parts = piece(layout, message).reshape(-1)
            values = reference.unpack(layout, chunk, parts, case.unpack_scale, case.dtype, case.num_messages)
            place(values[0], layout.lossy_range(chunk, 0)[0], lossy_lists[i], original)
            place(values[1], layout.exact_range(chunk, 0)[0], exact_list if i == 0 else [], original)
    assert_same_bits(gradients, original)
    return layouts


def check_reduce(run, layouts, chunk: int, parts: torch.Tensor, scale: float, residuals: list[Residual]) -> None:
    memory, sums = guarded(layouts[0].part_stride, run.device)
    expected = torch.full((layouts[0].part_stride,), POISON, dtype=torch.uint8)
    for layout, residual in zip(layouts, residuals, strict=True):
        run.reduce(layout, parts.to(run.device), scale, sums, residual, chunk)
        of_layout = piece(layout, parts).reshape(-1)
        piece(layout, expected).copy_(reference.reduce(layout, of_layout, scale, residual.of_reference(), chunk))
        residual.check()
    assert_bytes(memory, expected)


def check_counts(buckets, inputs, lossy_lists: list[Slices], exact_list: Slices) -> None:
    """How many products are not finite: by slice, or if the implementation does not tell them apart, in all."""
    for i, (bucket, of_bucket, slices) in enumerate(zip(buckets, inputs, lossy_lists, strict=True)):
        lists = (slices, exact_list if i == 0 else [])
        expected = [n for y, of_list in zip(of_bucket, lists, strict=True) for n in nonfinite_by_slice(y, of_list)]
        found = bucket.counts()
        assert found == expected or (len(found) == 1 and found[0] == sum(expected)), (found, expected)


def check_hosts(
    run, in_wire: str, wire_format: str, feedback: str | None, block: int = 64, part_numel: int = 640
) -> None:
    """Sums in one wire and encodes in another: the part of each of a host's 3 ranks becomes 2 parts, one for each of 2
    hosts."""
    lossy_numel, exact_numel = 2 * 6 * part_numel - 7, 2 * 6 * 8
    case = Case(numels=([lossy_numel], [exact_numel]), wires=(wire_format,), block=block, num_parts=6, num_chunks=2)
    (to,) = case.layouts(case.lists(False))
    (layout,) = _C.host_layouts([to], in_wire, 3)
    assert to.num_chunks == layout.num_chunks > 1
    assert (layout.part.lossy_numel, layout.part.exact_numel) == (2 * to.part.lossy_numel, 2 * to.part.exact_numel)
    residual = Residual(feedback, to.num_chunks * 2 * to.part.lossy_numel, run.device)
    flats = signed(lossy_numel, seed=2, specials=True), signed(exact_numel, seed=9)
    for chunk in range(to.num_chunks):
        parts = reference.pack(layout, chunk, *flats, 1.0)
        memory, sums = guarded(2 * to.part_stride, run.device)
        run.reduce(layout, parts.to(run.device), 1 / 3, sums, residual, chunk, to, 2)
        assert_bytes(memory, reference.reduce(layout, parts, 1 / 3, residual.of_reference(), chunk, to, 2))
        residual.check()


def check_every_code(run, wire: str) -> None:
    """Sums and unpacks codes and scales that pack never writes, too, but no NaN of fp8."""
    if wire in reference.GREATEST_CODE:
        bits = [0x3F80, 0x3E9A, 0x0000, 0x8000, 0x0001, 0x00A1, 0x7F80, 0x7FC1, 0xFF81, 0x7F7F, 0x0D80, 0xC123]
        numel = 256 * (2 if wire == "int4" else 1)
        scales = torch.tensor(bits).repeat_interleave(numel // 32).to(torch.int16)
        if _C.scale_nbytes(wire) == 4:
            scales = torch.stack([torch.full_like(scales, 0x1234), scales], dim=1).flatten()
        codes = torch.arange(256)
        codes = torch.where(codes % 128 == 127, 0, codes) if wire == "fp8" else codes
        parts = torch.cat([scales.view(torch.uint8), codes.to(torch.uint8).repeat(len(bits))])
        numel *= len(bits)
    else:
        numel, parts = 2**16, every_16_bits(torch.int16).view(torch.uint8)
    layout = bucket_layout(wire, 32, 1, 0, numel)
    assert layout.chunk_nbytes == len(parts)
    memory, sums = guarded(layout.part.nbytes, run.device)
    run.reduce(layout, parts.to(run.device), 1.0, sums, Residual(None, 0, run.device), 0)
    assert_bytes(memory, reference.reduce(layout, parts, 1.0))
    for dtype in DTYPES:
        gradients = torch.zeros(numel, dtype=dtype, device=run.device)
        run.unpack(run.bucket(layout, gradients, [(0, numel)], []), 0, parts.to(run.device), 0.75, 1)
        assert_same_bits(gradients, reference.unpack(layout, 0, parts, 0.75, dtype)[0])
