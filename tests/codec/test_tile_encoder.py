"""Error feedback, several wires in a message, sums into another layout: the C++ codec against the
oracle, and the oracle against the properties that these must have."""

import pytest
import reference
import torch
from values import BLOCK_WIRES, CODECS, DTYPES, uninitialised
from values import signed as signed_by_seed

from fusedcomm.native import _C

WIRES = ("bf16", "fp16", *BLOCK_WIRES, *(f"{wire} rotated" for wire in BLOCK_WIRES))
FORMATS = (None, "fp32", "bf16")
NOTHING = torch.empty(0)


@pytest.fixture(params=CODECS)
def codec(request):
    return CODECS[request.param]


@pytest.fixture(params=WIRES)
def wire(request):
    return request.param


def layout_of(wire, numel, num_parts=3, block=64, exact_numel=37, max_chunk_nbytes=3000):
    name, _, rotated = wire.partition(" ")
    return _C.bucket_layout(name, block, num_parts, exact_numel, numel, max_chunk_nbytes, rotated=bool(rotated))


def signed(numel, dtype=torch.float32, seed=0, specials=False):
    x = signed_by_seed(numel, dtype, seed, binades=12)
    if specials:
        generator = torch.Generator().manual_seed(seed)
        x[torch.rand(numel, generator=generator) < 0.002] = torch.nan
        x[torch.rand(numel, generator=generator) < 0.002] = -torch.inf
        x[torch.rand(numel, generator=generator) < 0.01] = -0.0
        x[torch.rand(numel, generator=generator) < 0.01] = torch.finfo(dtype).smallest_normal / 4
        x[numel // 2 : numel // 2 + 200] = 0  # whole blocks
    return x


def residual(format, numel):
    return torch.zeros(_C.residual_nbytes(format, numel), dtype=torch.uint8)


def feedbacks(format, numel):
    """(the codec's argument, the oracle's argument): two residuals of zeros. (None, None) without a format."""
    if format is None:
        return None, None
    ours, oracles = (residual(format, numel) for _ in range(2))
    return (format, ours, numel), reference.Feedback(format, oracles)


def same_residual(ours, oracles):
    return ours is None or torch.equal(ours[1], oracles.residual)


# ---- the codec against the oracle


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pack_gives_the_bytes_of_the_oracle_step_after_step(codec, wire, dtype):
    for format in FORMATS:
        layout = layout_of(wire, 5003)
        ours, oracles = feedbacks(format, layout.padded_numel)
        exact = signed(37, dtype, seed=7)
        for step in range(3):
            lossy = signed(5003, dtype, seed=step, specials=step == 1)
            # Slices end within blocks, and one begins at an odd element.
            slices = [lossy[:1], lossy[1:1200].clone(), lossy[1200:1203], lossy[1203:]]
            for chunk in range(layout.num_chunks):
                out = uninitialised(layout.chunk_nbytes)
                codec.pack(layout, chunk, slices, [exact], 1 / 3, out, ours)
                assert torch.equal(out, reference.pack(layout, chunk, lossy, exact, 1 / 3, oracles))
                assert same_residual(ours, oracles), (format, step, chunk)


@pytest.mark.sampled(by=lambda wire, **others: {"scales": wire in BLOCK_WIRES})
def test_reduce_gives_the_bytes_of_the_oracle_step_after_step(codec, wire):
    for format in FORMATS:
        layout = layout_of(wire, 5003)
        numel = layout.num_chunks * layout.part.lossy_numel
        ours, oracles = feedbacks(format, numel)
        for step in range(3):
            lossy, exact = signed(5003, seed=step, specials=step == 1), signed(37, seed=9)
            for chunk in range(layout.num_chunks):
                parts = reference.pack(layout, chunk, lossy, exact, 1.0)
                out = uninitialised(layout.part.nbytes)
                codec.reduce(layout, parts, 1 / 3, out, ours, chunk)
                assert torch.equal(out, reference.reduce(layout, parts, 1 / 3, oracles, chunk))
                assert same_residual(ours, oracles), (format, step, chunk)


@pytest.mark.sampled(by=lambda from_wire, **others: {"from_wire": from_wire})
@pytest.mark.parametrize("from_wire", ("fp32", "bf16", "fp16"))
def test_sums_of_one_layout_are_encoded_in_another(codec, wire, from_wire):
    """As on two levels: the part of each of a host's 2 ranks becomes 3 parts, one for each host."""
    to = layout_of(wire, 5003, num_parts=6)
    (host,) = _C.host_layouts([to], from_wire, 2)
    assert (host.num_parts, host.num_chunks, host.part.lossy_numel) == (2, to.num_chunks, 3 * to.part.lossy_numel)
    assert all(host.lossy_range(c, 1) == (to.lossy_range(c, 3)[0], to.lossy_range(c, 5)[1]) for c in range(2))
    numel = to.num_chunks * 3 * to.part.lossy_numel
    for format in FORMATS:
        ours, oracles = feedbacks(format, numel)
        for step in range(2):
            lossy, exact = signed(5003, seed=step, specials=step == 1), signed(37, seed=9)
            for chunk in range(to.num_chunks):
                parts = reference.pack(host, chunk, lossy, exact, 1.0)
                out = uninitialised(3 * to.part_stride)
                codec.reduce(host, parts, 0.5, out, ours, chunk, to, 3)
                assert torch.equal(out, reference.reduce(host, parts, 0.5, oracles, chunk, to, 3))
                assert same_residual(ours, oracles), (format, step, chunk)


@pytest.mark.sampled
@pytest.mark.parametrize("format", ("fp32", "bf16"))
def test_wires_share_a_message(codec, format):
    """Each layout's piece of every part has the bytes that it would have alone. The whole message is written."""
    formats = [("int4", 32, True, 3001), ("fp8", 64, False, 700), ("int8", 128, False, 5)]
    layouts = _C.bucket_layouts(formats, 3, 41, 1500)
    values = [signed(numel, seed=numel) for _, _, _, numel in formats]
    exact = signed(41, seed=1)
    assert len({layout.num_chunks for layout in layouts}) == 1 and layouts[0].num_chunks > 1
    residuals = [feedbacks(format, layout.padded_numel) for layout in layouts]
    unpacked = [torch.full((numel,), torch.nan) for _, _, _, numel in formats]
    expected = [torch.full((numel,), torch.nan) for _, _, _, numel in formats]
    for chunk in range(layouts[0].num_chunks):
        message = torch.full((layouts[0].chunk_nbytes,), 0xA5, dtype=torch.uint8)
        pieces, summed = [], [torch.full((layouts[0].part_stride,), fill, dtype=torch.uint8) for fill in (0xA5, 0x5A)]
        for layout, value, (ours, oracles) in zip(layouts, values, residuals, strict=True):
            exact_of = exact if layout.exact_numel else NOTHING
            codec.pack(layout, chunk, [value], [exact_of], 1.0, message, ours)
            piece = reference.pack(layout, chunk, value, exact_of, 1.0, oracles)
            pieces.append(piece.view(3, -1))
            assert same_residual(ours, oracles)
        assert torch.equal(message.view(3, -1), torch.cat(pieces, dim=1))
        for layout, piece in zip(layouts, pieces, strict=True):
            begin = layout.part_offset
            for out in summed:
                codec.reduce(layout, message, 1 / 3, out)
                of_layout = out[begin : begin + layout.part.nbytes]
                assert torch.equal(of_layout, reference.reduce(layout, piece.reshape(-1), 1 / 3))
        assert torch.equal(*summed)
        for layout, piece, value, wanted in zip(layouts, pieces, unpacked, expected, strict=True):
            codec.unpack(layout, chunk, message, 1.0, [value], [torch.empty(layout.exact_numel)])
            lossy, _ = reference.unpack(layout, chunk, piece.reshape(-1), 1.0, torch.float32)
            wanted[layout.lossy_range(chunk, 0)[0] : layout.lossy_range(chunk, 2)[1]] = lossy
    assert all(torch.equal(*pair) for pair in zip(unpacked, expected, strict=True))


# ---- bad input


@pytest.mark.sampled
def test_residuals_that_do_not_fit_are_refused(codec):
    layout = layout_of("int8", 1000)
    numel = layout.padded_numel
    out, values, exact = torch.zeros(layout.chunk_nbytes, dtype=torch.uint8), [torch.zeros(1000)], [torch.zeros(37)]
    with pytest.raises(ValueError, match=f"residual has {numel - 64} elements, but this encoder encodes {numel}"):
        codec.pack(layout, 0, values, exact, 1.0, out, ("fp32", residual("fp32", numel - 64), numel - 64))
    with pytest.raises(ValueError, match="residual must have"):
        codec.pack(layout, 0, values, exact, 1.0, out, ("bf16", residual("fp32", numel), numel))
    with pytest.raises(ValueError, match="a residual cannot be 'fp8': use 'fp32' or 'bf16'"):
        codec.pack(layout, 0, values, exact, 1.0, out, ("fp8", residual("fp32", numel), numel))
    with pytest.raises(ValueError, match="cannot become 2 parts of"):
        codec.reduce(layout, out, 1.0, torch.zeros(2 * layout.part_stride, dtype=torch.uint8), num_parts=2)


# ---- what the oracle means


@pytest.mark.parametrize("format", ("fp32", "bf16"))
def test_error_feedback_delays_instead_of_losing(format):
    """The sum of what was sent is the sum of what should have been sent, less the residual. So errors do not add up."""
    layout = layout_of("int4", 1024, num_parts=1, exact_numel=0, block=32, max_chunk_nbytes=1 << 20)
    gradient = signed(1024, seed=3) * 1e-3
    feedback = reference.Feedback(format, residual(format, layout.padded_numel))
    sums = {"without": torch.zeros(1024, dtype=torch.float64), "with": torch.zeros(1024, dtype=torch.float64)}
    num_steps = 200
    for _ in range(num_steps):
        for name, kept in (("without", None), ("with", feedback)):
            parts = reference.pack(layout, 0, gradient, NOTHING, 1.0, kept)
            sums[name] += reference.unpack(layout, 0, parts, 1.0, torch.float32)[0].double()
    errors = {name: ((total / num_steps - gradient).norm() / gradient.norm()).item() for name, total in sums.items()}
    assert errors["without"] > 0.05  # rounding to nearest loses the same in every step
    assert errors["with"] < (0.002 if format == "fp32" else 0.01)


def test_what_is_not_finite_does_not_live_on_in_a_residual():
    layout = layout_of("int8", 256, num_parts=1, exact_numel=0, max_chunk_nbytes=1 << 20)
    feedback = reference.Feedback("fp32", residual("fp32", layout.padded_numel))
    gradient = signed(256, seed=1)
    broken = gradient.clone()
    broken[70] = torch.inf
    broken[200] = torch.nan
    reference.pack(layout, 0, broken, NOTHING, 1.0, feedback)
    kept = feedback.residual.view(torch.float32)
    assert kept.isfinite().all() and not kept[64:128].any() and not kept[192:256].any() and kept[:64].any()
    parts = reference.pack(layout, 0, gradient, NOTHING, 1.0, feedback)
    assert reference.unpack(layout, 0, parts, 1.0, torch.float32)[0].isfinite().all()
