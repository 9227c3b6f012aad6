"""The epilogue of unpack: the gradients are those of unpack followed by a multiplication, and Σg² is that of the
gradients, with the same bits in every instruction set and for any number of threads."""

import math

import pytest
import torch
from values import CODECS, DTYPES
from values import signed as signed_by_seed

from fusedcomm.native import _C

WIRES = ("fp32", "bf16", "fp16", "int8", "fp8", "int4", "int2", "int8 rotated", "int4 rotated")
UNSCALES = (1.0, 2.0**-16, 1 / 3)
LOSSY, EXACT = [3000, 1, 5, 4097, 36_000, 31], [17, 34_000]


def signed(numels, dtype, seed, gap=0):
    """Slices of random values of both signs over many binades, `gap` elements apart in memory."""
    values = (signed_by_seed(numel + gap, dtype, seed + 100 * index, binades=8) for index, numel in enumerate(numels))
    return [of_slice[gap:] for of_slice in values]


def sum_of_squares(slices):
    return sum(piece.double().square().sum().item() for piece in slices)


def packed(wire, dtype, num_messages=1, num_parts=2, chunk_nbytes=1 << 20):
    """A layout, and its chunks with `num_messages` messages each."""
    name, _, rotated = wire.partition(" ")
    arguments = (128, num_parts, sum(EXACT), sum(LOSSY), chunk_nbytes)
    layout = _C.bucket_layout(name, *arguments, rotated=bool(rotated))
    chunks = []
    for chunk in range(layout.num_chunks):
        messages = []
        for source in range(num_messages):
            out = torch.empty(layout.chunk_nbytes, dtype=torch.uint8)
            lossy, exact = signed(LOSSY, dtype, 10 + source), signed(EXACT, dtype, 20 + source)
            _C.Codec("auto").pack(layout, chunk, lossy, exact, 0.5, out)
            messages.append(out)
        chunks.append(torch.cat(messages))
    return layout, chunks


def unpacked(codec, layout, chunks, dtype, num_messages=1, **epilogue):
    """The slices that unpack writes, and what it returns for each chunk."""
    lossy, exact = signed(LOSSY, dtype, 1, gap=3), signed(EXACT, dtype, 2, gap=1)
    results = [
        codec.unpack(layout, i, chunk, 0.5, lossy, exact, num_messages, **epilogue) for i, chunk in enumerate(chunks)
    ]
    return [*lossy, *exact], results


@pytest.mark.sampled
@pytest.mark.parametrize("num_messages", [1, 3])
@pytest.mark.parametrize("chunk_nbytes", [8192, 1 << 30])
@pytest.mark.parametrize("unscale", UNSCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wire", WIRES)
def test_it_gives_unpacks_gradients_multiplied_and_the_sum_of_their_squares(
    wire, dtype, unscale, chunk_nbytes, num_messages
):
    num_parts = 1 if num_messages > 1 else 2
    layout, chunks = packed(wire, dtype, num_messages, num_parts, chunk_nbytes)
    plain, nothing = unpacked(CODECS["portable-1"], layout, chunks, dtype, num_messages)
    assert set(nothing) == {None}
    expected = [(piece.float() * torch.tensor(unscale)).to(dtype) for piece in plain]
    sums = set()
    for codec in CODECS.values():
        found, squares = unpacked(codec, layout, chunks, dtype, num_messages, unscale=unscale, squares=True)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        sums.add(tuple(squares))
    assert len(sums) == 1
    assert sum(sums.pop()) == pytest.approx(sum_of_squares(expected), rel=1e-12)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("unscale", UNSCALES)
def test_gradients_that_were_summed_in_place(dtype, unscale):
    means = signed([70_001], dtype, 5)[0]
    expected = [(means.float() * torch.tensor(unscale)).to(dtype)]
    sums = set()
    for codec in CODECS.values():
        slices = [means.clone()]
        sums.add(codec.finish_in_place(slices, unscale))
        assert torch.equal(slices[0], expected[0])
    assert len(sums) == 1
    assert sums.pop() == pytest.approx(sum_of_squares(expected), rel=1e-12)


@pytest.mark.sampled
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("at", [0, 40, 60_000, 70_000])
def test_squares_are_finite_only_if_all_gradients_are(dtype, value, at):
    greatest = torch.full((70_001,), torch.finfo(dtype).max, dtype=dtype)
    for codec in CODECS.values():
        slices = [greatest.clone()]
        assert math.isfinite(codec.finish_in_place(slices, 1.0))
        slices[0][at] = value
        assert not math.isfinite(codec.finish_in_place(slices, 1.0))
