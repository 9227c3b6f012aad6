"""What every implementation of the codec must give: the oracle's messages, gradients, residuals and counts. Nothing
else may change in memory.

Implementations are the C++ codec (Cpp, here) and the kernels (Kernels in kernel_checks.py): interpreted, executed from
their PTX, or on a GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import reference
import torch
from codec_cases import Case, Slices, bucket_layout, real
from values import DTYPES, every_16_bits, signed

from fusedcomm.native import _C

POISON = 0xA5
GUARD_NBYTES = 64
STAGES = ("pack", "reduce", "unpack")


# ---- implementations


class Bucket(Protocol):
    def counts(self) -> list[int]:
        """How many elements were not finite after scaling: of each slice, or in all."""


class Implementation(Protocol):
    """Launches each stage, with the arguments that the oracle has."""

    device: str
    has_holes: bool
    """Whether slice lists have holes."""

    def bucket(self, layout: "_C.BucketLayout", gradients: torch.Tensor, lossy: Slices, exact: Slices) -> Bucket: ...
    def pack(self, bucket: Bucket, chunk: int, scale: float, message: torch.Tensor, residual: "Residual") -> None: ...
    def reduce(
        self,
        layout: "_C.BucketLayout",
        parts: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        residual: "Residual",
        chunk: int,
        to: "_C.BucketLayout | None" = None,
        num_parts: int = 1,
    ) -> None: ...
    def unpack(self, bucket: Bucket, chunk: int, messages: torch.Tensor, scale: float, num_messages: int) -> None: ...


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
        bucket.num_nonfinite += self.codec.pack(bucket.layout, chunk, *slices, scale, message, residual.of_codec)

    def reduce(self, layout, parts, scale, out, residual, chunk, to=None, num_parts=1) -> None:
        self.codec.reduce(layout, parts, scale, out, residual.of_codec, chunk, to, num_parts)

    def unpack(self, bucket: Views, chunk: int, messages: torch.Tensor, scale: float, num_messages: int) -> None:
        self.codec.unpack(bucket.layout, chunk, messages, scale, bucket.lossy, bucket.exact, num_messages)


CODECS = {f"{isa}-{num_threads}": Cpp(isa, num_threads) for isa in _C.available_isas() for num_threads in (1, 3)}


class Residual:
    """An encoder's residual, for an implementation and for the oracle. It starts with random values."""

    def __init__(self, feedback: bool, numel: int, device: str) -> None:
        self.expected = signed(numel if feedback else 0, seed=5)
        self.memory, values = guarded(4 * len(self.expected), device)
        values.copy_(self.expected.view(torch.uint8))
        self.of_codec = values.view(torch.float32) if feedback else None
        self.of_reference = self.expected if feedback else None

    def check(self) -> None:
        assert_bytes(self.memory, self.expected.view(torch.uint8))


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


# ---- checks


@dataclass
class Piece:
    """What a message has of one layout."""

    layout: "_C.BucketLayout"
    bucket: "Bucket"
    lists: tuple[Slices, Slices]  # lossy, exact
    inputs: tuple[torch.Tensor, torch.Tensor]  # of both lists: the elements times the scale
    residual: Residual
    of_sum: Residual
    known: dict
    """What the oracle, which is slow, has given to another implementation: by stage and chunk, with the residual."""

    def by_oracle(self, chunk: int, residual: Residual, stage: Callable, *arguments: object):
        """What stage(layout, *arguments) returns, which changes the residual that is expected."""
        if (stage, chunk) not in self.known:
            self.known[stage, chunk] = stage(self.layout, *arguments), residual.expected.clone()
        result, left = self.known[stage, chunk]
        residual.expected.copy_(left)
        return result

    def of(self, parts: torch.Tensor) -> torch.Tensor:
        """This piece of each part: uint8 [number of parts, layout.part.nbytes], a view."""
        layout = self.layout
        return parts.view(-1, layout.part_stride)[:, layout.part_offset :][:, : layout.part.nbytes]


def pieces_of(run: Implementation, case: Case, original: torch.Tensor, gradients: torch.Tensor, known) -> list[Piece]:
    *lossy_lists, exact_list = case.lists(run.has_holes)
    pieces = []
    for layout, slices in zip(case.layouts([*lossy_lists, exact_list]), lossy_lists, strict=True):
        lists = slices, exact_list if not pieces else []  # the first layout has the exact elements
        residual_numels = layout.padded_numel, layout.num_chunks * layout.part.lossy_numel
        pieces.append(
            Piece(
                layout,
                run.bucket(layout, gradients, *lists),
                lists,
                tuple(products(original, of_list, case.scale) for of_list in lists),
                *(Residual(case.feedback, numel, run.device) for numel in residual_numels),
                known.setdefault(len(pieces), {}),
            )
        )
    return pieces


def check_codecs(case: Case, stages: Sequence[str] = STAGES, codecs: Sequence[Cpp] = (*CODECS.values(),)) -> list:
    """check() of these codecs."""
    known: dict = {}
    return [check(codec, case, stages, known) for codec in codecs][-1]


def check(
    run: Implementation, case: Case, stages: Sequence[str] = STAGES, known: dict | None = None
) -> list["_C.BucketLayout"]:
    """Packs every chunk of a bucket, sums the parts of each message as if they were one part of several ranks, and
    unpacks. Compares all memory with the oracle's, written or not. Returns the layouts.

    Stages that are not in `stages` are left out. Each stage gets what the oracle gives. known: of each layout's Piece,
    kept from one implementation to the next.
    """
    original = case.gradients(case.lists(run.has_holes))
    gradients = original.to(run.device, copy=True)
    pieces = pieces_of(run, case, original, gradients, {} if known is None else known)
    whole = pieces[0].layout
    messages = []
    for chunk in range(whole.num_chunks):
        memory, message = guarded(whole.chunk_nbytes, run.device)
        expected = torch.full((whole.chunk_nbytes,), POISON, dtype=torch.uint8)
        for piece in pieces:
            arguments = chunk, *piece.inputs, 1.0, piece.residual.of_reference
            packed = piece.by_oracle(chunk, piece.residual, reference.pack, *arguments)
            piece.of(expected).copy_(packed.view(whole.num_parts, -1))
            if "pack" in stages:
                run.pack(piece.bucket, chunk, case.scale, message, piece.residual)
                piece.residual.check()
        if "pack" in stages:
            assert_bytes(memory, expected)
        if "reduce" in stages:
            check_reduce(run, pieces, chunk, expected, case.scale)
        messages.append(expected)
    if "pack" in stages:
        for piece in pieces:
            check_counts(piece)
    assert_same_bits(gradients, original)
    if "unpack" in stages:
        for chunk, message in enumerate(messages):
            check_unpack(run, case, pieces, chunk, message, original)
        assert_same_bits(gradients, original)
    return [piece.layout for piece in pieces]


def check_reduce(run: Implementation, pieces: list[Piece], chunk: int, parts: torch.Tensor, scale: float) -> None:
    part_stride = pieces[0].layout.part_stride
    memory, sums = guarded(part_stride, run.device)
    expected = torch.full((part_stride,), POISON, dtype=torch.uint8)
    for piece in pieces:
        run.reduce(piece.layout, parts.to(run.device), scale, sums, piece.of_sum, chunk)
        arguments = piece.of(parts).reshape(-1), scale, piece.of_sum.of_reference, chunk
        piece.of(expected).copy_(piece.by_oracle(chunk, piece.of_sum, reference.reduce, *arguments))
        piece.of_sum.check()
    assert_bytes(memory, expected)


def check_counts(piece: Piece) -> None:
    """How many products are not finite: by slice, or if the implementation does not tell them apart, in all."""
    expected = []
    for y, slices in zip(piece.inputs, piece.lists, strict=True):
        expected += nonfinite_by_slice(y, slices)
    found = piece.bucket.counts()
    assert found == expected or (len(found) == 1 and found[0] == sum(expected)), (found, expected)


def check_unpack(
    run: Implementation, case: Case, pieces: list[Piece], chunk: int, message: torch.Tensor, expected: torch.Tensor
) -> None:
    """Unpacks a chunk, and writes what the gradients should then be to `expected`. With several messages the others
    have the first one's elements at other places, some with the other sign."""
    messages = [message]
    for i in range(1, case.num_messages):
        moved = (y.roll(8 * i) * (-1) ** i for y in pieces[0].inputs)
        messages.append(reference.pack(pieces[0].layout, chunk, *moved, 1.0))
    received = torch.cat(messages)
    for piece in pieces:
        layout = piece.layout
        run.unpack(piece.bucket, chunk, received.to(run.device), case.unpack_scale, case.num_messages)
        arguments = chunk, piece.of(received).reshape(-1), case.unpack_scale, case.dtype, case.num_messages
        values = piece.by_oracle(chunk, piece.residual, reference.unpack, *arguments)
        for value, range_of, slices in zip(values, (layout.lossy_range, layout.exact_range), piece.lists, strict=True):
            place(value, range_of(chunk, 0)[0], slices, expected)


def check_hosts(run, in_wire: str, wire_format: str, feedback: bool, block: int = 64, part_numel: int = 640) -> None:
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
        assert_bytes(memory, reference.reduce(layout, parts, 1 / 3, residual.of_reference, chunk, to, 2))
        residual.check()


def check_every_code(run: Implementation, wire: str) -> None:
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
