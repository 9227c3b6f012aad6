"""The buckets with which codec_checks.py checks every implementation of the codec: one table."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from values import DTYPES, WIRES, around_codes, blocks_of_32, every_16_bits, signed, special_fp32

from fusedcomm.native import _C

GAP = 7.0  # the value of the elements between slices
CHUNK_NBYTES = 1 << 40  # more than any bucket here

Slices = list[tuple[int, int]]
"""(offset from the gradients' first element, numel) of each slice, holes included."""


def real(slices: Slices) -> list[tuple[int, int, int]]:
    """(begin in the list, offset, numel) of each slice that is no hole."""
    begins = itertools.accumulate((numel for _, numel in slices), initial=0)
    return [(begin, *of_slice) for begin, of_slice in zip(begins, slices, strict=False) if of_slice[0] != _C.HOLE]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A bucket, and what is done with it."""

    numels: Sequence[Sequence[int]] = ()
    """Elements of each slice: of the lossy elements of each of `wires`, then of the exact elements."""
    values: "Callable[[Case], list[torch.Tensor]] | None" = None
    """The elements, in place of random ones. Without `numels` each list is one slice."""
    wires: Sequence[str] = ("bf16",)
    """The message's layouts, for example "int8"."""
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
    feedback: bool = False
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
        formats = [(wire, self.block, numel) for wire, numel in zip(self.wires, lossy, strict=True)]
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


def bucket_layout(wire: str, block: int, num_parts: int, exact_numel: int, lossy_numel: int, *chunk_nbytes: int):
    """As _C.bucket_layout, of one chunk unless `chunk_nbytes` says otherwise."""
    return _C.bucket_layout(wire, block, num_parts, exact_numel, lossy_numel, *chunk_nbytes or [CHUNK_NBYTES])


def special_values(case: Case) -> list[torch.Tensor]:
    return [torch.cat([blocks_of_32().flatten(), special_fp32()]).to(case.dtype), special_fp32().to(case.dtype)]


def values_around_codes(case: Case) -> list[torch.Tensor]:
    return [around_codes(case.wires[0]).to(case.dtype), torch.empty(0, dtype=case.dtype)]


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
    "six parts": Case(numels=([1033], [50]), num_parts=6, scale=1 / 6),
    "nine parts": Case(numels=([1700, 2333], [50]), num_parts=9, scale=1 / 9),
    "blocks of 128": Case(numels=([1124, 3, 1541], [70]), gaps=[0, 4], block=128),
    "blocks of 4096": Case(numels=([2 * 4096 + 100, 3, 3 * 4096 + 5], []), gaps=[0, 4], block=4096),
    **{
        f"scale {scale}": Case(numels=SMALL, gaps=[1], num_parts=4, scale=scale, unpack_scale=unpack_scale)
        for scale, unpack_scale in ((1.0, 0.0), (0.0, math.inf), (math.inf, 1.0), (math.nan, -1.0), (1e30, 1e-30))
    },
    "two messages": Case(numels=([524, 9, 600], [100]), num_parts=1, num_messages=2, num_chunks=2),
    "three messages": Case(numels=([1, 40, 500, 396], [33, 300]), gaps=[3], num_parts=1, num_messages=3),
    "residuals of runs": Case(numels=([700, 1, 301], []), feedback=True, num_chunks=2),
    "residuals": Case(numels=RAGGED, gaps=GAPS, feedback=True, num_chunks=2),
    "special values": Case(values=special_values, num_parts=1, scale=1.0, unpack_scale=-0.5),
    "special values with residuals": Case(values=special_values, num_parts=1, scale=0.5, feedback=True),
    "values around codes": Case(values=values_around_codes, num_parts=1, scale=1.0, unpack_scale=1.0),
    "every gradient of 16 bits": Case(values=every_gradient, num_parts=1, scale=1.0, unpack_scale=1.0),
}
"""By name. Every wire and every dtype of gradients takes the place of those here."""

SEVERAL_WIRES = Case(
    numels=([1, 300, 0, 77], [500], [9, 9, 200], [50, 5]),
    wires=("int8", "int4", "bf16"),
    gaps=GAPS,
    num_chunks=3,
)
"""Layouts that share a message."""


def case_of(name: str, wire: str, dtype: torch.dtype) -> Case:
    return replace(CASES[name], wires=(wire,), dtype=dtype)


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    numels = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 500)), max_size=12)
    return Case(
        numels=(draw(numels), draw(numels)),
        wires=(draw(st.sampled_from(WIRES)),),
        dtype=draw(st.sampled_from(DTYPES)),
        gaps=draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)),
        shift=draw(st.sampled_from([0, 0, 1])),
        block=draw(st.sampled_from([32, 64])),
        num_parts=draw(st.integers(1, 4)),
        num_chunks=draw(st.sampled_from([1, 2, 5])),
        feedback=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 0.25, 1 / 3, -3.0])),
        seed=draw(st.integers(0, 1000)),
    )
