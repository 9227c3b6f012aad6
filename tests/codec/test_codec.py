"""The C++ codec against the oracle: the same bytes on every instruction set, with any number of threads."""

import math
import threading

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import few
from values import BLOCK_WIRES, CODECS, DTYPES, same_bits, signed, uninitialised

from fusedcomm.native import _C

WIRES = ("fp32", "bf16", "fp16", *BLOCK_WIRES, *(f"{wire} rotated" for wire in BLOCK_WIRES))
SCALES = (1.0, 0.25, 1 / 3, -3.0)
NOTHING = torch.empty(0)


@pytest.fixture(params=CODECS)
def codec(request):
    return CODECS[request.param]


@pytest.fixture(params=WIRES)
def wire(request):
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def bucket_layout(wire, *arguments):
    """The layout for a wire in WIRES; `arguments` as for _C.bucket_layout."""
    name, _, rotated = wire.partition(" ")
    return _C.bucket_layout(name, *arguments, rotated=bool(rotated))


def code_dtype(wire):
    return reference.WIRE_DTYPES[wire.partition(" ")[0]]


def pack(codec, layout, chunk, lossy, exact, scale):
    out = uninitialised(layout.chunk_nbytes)
    num_nonfinite = codec.pack(layout, chunk, lossy, exact, scale, out)
    return out, num_nonfinite


def count_nonfinite(x, scale):
    return int((~reference.scaled(x, scale).isfinite()).sum())


def sliced(flat, numels, dtype, offset):
    """Copies `flat` into slices, which are views of one larger tensor with `offset` other elements before each.

    Returns (slices, gaps). gaps() returns the elements outside the slices: writing to slices must leave them at 7.
    """
    memory = torch.full((flat.numel() + offset * (len(numels) + 1),), 7.0, dtype=dtype)
    in_gap = torch.ones(memory.numel(), dtype=torch.bool)
    slices, position, taken = [], 0, 0
    for numel in numels:
        position += offset
        slices.append(memory[position : position + numel])
        slices[-1].copy_(flat[taken : taken + numel])
        in_gap[position : position + numel] = False
        position, taken = position + numel, taken + numel
    return slices, lambda: memory[in_gap]


# ---- every stage against the oracle

# (lossy numel, exact numel, parts, block, max_chunk_nbytes)
SHAPES = {
    "one element": (1, 0, 1, 128, 1 << 20),
    "only exact": (0, 777, 2, 128, 1000),
    "small chunks": (5003, 37, 3, 32, 4096),
    "largest block": (20011, 3, 2, 4096, 1 << 20),
    "more parts than blocks": (100, 1, 7, 128, 1 << 20),
    "several units": (300_007, 70_001, 1, 128, 1 << 30),
}


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("shape", SHAPES)
def test_pack_reduce_and_unpack_give_the_bytes_of_the_oracle(codec, wire, dtype, shape):
    lossy_numel, exact_numel, num_parts, block, max_chunk_nbytes = SHAPES[shape]
    layout = bucket_layout(wire, block, num_parts, exact_numel, lossy_numel, max_chunk_nbytes)
    lossy = signed(lossy_numel, dtype, seed=1, specials=True)
    exact = signed(exact_numel, dtype, seed=2, specials=True)
    scale = SCALES[len(shape) % len(SCALES)]
    unpacked = [torch.zeros_like(lossy), torch.zeros_like(exact)]
    expected_unpacked = [torch.zeros_like(lossy), torch.zeros_like(exact)]
    num_nonfinite = 0
    for chunk in range(layout.num_chunks):
        packed, chunk_nonfinite = pack(codec, layout, chunk, [lossy], [exact], scale)
        assert torch.equal(packed, reference.pack(layout, chunk, lossy, exact, scale))
        num_nonfinite += chunk_nonfinite

        reduced = uninitialised(layout.part.nbytes)
        codec.reduce(layout, packed, scale, reduced)
        assert torch.equal(reduced, reference.reduce(layout, packed, scale))

        codec.unpack(layout, chunk, packed, scale, [unpacked[0]], [unpacked[1]])
        values = reference.unpack(layout, chunk, packed, scale, dtype)
        ranges = (layout.lossy_range, layout.exact_range)
        for result, range_of, value in zip(expected_unpacked, ranges, values, strict=True):
            result[range_of(chunk, 0)[0] : range_of(chunk, num_parts - 1)[1]] = value
    assert num_nonfinite == count_nonfinite(lossy, scale) + count_nonfinite(exact, scale)
    assert all(same_bits(*pair) for pair in zip(unpacked, expected_unpacked, strict=True))


@pytest.mark.sampled
def test_unpack_of_several_messages_sums_them_as_the_oracle(codec, wire, dtype):
    layout = bucket_layout(wire, 64, 1, 333, 9001, 2048)
    assert layout.num_chunks > 1
    for num_messages, numels, offset in ((2, ([9001], [333]), 0), (3, ([1, 40, 5000, 3960], [33, 300]), 3)):
        sent = [
            (signed(9001, dtype, seed=rank, specials=True), signed(333, dtype, seed=50 + rank, specials=True))
            for rank in range(num_messages)
        ]
        (lossy, lossy_gaps), (exact, exact_gaps) = (
            sliced(torch.zeros(sum(sizes), dtype=dtype), sizes, dtype, offset) for sizes in numels
        )
        expected = [torch.zeros(9001, dtype=dtype), torch.zeros(333, dtype=dtype)]
        for chunk in range(layout.num_chunks):
            messages = [pack(codec, layout, chunk, [of_lossy], [of_exact], 0.7)[0] for of_lossy, of_exact in sent]
            codec.unpack(layout, chunk, torch.cat(messages), 0.5, lossy, exact, num_messages)
            values = reference.unpack(layout, chunk, torch.cat(messages), 0.5, dtype, num_messages)
            for result, range_of, value in zip(expected, (layout.lossy_range, layout.exact_range), values, strict=True):
                result[slice(*range_of(chunk, 0))] = value
        assert same_bits(torch.cat(lossy), expected[0]) and same_bits(torch.cat(exact), expected[1])
        assert (lossy_gaps() == 7).all() and (exact_gaps() == 7).all()


@pytest.mark.sampled
def test_messages_of_several_parts_are_not_summed(codec):
    layout = bucket_layout("bf16", 128, 2, 0, 1000, 1 << 20)
    with pytest.raises(ValueError, match="2 messages of 2 parts cannot be summed"):
        codec.unpack(
            layout, 0, torch.zeros(2 * layout.chunk_nbytes, dtype=torch.uint8), 1.0, [torch.zeros(1000)], [], 2
        )
    with pytest.raises(ValueError, match="num_messages=0 is not possible"):
        codec.unpack(layout, 0, torch.zeros(layout.chunk_nbytes, dtype=torch.uint8), 1.0, [torch.zeros(1000)], [], 0)


def check_slices(codec, layout, flats, numels, offset, scale):
    """Packs from slices of the lossy and the exact elements, and unpacks into them.

    The slices have `numels` elements and are `offset` elements apart.
    """
    dtype = flats[0].dtype
    (lossy, lossy_gaps), (exact, exact_gaps) = (
        sliced(flat, sizes, dtype, offset) for flat, sizes in zip(flats, numels, strict=True)
    )
    chunks = [pack(codec, layout, chunk, lossy, exact, scale)[0] for chunk in range(layout.num_chunks)]
    for chunk, packed in enumerate(chunks):
        assert torch.equal(packed, reference.pack(layout, chunk, *flats, scale))
        codec.unpack(layout, chunk, packed, 0.5, lossy, exact)
    results = [torch.cat([*slices, NOTHING.to(dtype)]) for slices in (lossy, exact)]
    for chunk, packed in enumerate(chunks):
        values = reference.unpack(layout, chunk, packed, 0.5, dtype)
        for result, range_of, value in zip(results, (layout.lossy_range, layout.exact_range), values, strict=True):
            assert same_bits(result[range_of(chunk, 0)[0] : range_of(chunk, layout.num_parts - 1)[1]], value)
    assert torch.all(lossy_gaps() == 7)
    assert torch.all(exact_gaps() == 7)


@pytest.mark.sampled
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("block", [32, 128])
def test_blocks_that_straddle_slices(codec, wire, dtype, block, offset):
    numels = [1, 31, 129, 0, 300, 64, 7, 500, 33, 2, 2, 2, 1024], [5, 0, 1, 40]
    flats = [signed(sum(sizes), dtype, seed) for seed, sizes in enumerate(numels)]
    layout = bucket_layout(wire, block, 2, flats[1].numel(), flats[0].numel(), 1500)
    check_slices(codec, layout, flats, numels, offset, 1 / 3)


slice_numels = st.lists(st.one_of(st.integers(0, 3), st.integers(30, 700)), max_size=8)


@settings(deadline=None, max_examples=60)
@given(
    wire=st.sampled_from(WIRES),
    dtype=st.sampled_from(DTYPES),
    numels=st.tuples(slice_numels, slice_numels),
    offset=st.integers(0, 5),
    num_parts=st.integers(1, 4),
    block=st.sampled_from([32, 64, 128, 1024]),
    max_chunk_nbytes=st.sampled_from([300, 1500, 1 << 20]),
    scale=st.sampled_from(SCALES),
    seed=st.integers(0, 1000),
)
def test_ragged_and_misaligned_slices(wire, dtype, numels, offset, num_parts, block, max_chunk_nbytes, scale, seed):
    layout = bucket_layout(wire, block, num_parts, sum(numels[1]), sum(numels[0]), max_chunk_nbytes)
    flats = [signed(sum(sizes), dtype, seed + i, specials=True) for i, sizes in enumerate(numels)]
    for codec in CODECS.values():
        check_slices(codec, layout, flats, numels, offset, scale)


@pytest.mark.sampled
@pytest.mark.parametrize("wire", few(["fp32", "bf16", "fp16", "int8", "fp8 rotated", "int4"], "bf16", "int8"))
@pytest.mark.parametrize(("dtype", "offset"), [*((dtype, 0) for dtype in DTYPES), (torch.float32, 1)], ids=str)
def test_outputs_that_bypass_the_caches(wire, dtype, offset):
    """The outputs are large enough for that in every dtype. With an offset, they lack the alignment that it needs."""
    numels = [4_000_000, 3, 2**23 - 4_000_000]
    flat = signed(sum(numels), dtype, seed=3, specials=True)
    layout = bucket_layout(wire, 128, 1, 0, flat.numel(), 1 << 30)
    expected = reference.pack(layout, 0, flat, NOTHING, 0.5)
    expected_unpacked = reference.unpack(layout, 0, expected, 2.0, dtype)[0]
    for codec in CODECS.values():
        slices, gaps = sliced(flat, numels, dtype, offset)
        packed, _ = pack(codec, layout, 0, slices, [], 0.5)
        assert torch.equal(packed, expected)
        codec.unpack(layout, 0, packed, 2.0, slices, [])
        assert same_bits(torch.cat(slices), expected_unpacked)
        assert torch.all(gaps() == 7)


# ---- every value


@pytest.mark.sampled
@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_every_16_bit_code_and_its_neighbourhood(codec, wire):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    layout = bucket_layout(wire, 128, 1, 0, 2**16, 1 << 30)
    codes = patterns.view(torch.uint8).clone()
    values = torch.empty(2**16)
    codec.unpack(layout, 0, codes, 1.0, [values], [])
    assert same_bits(values, reference.unpack(layout, 0, codes, 1.0, torch.float32)[0])
    # Each value's fp32 pattern, the pattern half way to the next value, and one ulp to either side of both.
    bits = values.view(torch.int32)
    half_step = 1 << (15 if wire == "bf16" else 12)
    for distance in (-1, 0, 1, half_step - 1, half_step, half_step + 1):
        x = (bits + distance).view(torch.float32)
        packed, _ = pack(codec, layout, 0, [x], [], 1.0)
        assert torch.equal(packed, reference.pack(layout, 0, x, NOTHING, 1.0))


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("wire", BLOCK_WIRES)
@pytest.mark.parametrize("rotated", ["", " rotated"])
@pytest.mark.parametrize("block", [32, 128, 4096])
def test_special_blocks(codec, wire, rotated, dtype, block):
    rows = torch.zeros(18, block)
    rows[1] = -3.0
    rows[2, 5], rows[2, 6] = 60000.0, 1.0
    rows[3] = 2.0**-140
    rows[4] = 2.0**-100
    rows[5] = 2.0**-100 * (1 - 2**-24)
    rows[6, -1] = math.inf
    rows[7, 0], rows[7, 1], rows[7, 2] = -math.inf, math.nan, 1.0
    rows[8] = math.nan
    rows[9] = torch.finfo(torch.float32).max
    rows[10, : block // 2] = torch.arange(block // 2) * -0.5
    rows[11] = -0.0
    # Ties of every format beside the greatest code, and values that round to subnormals or to zero.
    greatest = reference.GREATEST_CODE[wire]
    rows[12, ::2] = torch.linspace(-greatest, greatest, 64).repeat(block // 2)[: block // 2]
    rows[12, 0] = greatest
    rows[13] = (torch.arange(block) % 200 - 100) * 2.0**-11
    rows[13, 0] = greatest
    rows[14] = (torch.arange(block) % 400 - 200) * 2.0**-18
    rows[14, 0] = -greatest
    rows[15, 3] = 2.0**-96  # a rotation spreads it over 32 elements, all of this size
    rows[16, 31] = 1.1 * 2.0**-100
    rows[17] = torch.finfo(dtype).max * (torch.arange(block) % 2 * 2 - 1)  # its rotation overflows
    flat = rows.view(-1).to(dtype)
    layout = bucket_layout(wire + rotated, block, 1, 0, flat.numel(), 1 << 30)
    packed, num_nonfinite = pack(codec, layout, 0, [flat], [], 1.0)
    assert torch.equal(packed, reference.pack(layout, 0, flat, NOTHING, 1.0))
    assert num_nonfinite == count_nonfinite(flat, 1.0)
    unpacked = torch.empty_like(flat)
    codec.unpack(layout, 0, packed, -0.5, [unpacked], [])
    assert same_bits(unpacked, reference.unpack(layout, 0, packed, -0.5, dtype)[0])


@pytest.mark.sampled
def test_every_fp8_code_and_its_neighbourhood(codec):
    """Blocks with a scale of 1: each value that has a code, the middle to the next value, one ulp to either side."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    values = codes.view(code_dtype("fp8")).float()
    values = values[values.isfinite()].sort().values
    middles = (values[1:] + values[:-1]) / 2
    exact = torch.cat([values, middles])
    near = torch.cat([exact, *(exact.nextafter(torch.tensor(end)) for end in (-math.inf, math.inf))])
    near = near.clamp(values[0], values[-1])
    flat = torch.nn.functional.pad(near, (0, -near.numel() % 31)).view(-1, 31)
    flat = torch.nn.functional.pad(flat, (1, 0), value=values[-1].item()).reshape(-1)
    layout = bucket_layout("fp8", 32, 1, 0, flat.numel(), 1 << 30)
    packed, _ = pack(codec, layout, 0, [flat], [], 1.0)
    assert torch.equal(packed, reference.pack(layout, 0, flat, NOTHING, 1.0))
    stored = packed[layout.part.code_offset :][: flat.numel()].view(code_dtype("fp8"))
    assert same_bits(stored, flat.to(code_dtype("fp8")))
    unpacked = torch.empty_like(flat)
    codec.unpack(layout, 0, packed, 1.0, [unpacked], [])
    assert same_bits(unpacked, stored.float())


@pytest.mark.sampled
def test_every_byte_of_int4(codec):
    layout = bucket_layout("int4", 32, 1, 0, 512, 1 << 30)
    wire_bytes = torch.zeros(layout.chunk_nbytes, dtype=torch.uint8)
    wire_bytes[: 16 * 2].view(torch.bfloat16)[:] = torch.arange(1, 17) / 4
    wire_bytes[layout.part.code_offset :][:256] = torch.arange(256)
    unpacked = torch.empty(512)
    codec.unpack(layout, 0, wire_bytes, 2.0, [unpacked], [])
    nibbles = [nibble for byte in range(256) for nibble in (byte & 15, byte >> 4)]
    codes = [n - 16 if n > 7 else n for n in nibbles]
    expected = [c * (832 + 3 * c * c) / 1024 * (1 + i // 32) / 2 for i, c in enumerate(codes)]
    assert unpacked.tolist() == expected


@pytest.mark.sampled
@pytest.mark.parametrize("wire", ["int4", "int4 rotated", "fp8 rotated"])
def test_slices_of_one_element_each(codec, wire, dtype):
    """Slices start within a byte, a rotation and a block."""
    flat = signed(333, dtype, seed=12, specials=True)
    layout = bucket_layout(wire, 32, 2, 0, 333, 1 << 30)
    check_slices(codec, layout, [flat, flat[:0]], [[1] * 333, []], 1, 1 / 3)


@pytest.mark.sampled
def test_nonfinite_elements_are_counted_before_a_rotation(codec, wire):
    flat = torch.full((1000,), 3e38)  # most of the rotated elements overflow
    flat[[3, 500, 501]] = torch.tensor([math.nan, math.inf, -math.inf])
    layout = bucket_layout(wire, 128, 2, 0, flat.numel(), 1 << 30)
    packed, num_nonfinite = pack(codec, layout, 0, [flat], [], 1.0)
    assert num_nonfinite == 3
    assert torch.equal(packed, reference.pack(layout, 0, flat, NOTHING, 1.0))


@pytest.mark.sampled
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("scale", [math.inf, math.nan, 1e30, 1e-40])
def test_scales_that_overflow_or_vanish(codec, wire, scale):
    x = signed(5003, seed=5)
    layout = bucket_layout(wire, 128, 2, 0, x.numel(), 1 << 30)
    packed, num_nonfinite = pack(codec, layout, 0, [x], [], scale)
    assert torch.equal(packed, reference.pack(layout, 0, x, NOTHING, scale))
    assert num_nonfinite == count_nonfinite(x, scale)


# ---- reduce


@pytest.mark.sampled
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 7, 8, 9, 17])
def test_any_number_of_ranks(codec, wire, num_ranks):
    part_numel, exact_numel = 5000, 333
    layout = bucket_layout(wire, 64, num_ranks, exact_numel * num_ranks, part_numel * num_ranks, 1 << 30)
    single = bucket_layout(wire, 64, 1, layout.part.exact_numel, layout.part.lossy_numel, 1 << 30)
    assert single.part.nbytes == layout.part.nbytes
    numels = ((0, single.lossy_numel), (100, single.exact_numel))
    inputs = [[signed(numel, seed=seed + rank, specials=True) for seed, numel in numels] for rank in range(num_ranks)]
    parts = torch.cat([reference.pack(single, 0, *of_rank, 1.0) for of_rank in inputs])
    out = uninitialised(layout.part.nbytes)
    codec.reduce(layout, parts, 1 / num_ranks, out)
    assert torch.equal(out, reference.reduce(layout, parts, 1 / num_ranks))


# ---- what the result does not depend on


@pytest.mark.sampled
def test_chunk_size_changes_nothing(codec, wire, dtype):
    lossy, exact = signed(40_009, dtype, seed=6), signed(1_003, dtype, seed=7)
    results = set()
    for max_chunk_nbytes in (1, 5000, 65536, 1 << 30):
        layout = bucket_layout(wire, 128, 2, exact.numel(), lossy.numel(), max_chunk_nbytes)
        unpacked = [torch.empty_like(lossy), torch.empty_like(exact)]
        for chunk in range(layout.num_chunks):
            packed, _ = pack(codec, layout, chunk, [lossy], [exact], 0.5)
            codec.unpack(layout, chunk, packed, 2.0, [unpacked[0]], [unpacked[1]])
        results.add(b"".join(bytes(x.view(torch.uint8).tolist()) for x in unpacked))
    assert len(results) == 1


@pytest.mark.sampled
def test_the_threads_floating_point_mode_changes_nothing(codec, wire):
    x = torch.cat([signed(4000, seed=8) * 2.0**-130, signed(1003, seed=9)])
    layout = bucket_layout(wire, 128, 1, 0, x.numel(), 1 << 30)
    expected = reference.pack(layout, 0, x, NOTHING, 0.5)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        packed, _ = pack(codec, layout, 0, [x], [], 0.5)
        assert torch.tensor(1e-40).mul(1.0).item() == 0  # the mode is still set
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(packed, expected)


@pytest.mark.sampled
def test_one_codec_serves_several_threads(codec):
    layout = bucket_layout("int8", 128, 2, 500, 200_003, 1 << 30)
    inputs = [(signed(200_003, seed=s), signed(500, seed=s)) for s in range(4)]
    expected = [reference.pack(layout, 0, *elements, 1.0) for elements in inputs]
    failures = []

    def work(index):
        lossy, exact = inputs[index]
        unpacked = torch.empty_like(lossy)
        wanted = reference.unpack(layout, 0, expected[index], 1.0, torch.float32)[0]
        for _ in range(20):
            packed, _ = pack(codec, layout, 0, [lossy], [exact], 1.0)
            codec.unpack(layout, 0, packed, 1.0, [unpacked], [torch.empty_like(exact)])
            if not torch.equal(packed, expected[index]) or not torch.equal(unpacked, wanted):
                failures.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.sampled(by=lambda wire: {"scales": wire.partition(" ")[0] in BLOCK_WIRES})
def test_more_than_2_to_the_31_elements(wire):
    """Only the end is touched, so the tensor takes address space but hardly any memory."""
    x = torch.empty(2**31 + 1003, dtype=torch.bfloat16)
    layout = bucket_layout(wire, 128, 2, 0, x.numel(), 1 << 20)
    chunk = layout.num_chunks - 1
    ranges = [layout.lossy_range(chunk, part) for part in range(2)]
    assert ranges[0][0] > 2**31 - 2**22
    assert ranges[1][1] == x.numel()
    begin = ranges[0][0]
    x[begin:] = signed(x.numel() - begin, torch.bfloat16, seed=10)
    codec = _C.Codec()
    packed, _ = pack(codec, layout, chunk, [x], [], 0.5)
    unpacked = []
    for part, (first, last) in enumerate(ranges):
        y = reference.scaled(x[first:last], 0.5)
        y = torch.nn.functional.pad(y, (0, -y.numel() % 32)) if layout.rotated else y
        codes, scales = reference.encode(reference.rotate(y) if layout.rotated else y, layout.wire, 128)
        codes_bytes = codes.view(torch.uint8)
        begin_of_codes = part * layout.part.nbytes + layout.part.code_offset
        assert torch.equal(packed[begin_of_codes:][: codes_bytes.numel()], codes_bytes)
        decoded = reference.decode(codes, scales, layout.wire, 128)
        decoded = reference.unrotate(decoded) if layout.rotated else decoded
        unpacked.append(reference.round_to(2 * decoded[: last - first], torch.bfloat16))
    codec.unpack(layout, chunk, packed, 2.0, [x], [])
    assert same_bits(x[begin:], torch.cat(unpacked))


# ---- arguments


def test_isa_and_threads():
    assert _C.available_isas()[0] == "portable"
    assert _C.Codec().isa == _C.available_isas()[-1]
    with pytest.raises(ValueError, match="isa='sse9' is not possible here: use one of auto, portable"):
        _C.Codec("sse9")
    with pytest.raises(ValueError, match="num_threads=0 is not possible"):
        _C.Codec("auto", 0)


LAYOUT = bucket_layout("bf16", 128, 1, 16, 1000, 1 << 20)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"chunk": 1}, ValueError, "chunk 1 does not exist; the number of chunks is 1"),
        ({"chunk": -1}, ValueError, "chunk -1 does not exist; the number of chunks is 1"),
        ({"lossy": [torch.zeros(999)]}, ValueError, "lossy slices have 999 elements, but their layout has 1000"),
        ({"exact": []}, ValueError, "exact slices have 0 elements, but their layout has 16"),
        ({"lossy": [torch.zeros(1000).double()]}, TypeError, "float32, bfloat16 or float16, not Double"),
        ({"lossy": [torch.zeros(500), torch.zeros(500).half()]}, ValueError, "must have one dtype"),
        ({"lossy": [torch.zeros(2000)[::2]]}, ValueError, "a slice must be a contiguous CPU tensor"),
        ({"lossy": [torch.zeros(1000, device="meta")]}, ValueError, "not one on meta"),
        ({"wire_bytes": torch.zeros(LAYOUT.chunk_nbytes - 1, dtype=torch.uint8)}, ValueError, "bytes, not"),
        ({"wire_bytes": torch.zeros(LAYOUT.chunk_nbytes, dtype=torch.int8)}, TypeError, "must be uint8, not Char"),
        ({"wire_bytes": torch.zeros(LAYOUT.chunk_nbytes + 1, dtype=torch.uint8)[1:]}, ValueError, "multiple of 16"),
    ],
    ids=lambda value: str(list(value)[0]) if isinstance(value, dict) else None,
)
def test_wrong_arguments_are_named(changed, error, message):
    codec = _C.Codec()
    right = {
        "chunk": 0,
        "lossy": [torch.zeros(1000)],
        "exact": [torch.zeros(16)],
        "wire_bytes": torch.zeros(LAYOUT.chunk_nbytes, dtype=torch.uint8),
    }
    given_arguments = {**right, **changed}
    chunk, lossy, exact, wire_bytes = given_arguments.values()
    with pytest.raises(error, match=message):
        codec.pack(LAYOUT, chunk, lossy, exact, 1.0, wire_bytes)
    with pytest.raises(error, match=message):
        codec.unpack(LAYOUT, chunk, wire_bytes, 1.0, lossy, exact)


def test_reduce_refuses_other_sizes():
    layout = bucket_layout("bf16", 128, 2, 0, 1000, 1 << 20)
    parts, out = torch.zeros(layout.chunk_nbytes, dtype=torch.uint8), uninitialised(layout.part.nbytes)
    with pytest.raises(ValueError, match=f"parts must have {layout.chunk_nbytes} bytes"):
        _C.Codec().reduce(layout, parts[:16], 1.0, out)
    with pytest.raises(ValueError, match=f"out must have {layout.part.nbytes} bytes"):
        _C.Codec().reduce(layout, parts, 1.0, out[:16])
