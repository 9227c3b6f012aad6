"""The kernels against the oracle: the same bytes on the wire, the same bits in memory, and nothing else touched.

Without a GPU they run on CPU tensors, in Triton's interpreter. It is slow, so what depends only on the geometry is
tested with small tiles.
"""

import dataclasses
import itertools
import math

import interpreter
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from values import DTYPES, signed

from fusedcomm.native import _C

triton = pytest.importorskip("triton")

from launchers import Feedback, make_bucket, pack, reduce, scale_in_place, unpack  # noqa: E402

from fusedcomm.kernels.variants import TILE, tile_of  # noqa: E402

interpreter.mend()

# Under the interpreter numpy warns of every Inf and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

WIRES = ("fp32", "bf16", "fp16", "int8", "fp8", "int4")
BLOCKS = WIRES[3:]
ROTATED = ("int8-rotated", "fp8-rotated", "int4-rotated")
CHUNK_NBYTES = 1 << 40  # more than any bucket here
POISON = 0xA5
GUARD_NBYTES = 64
GAP = 7.0  # the value of the elements between slices


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    has_gpu = torch.cuda.is_available()
    if request.param == "cuda" and not has_gpu:
        pytest.skip("no CUDA GPU here")
    if request.param == "cpu" and has_gpu:
        pytest.skip("with a GPU the same tests run there")
    return request.param


@pytest.fixture(params=WIRES)
def wire(request):
    return request.param


@pytest.fixture(params=(*WIRES, *ROTATED))
def wire_format(request):
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def bucket_layout(wire_format, block, num_parts, exact_numel, lossy_numel, max_chunk_nbytes=CHUNK_NBYTES):
    wire, _, rotated = wire_format.partition("-")
    numels = num_parts, exact_numel, lossy_numel
    return _C.bucket_layout(wire, block, *numels, max_chunk_nbytes, rotated=bool(rotated))


# ---- inputs


def lay_out(numels, gaps, begin):
    """Returns (slices, their end): slices (offset, numel) from `begin` on, with gaps[i % len(gaps)] other elements
    before slice i. A negative numel is that of a hole."""
    slices = []
    gap = itertools.cycle(gaps)
    for numel in numels:
        if numel < 0:
            slices.append((_C.HOLE, -numel))
            continue
        begin += next(gap)
        slices.append((begin, numel))
        begin += numel
    return slices, begin


def with_holes(numels, gaps, dtype=torch.float32):
    """The numels (lossy, exact) of slices that are laid out with these gaps, with the holes that they need."""
    result, end = [], 0
    for of_list in numels:
        slices, end = lay_out(of_list, gaps, end)
        listed = _C.with_holes(slices, dtype.itemsize)
        result.append([-numel if offset == _C.HOLE else numel for offset, numel in listed])
    return tuple(result)


def count(numels):
    return sum(map(abs, numels))


def ranges(slices):
    """(begin in the list, offset, numel) of each slice that is no hole."""
    begins = itertools.accumulate((numel for _, numel in slices), initial=0)
    return [(begin, *of_slice) for begin, of_slice in zip(begins, slices, strict=False) if of_slice[0] != _C.HOLE]


def place(slices, values, grads):
    """Writes the flat values of a slice list where its slices lie."""
    for begin, offset, numel in ranges(slices):
        grads[offset : offset + numel] = values[begin : begin + numel]


def gather(grads, slices):
    flat = grads.new_zeros(sum(numel for _, numel in slices))
    for begin, offset, numel in ranges(slices):
        flat[begin : begin + numel] = grads[offset : offset + numel]
    return flat


def scaled(flat, slices, scale):
    """fp32: a list's elements times `scale`; +0 in holes, whatever the scale."""
    y, result = reference.scaled(flat, scale), torch.zeros(len(flat))
    for begin, _, numel in ranges(slices):
        result[begin : begin + numel] = y[begin : begin + numel]
    return result


def guarded(nbytes, device):
    """(memory, its first nbytes), filled with POISON: a byte that is not written shows, and a byte written past the
    end, too."""
    memory = torch.full((nbytes + GUARD_NBYTES,), POISON, dtype=torch.uint8, device=device)
    return memory, memory[:nbytes]


def assert_bytes(memory, expected):
    """`memory` holds the expected bytes, and its guard is untouched."""
    result, guard = memory.cpu().split([expected.numel(), GUARD_NBYTES])
    different = (result != expected).nonzero()
    assert len(different) == 0, f"{len(different)} of {expected.numel()} bytes differ, first at {int(different[0])}"
    assert torch.all(guard == POISON)


def assert_same_bits(result, expected):
    assert result.dtype == expected.dtype
    integers = torch.int32 if result.dtype == torch.float32 else torch.int16
    different = (result.cpu().view(integers) != expected.view(integers)).nonzero()
    assert len(different) == 0, (
        f"{len(different)} of {len(expected)} elements differ, first at {int(different[0])}: "
        f"{result[different[0]]} instead of {expected[different[0]]}"
    )


def nonfinite_by_slice(flat, slices, scale):
    bad = ~scaled(flat, slices, scale).isfinite()
    return [int(bad[begin : begin + numel].sum()) for begin, _, numel in ranges(slices)]


# ---- every kernel on one bucket


def with_guarded_tables(bucket):
    """The same bucket, with a 0 behind each table: a kernel that reads it finds another slice."""

    def guarded_tables(listed):
        fields = (torch.nn.functional.pad(x, (0, 1))[:-1] if isinstance(x, torch.Tensor) else x for x in listed)
        return type(listed)(*fields)

    return dataclasses.replace(bucket, lossy=guarded_tables(bucket.lossy), exact=guarded_tables(bucket.exact))


def check_bucket(layout, flats, numels, gaps, device, tile=256, num_programs=3, scale=0.3, unpack_scale=3.0, begin=0):
    """Packs, reduces and unpacks every chunk of a bucket, and compares all memory, written or not, with the oracle's.

    `flats` (lossy, exact) are the elements' values, `numels` (lossy, exact) their slices, as from with_holes. `begin`:
    elements before the first slice. Unless 16 bytes are a divisor of them no slice is aligned.
    """
    dtype = flats[0].dtype
    lossy_slices, end = lay_out(numels[0], gaps, begin)
    exact_slices, end = lay_out(numels[1], gaps, end)
    original = torch.full((end + 23 - end % 8,), GAP, dtype=dtype)  # a multiple of 16 bytes
    for slices, flat in ((lossy_slices, flats[0]), (exact_slices, flats[1])):
        place(slices, flat, original)
    grads = original.to(device)
    bucket = with_guarded_tables(make_bucket(layout, grads, lossy_slices, exact_slices, tile))

    expected = original.clone()
    results = [torch.zeros_like(flats[0]), torch.zeros_like(flats[1])]
    products = scaled(flats[0], lossy_slices, scale), scaled(flats[1], exact_slices, scale)
    chunks = []
    for chunk in range(layout.num_chunks):
        memory, packed = guarded(layout.chunk_nbytes, device)
        pack(bucket, chunk, scale, packed, num_programs)
        expected_packed = reference.pack(layout, chunk, *products, 1.0)
        assert_bytes(memory, expected_packed)
        chunks.append(packed)

        memory, reduced = guarded(layout.part.nbytes, device)
        reduce(layout, packed, scale, reduced, num_programs, tile)
        assert_bytes(memory, reference.reduce(layout, expected_packed, scale))

        values = reference.unpack(layout, chunk, expected_packed, unpack_scale, dtype)
        for result, range_of, value in zip(results, (layout.lossy_range, layout.exact_range), values, strict=True):
            result[range_of(chunk, 0)[0] : range_of(chunk, layout.num_parts - 1)[1]] = value
    assert_same_bits(grads, original)
    for listed, flat, slices in ((bucket.lossy, flats[0], lossy_slices), (bucket.exact, flats[1], exact_slices)):
        assert listed.counts.tolist() == nonfinite_by_slice(flat, slices, scale)

    for chunk, packed in enumerate(chunks):
        unpack(bucket, chunk, packed, unpack_scale, num_programs)
    for slices, result in ((lossy_slices, results[0]), (exact_slices, results[1])):
        place(slices, result, expected)
    assert_same_bits(grads, expected)
    return bucket


RAGGED = (  # tiny slices, empty ones at both ends and side by side, and one that crosses tiles, parts and chunks
    [0, 1, 31, 129, 0, 0, 300, 64, 7, 900, 33, 2, 2, 2, 256, 0],
    [5, 0, 1, 301, 0],
)
GAPS = [0, 1, 0, 0, 3, 0, 8]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("dtype", "flat", "num_programs"),
    [
        (torch.float32, True, 1),
        (torch.float32, False, 20),
        *((dtype, False, 3) for dtype in DTYPES[1:]),
    ],
    ids=str,
)
def test_gives_the_bytes_of_the_oracle(device, wire_format, dtype, flat, num_programs):
    numels = ([1000, 1, 2001], []) if flat else with_holes(RAGGED, GAPS, dtype)
    lossy_numel, exact_numel = map(count, numels)
    whole = bucket_layout(wire_format, 32, 2, exact_numel, lossy_numel)
    layout = bucket_layout(wire_format, 32, 2, exact_numel, lossy_numel, whole.chunk_nbytes // 2)
    assert layout.num_chunks > 1
    flats = signed(lossy_numel, dtype, 1, specials=True), signed(exact_numel, dtype, 2, specials=True)
    check_bucket(layout, flats, numels, [0] if flat else GAPS, device, num_programs=num_programs)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_slices_that_are_not_aligned(device, wire, dtype):
    """As of gradients that are views: they lie one element after the place that the list was made for."""
    numels = with_holes(RAGGED, GAPS, dtype)
    layout = bucket_layout(wire, 32, 2, count(numels[1]), count(numels[0]))
    flats = [signed(count(of_list), dtype, 1, specials=True) for of_list in numels]
    bucket = check_bucket(layout, flats, numels, GAPS, device, begin=1)
    assert bucket.lossy.tile_run.tolist().count(-1) > 3


@pytest.mark.sampled
def test_a_last_tile_that_is_full_reads_no_table_past_its_end(device, wire):
    numels = [100, 300, 112], [60, 68, 128]  # multiples of 16 bytes need no holes
    layout = _C.bucket_layout(wire, 32, 1, 256, 512, CHUNK_NBYTES)
    check_bucket(layout, (signed(512), signed(256, seed=1)), numels, [4], device, tile=256)


@pytest.mark.sampled
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 9])
def test_sums_in_rank_order(device, wire, world_size):
    numels = with_holes(([700, 333], [50]), [0])
    layout = _C.bucket_layout(wire, 32, world_size, count(numels[1]), 1033, CHUNK_NBYTES)
    flats = signed(1033, seed=world_size), signed(count(numels[1]), seed=3)
    check_bucket(layout, flats, numels, [0], device, scale=1 / 3, num_programs=2)
    layout = _C.bucket_layout(wire, 32, world_size, 0, 300 * world_size, CHUNK_NBYTES)
    numel = layout.part.lossy_numel
    of_part = _C.bucket_layout(wire, 32, 1, 0, numel, CHUNK_NBYTES)
    values = (signed(numel, seed=rank) * (-1) ** rank for rank in range(world_size))
    parts = torch.cat([reference.pack(of_part, 0, value, torch.empty(0), 1.0) for value in values])
    memory, reduced = guarded(layout.part.nbytes, device)
    reduce(layout, parts.to(device), 1 / world_size, reduced, 2, tile=128)
    assert_bytes(memory, reference.reduce(layout, parts, 1 / world_size))


def test_a_sum_of_minus_zeros_is_minus_zero(device):
    layout = _C.bucket_layout("fp32", 32, 3, 0, 24, CHUNK_NBYTES)
    memory, reduced = guarded(layout.part.nbytes, device)
    reduce(layout, torch.full((24,), -0.0).view(torch.uint8).to(device), 1.0, reduced, 1, tile=64)
    assert torch.all(reduced.cpu().view(torch.int32) == -(2**31))


@pytest.mark.sampled
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "ragged"])
@pytest.mark.parametrize("block", [32, 128, 4096])
@pytest.mark.parametrize("wire_format", ["int8", "int4", "fp8-rotated"])
def test_blocks(device, wire_format, block, flat):
    tile = max(512, block)
    numels = ([2 * tile + 100, 3 * tile + 5], []) if flat else ([2 * tile + 100, 3, 3 * tile + 5], [70])
    numels = with_holes(numels, [0, 4])
    lossy_numel, exact_numel = map(count, numels)
    layout = bucket_layout(wire_format, block, 2, exact_numel, lossy_numel)
    flats = signed(lossy_numel, seed=5, specials=True), signed(exact_numel, seed=6)
    check_bucket(layout, flats, numels, [0, 4], device, tile=tile, num_programs=2)


@pytest.mark.sampled
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4, 5, 6, 7, 8, 9])
@pytest.mark.parametrize("wire_format", ["int8", "int4"])
def test_zeroes_the_padding_after_the_scales(device, wire_format, num_blocks):
    layout = bucket_layout(wire_format, 32, 1, 0, 32 * num_blocks - 5)
    flats = signed(32 * num_blocks - 5), signed(0)
    check_bucket(layout, flats, ([32 * num_blocks - 5], []), [0], device, tile=64)


@pytest.mark.sampled
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "ragged"])
def test_at_the_real_tile(device, wire_format, flat):
    numels = ([3 * TILE - 4, 2 * TILE], []) if flat else ([2 * TILE + 4, 7, 64, 2 * TILE + 1], [TILE + 20])
    numels = with_holes(numels, [0, 3])
    lossy_numel, exact_numel = map(count, numels)
    layout = bucket_layout(wire_format, 128, 2, exact_numel, lossy_numel)
    flats = signed(lossy_numel, seed=8, specials=True), signed(exact_numel, seed=9, specials=True)
    check_bucket(layout, flats, numels, [0, 3], device, tile=TILE)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "numels", [([], []), ([0], [0]), ([1], []), ([], [1]), ([0, 777], []), ([], [3, 774])], ids=str
)
def test_small_and_empty_lists(device, wire_format, numels):
    numels = with_holes(numels, [0, 2])
    layout = bucket_layout(wire_format, 32, 3, count(numels[1]), count(numels[0]), 1000)
    check_bucket(layout, (signed(count(numels[0])), signed(count(numels[1]))), numels, [0, 2], device)


@pytest.mark.sampled
@pytest.mark.parametrize("scale", [1.0, -3.0, 0.0, math.inf, math.nan])
def test_holes_and_elements_past_the_end_are_plus_zero_whatever_the_scale(device, wire_format, scale):
    numels = with_holes(([30, 100], [3]), [1])
    layout = bucket_layout(wire_format, 32, 4, count(numels[1]), count(numels[0]))
    check_bucket(layout, (signed(count(numels[0])), signed(count(numels[1]))), numels, [1], device, scale=scale)


# ---- values


def special_fp32():
    """fp32 bit patterns at which the result of rounding, saturation or comparison changes."""
    nans = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC12345, 0xFFFFFFFF]
    infs = [0x7F800000, 0xFF800000]
    denormals = [0x00000001, 0x80000001, 0x007FFFFF, 0x00400000]
    bf16_ties = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000, 0x00008000, 0x00018000, 0x7F7F8000]
    fp16_ties = [0x3F801000, 0x3F803000, 0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001, 0x33C00000, 0x387FE000]
    others = [0x00000000, 0x80000000, 0x7F7FFFFF, 0xFF7FFFFF, 0x477FE000, 0x38800000, 0x33800000]
    bits = [*nans, *infs, *denormals, *bf16_ties, *fp16_ties, *others]
    return torch.tensor(bits).to(torch.int32).view(torch.float32)


def around(values):
    """`values` (fp32, not negative), the midpoints between them, and the fp32 neighbors of both. With both signs."""
    points = torch.cat([values, (values[1:] + values[:-1]) / 2])
    infinity = torch.tensor(math.inf)
    points = torch.cat([points, points.nextafter(infinity), points.nextafter(-infinity)])
    return torch.cat([points, -points])


def blocks_around_codes(wire):
    """fp32 [num_blocks, 32]. Each block contains the greatest value of a code, in int4 the least: its scale is 1."""
    if wire == "fp8":
        values = torch.arange(256).to(torch.uint8).view(reference.WIRE_DTYPES[wire]).float()
        values = values[values.isfinite() & (values >= 0)].unique()
        greatest = 448.0
    elif wire == "int4":
        values = torch.tensor(reference.LEVELS)[:9].neg().flip(0)
        # Where the codes change: the roots of n + 1/2 = v·(9856 − 29·v²) / 8192.
        line = torch.linspace(0, 8, (1 << 20) + 1)
        changes = (line * (9856 - 29 * line * line) / 8192).round().diff().nonzero().view(-1)
        values = torch.cat([values, line[changes], line[changes + 1]]).unique()
        greatest = -8.0
    else:
        greatest = 127.0
        values = torch.arange(int(greatest) + 1).float()
    points = around(values)
    points = points[points.abs() <= abs(greatest)]
    points = torch.nn.functional.pad(points, (0, -len(points) % 31)).view(-1, 31)
    return torch.cat([torch.full((len(points), 1), greatest), points], dim=1)


def blocks_of_32():
    """fp32 [num_blocks, 32]: blocks that wires with scales treat differently."""
    generator = torch.Generator().manual_seed(4)
    uniform = torch.rand(32, generator=generator) * 2 - 1
    least = 2.0**-100
    below = torch.tensor(least).nextafter(torch.tensor(0.0)).item()
    above = torch.tensor(least).nextafter(torch.tensor(1.0)).item()
    greatest = torch.finfo(torch.float32).max
    with_absmax = [torch.cat([torch.tensor([absmax]), uniform[1:] * absmax]) for absmax in (below, least, above, 127.0)]
    blocks = [
        *(torch.zeros(32), torch.full((32,), -0.0), torch.full((32,), -2.5), torch.full((32,), 1e-40)),
        *with_absmax,
        torch.cat([torch.tensor([1e30]), uniform[1:]]),
        uniform * greatest,
        torch.cat([torch.tensor([greatest, -greatest]), uniform[2:] * greatest]),
    ]
    for bad in (math.inf, -math.inf, math.nan):
        blocks.append(torch.cat([uniform[1:], torch.tensor([bad])]))
    blocks.append(torch.cat([torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-45]), uniform[6:]]))
    blocks.append(torch.cat([torch.tensor([math.nan]), torch.zeros(31)]))
    return torch.stack(blocks)


@pytest.mark.sampled
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_special_values(device, wire_format, scale):
    flat = torch.cat([blocks_of_32().flatten(), special_fp32()])
    numels = [len(flat)], [-(len(flat) % 4), len(special_fp32())]
    exact = torch.cat([torch.zeros(len(flat) % 4), special_fp32()])
    layout = bucket_layout(wire_format, 32, 1, len(exact), len(flat))
    check_bucket(layout, (flat, exact), numels, [0], device, scale=scale, unpack_scale=1.0)


@pytest.mark.sampled
@pytest.mark.parametrize("wire", ["int8", "fp8", "int4"])
def test_rounds_to_the_nearest_code(device, wire):
    blocks = blocks_around_codes(wire)
    # Includes inverses of scales that are not powers of two.
    flat = torch.cat([blocks, blocks * 2**-30, blocks * 1.7, blocks / 3]).flatten()
    layout = bucket_layout(wire, 32, 1, 0, len(flat))
    check_bucket(layout, (flat, flat[:0]), ([len(flat)], []), [0], device, tile=TILE, scale=1.0, unpack_scale=1.0)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("wire", "dtype"), [*((wire, torch.bfloat16) for wire in WIRES), *((wire, torch.float16) for wire in WIRES[:4])]
)
def test_every_16_bit_gradient(device, wire, dtype):
    flat = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    layout = _C.bucket_layout(wire, 32, 1, 0, len(flat), CHUNK_NBYTES)
    check_bucket(layout, (flat, flat[:0]), ([len(flat)], []), [0], device, tile=TILE, scale=1.0, unpack_scale=1.0)


SUMMED = [
    *((wire, index % 2 == 0 and _C.has_scales(wire), torch.float32) for index, wire in enumerate(WIRES)),
    ("int8", False, torch.bfloat16),
    ("int4", False, torch.float32),
    ("bf16", False, torch.float16),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("wire", "rotated", "dtype"), SUMMED, ids=str)
@pytest.mark.parametrize(("num_messages", "gap"), [(2, 0), (3, 1)])
def test_several_messages_are_summed_as_by_the_oracle(device, wire, rotated, dtype, num_messages, gap):
    numels = with_holes(([524, 9, 600], [100]), [gap], dtype)
    lossy_numel, exact_numel = map(count, numels)
    layout = _C.bucket_layouts([(wire, 64, rotated, lossy_numel)], 1, exact_numel, 1 << 20 if gap else 1024)[0]
    sent = [(signed(lossy_numel, dtype, rank), signed(exact_numel, dtype, 50 + rank)) for rank in range(num_messages)]
    lossy_slices, end = lay_out(numels[0], [gap], 0)
    exact_slices, end = lay_out(numels[1], [gap], end)
    grads = torch.full((end + 23 - end % 8,), GAP, dtype=dtype, device=device)
    bucket = make_bucket(layout, grads, lossy_slices, exact_slices, 256)
    expected = [torch.zeros(numel, dtype=dtype) for numel in (lossy_numel, exact_numel)]
    for chunk in range(layout.num_chunks):
        messages = torch.cat([reference.pack(layout, chunk, *of_rank, 0.3) for of_rank in sent])
        unpack(bucket, chunk, messages.to(device), 0.5, 3, num_messages=num_messages)
        values = reference.unpack(layout, chunk, messages, 0.5, dtype, num_messages)
        for result, range_of, value in zip(expected, (layout.lossy_range, layout.exact_range), values, strict=True):
            result[slice(*range_of(chunk, 0))] = value
    whole = torch.full_like(grads, GAP, device="cpu")
    for slices, values in ((lossy_slices, expected[0]), (exact_slices, expected[1])):
        place(slices, values, whole)
    assert_same_bits(grads, whole)


@pytest.mark.sampled
@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_every_16_bit_code(device, wire):
    """Includes codes that pack never writes."""
    codes = torch.arange(-(2**15), 2**15).to(torch.int16)
    layout = _C.bucket_layout(wire, 32, 1, 0, len(codes), CHUNK_NBYTES)
    parts = codes.view(torch.uint8).to(device)
    memory, reduced = guarded(layout.part.nbytes, device)
    reduce(layout, parts, 1.0, reduced, 2)
    assert_bytes(memory, reference.reduce(layout, parts.cpu(), 1.0))
    for dtype in DTYPES:
        grads = torch.zeros(len(codes), dtype=dtype, device=device)
        unpack(make_bucket(layout, grads, [(0, len(codes))], []), 0, parts, 0.75, 2)
        assert_same_bits(grads, reference.unpack(layout, 0, parts.cpu(), 0.75, dtype)[0])


@pytest.mark.sampled
@pytest.mark.parametrize("wire", ["int8", "fp8", "int4"])
def test_every_8_bit_code(device, wire):
    """Includes codes and scales that pack never writes."""
    bits = torch.tensor(
        [0x3F80, 0x3E9A, 0x0000, 0x8000, 0x0001, 0x00A1, 0x7F80, 0x7FC1, 0xFF81, 0x7F7F, 0x0D80, 0xC123]
    )
    numel = 256 * (2 if wire == "int4" else 1)
    scales = bits.repeat_interleave(numel // 32).to(torch.int16)
    if wire in ("int8", "fp8"):
        scales = torch.stack([torch.full_like(scales, 0x1234), scales], dim=1).flatten()
    codes = torch.arange(256).to(torch.uint8).repeat(len(bits))
    parts = torch.cat([scales.view(torch.uint8), codes])
    layout = bucket_layout(wire, 32, 1, 0, numel * len(bits))
    assert layout.chunk_nbytes == len(parts)
    memory, reduced = guarded(layout.part.nbytes, device)
    reduce(layout, parts.to(device), 1.0, reduced, 2)
    assert_bytes(memory, reference.reduce(layout, parts, 1.0))
    for dtype in DTYPES:
        grads = torch.zeros(layout.lossy_numel, dtype=dtype, device=device)
        unpack(make_bucket(layout, grads, [(0, len(grads))], []), 0, parts.to(device), 0.75, 2)
        assert_same_bits(grads, reference.unpack(layout, 0, parts, 0.75, dtype)[0])


# ---- counts


@pytest.mark.sampled
@pytest.mark.parametrize("num_programs", [1, 4])
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "ragged"])
def test_counts_say_whose_elements_are_not_finite(device, flat, num_programs):
    gaps = [0] if flat else [0, 4]
    numels = [0, 5, 1000, 0, 3, 700, 1, 0], [] if flat else [300, 0, 7]
    bad = {1: [4], 2: [0, 1, 295, 595], 4: [2], 5: [0], 6: [0]}, {0: [299], 2: [0, 1, 2]}
    holed = with_holes(numels, gaps)
    flats = [signed(count(sizes), seed=seed) for seed, sizes in enumerate(holed)]
    for flat_values, sizes, of_list in zip(flats, holed, bad, strict=True):
        for index, (begin, _, _) in enumerate(ranges(lay_out(sizes, gaps, 0)[0])):
            for inside in of_list.get(index, []) if sizes else []:
                flat_values[begin + inside] = (math.inf, math.nan, 3e38)[inside % 3]  # 3e38 overflows when scaled
    layout = _C.bucket_layout("bf16", 32, 2, count(holed[1]), count(holed[0]), CHUNK_NBYTES)
    bucket = check_bucket(layout, flats, holed, gaps, device, num_programs=num_programs, scale=2.0)
    assert bucket.lossy.counts.tolist() == [0, 1, 4, 0, 1, 1, 1, 0]
    assert bucket.exact.counts.tolist() == ([] if flat else [1, 0, 3])


def test_counts_are_added_to(device):
    layout = _C.bucket_layout("fp16", 32, 1, 0, 100, CHUNK_NBYTES)
    grads = torch.full((100,), math.nan, device=device)
    bucket = make_bucket(layout, grads, [(0, 40), (40, 60)], [], tile=64)
    for _ in range(2):
        pack(bucket, 0, 1.0, torch.empty(layout.chunk_nbytes, dtype=torch.uint8, device=device), 2)
    scale_in_place(bucket, 1.0, 1)
    assert bucket.lossy.counts.tolist() == [120, 180]


# ---- scale


@pytest.mark.sampled
@pytest.mark.parametrize(("numel", "tile"), [(0, 64), (1, 64), (1000, 256), (1024, 256), (2 * TILE + 3, TILE)])
def test_scales_in_place(device, numel, tile):
    memory = torch.full((numel + 16,), GAP, device=device)
    memory[:numel] = signed(numel, seed=1, specials=True)
    expected = reference.scaled(memory.cpu()[:numel], -1.7)
    slices = [(0, numel // 3), (numel // 3, 0), (numel // 3, numel - numel // 3)]
    layout = _C.bucket_layout("fp32", 32, 1, 0, numel, CHUNK_NBYTES)
    bucket = make_bucket(layout, memory, slices, [], tile)
    scale_in_place(bucket, -1.7, 3)
    # Which NaN a multiplication gives depends on the device.
    assert_same_bits(reference.canonical(memory[:numel].cpu()), reference.canonical(expected))
    assert torch.all(memory[numel:] == GAP)
    assert bucket.lossy.counts.tolist() == nonfinite_by_slice(expected, slices, 1.0)


# ---- any slices


ANY_BUCKET = dict(
    wire_format=st.sampled_from([*WIRES, *ROTATED]),
    dtype=st.sampled_from(DTYPES),
    numels=st.tuples(*[st.lists(st.one_of(st.integers(0, 9), st.integers(0, 500)), max_size=12)] * 2),
    gaps=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    num_parts=st.integers(1, 4),
    max_chunk_nbytes=st.sampled_from([500, 3000, CHUNK_NBYTES]),
    num_programs=st.integers(1, 9),
    tile=st.sampled_from([64, 256]),
    seed=st.integers(0, 1000),
    begin=st.sampled_from([0, 0, 1]),
)


def test_any_bucket(device, request):
    def check(wire_format, dtype, numels, gaps, num_parts, max_chunk_nbytes, num_programs, tile, seed, begin):
        numels = with_holes(numels, gaps, dtype)
        layout = bucket_layout(wire_format, 32, num_parts, count(numels[1]), count(numels[0]), max_chunk_nbytes)
        flats = [signed(count(sizes), dtype, seed + i, specials=True) for i, sizes in enumerate(numels)]
        check_bucket(layout, flats, numels, gaps, device, tile=tile, num_programs=num_programs, begin=begin)

    num_buckets = 25 if request.config.getoption("--all") or device == "cuda" else 5
    given(**ANY_BUCKET)(settings(max_examples=num_buckets, deadline=None, derandomize=True)(check))()


# ---- residuals, several layouts in a message, sums in another wire


class Encoder:
    """An encoder's residual, for the kernels and for the reference. It starts as zeros."""

    def __init__(self, feedback, numel, device):
        self.feedback = feedback
        nbytes = _C.residual_nbytes(feedback, numel) if feedback else 0
        self.memory, self.residual = guarded(nbytes, device)
        self.residual.zero_()
        self.expected = torch.zeros(nbytes, dtype=torch.uint8)

    def of_kernel(self):
        return Feedback(self.feedback, self.residual if self.feedback else None)

    def of_reference(self):
        return reference.Feedback(self.feedback, self.expected) if self.feedback else None

    def check(self):
        assert_bytes(self.memory, self.expected)


def piece(layout, parts):
    """The layout's piece of each part of a message: uint8 [number of parts, layout.part.nbytes], a view."""
    return parts.view(-1, layout.part_stride)[:, layout.part_offset :][:, : layout.part.nbytes]


def check_steps(layouts, numels, exact_numels, device, feedback, dtype=torch.float32, tile=256, num_steps=2, gaps=(0,)):
    """Packs, reduces and unpacks messages with these layouts in some steps, by the kernels and by the reference.

    numels: slices of each layout's lossy elements. exact_numels: slices of the exact ones, which the first layout has.
    Both as from with_holes.
    """
    world_size, num_chunks = layouts[0].num_parts, layouts[0].num_chunks
    encoders, sum_encoders = (
        [Encoder(feedback, numel(layout), device) for layout in layouts]
        for numel in (lambda layout: layout.padded_numel, lambda layout: num_chunks * layout.part.lossy_numel)
    )
    end, slices = 0, []
    for of_list in (*numels, exact_numels):
        list_slices, end = lay_out(of_list, gaps, end)
        slices.append(list_slices)
    for step in range(num_steps):
        grads = signed(end + 16 - end % 8, dtype, seed=step, specials=True)
        exact_flat = gather(grads, slices[-1])
        buckets = [
            make_bucket(layout, grads.to(device), slices[i], slices[-1] if i == 0 else [], tile)
            for i, layout in enumerate(layouts)
        ]
        for chunk in range(num_chunks):
            memory, message = guarded(layouts[0].chunk_nbytes, device)
            sum_memory, sums = guarded(layouts[0].part_stride, device)
            expected = torch.full((layouts[0].chunk_nbytes,), POISON, dtype=torch.uint8)
            expected_sums = torch.full((layouts[0].part_stride,), POISON, dtype=torch.uint8)
            for i, (layout, bucket, encoder) in enumerate(zip(layouts, buckets, encoders, strict=True)):
                pack(bucket, chunk, 0.3, message, 3, encoder.of_kernel())
                flats = gather(grads, slices[i]), exact_flat if i == 0 else exact_flat[:0]
                packed = reference.pack(layout, chunk, *flats, 0.3, encoder.of_reference())
                piece(layout, expected).copy_(packed.view(world_size, -1))
            assert_bytes(memory, expected)
            for layout, encoder in zip(layouts, sum_encoders, strict=True):
                reduce(layout, message, 1 / world_size, sums, 2, tile, encoder.of_kernel(), chunk)
                parts = piece(layout, expected).reshape(-1)
                reduced = reference.reduce(layout, parts, 1 / world_size, encoder.of_reference(), chunk)
                piece(layout, expected_sums).copy_(reduced.view(1, -1))
            assert_bytes(sum_memory, expected_sums)
            for bucket, layout, lossy_slices in zip(buckets, layouts, slices[:-1], strict=True):
                unpack(bucket, chunk, message, 2.0, 2)
                parts = piece(layout, expected).reshape(-1)
                values = reference.unpack(layout, chunk, parts, 2.0, dtype)
                lists = (
                    (lossy_slices, layout.lossy_range),
                    (slices[-1] if bucket is buckets[0] else [], layout.exact_range),
                )
                for value, (of_list, range_of) in zip(values, lists, strict=True):
                    begin = range_of(chunk, 0)[0]
                    is_real = gather(torch.ones(end + 16), of_list)[begin : begin + len(value)] == 1
                    assert_same_bits(
                        gather(bucket.grads.cpu(), of_list)[begin : begin + len(value)][is_real], value[is_real]
                    )
        for encoder in (*encoders, *sum_encoders):
            encoder.check()


# (wire format, feedback, gradient dtype, flat): pairs of everything that can be combined. The wires are in the order of
# constants.WIRE_IDS.
ENCODINGS = [
    ("fp32", "bf16", torch.float32, False),
    ("bf16", "fp32", torch.bfloat16, False),
    ("bf16", "bf16", torch.float32, True),
    ("fp16", "bf16", torch.float16, True),
    ("fp16", "fp32", torch.float32, False),
    ("int8", "bf16", torch.bfloat16, True),
    ("int8", "bf16", torch.float32, False),
    ("int8", "fp32", torch.float32, False),
    ("int8-rotated", "fp32", torch.float32, True),
    ("fp8", "bf16", torch.float32, False),
    ("fp8-rotated", "bf16", torch.float32, False),
    ("fp8", "fp32", torch.float16, False),
    ("fp8-rotated", "fp32", torch.bfloat16, False),
    ("int4", "bf16", torch.bfloat16, False),
    ("int4", "fp32", torch.float32, True),
    ("int4-rotated", "bf16", torch.float32, False),
    ("int4-rotated", "bf16", torch.float32, True),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("wire_format", "feedback", "dtype", "flat"), ENCODINGS, ids=str)
def test_residuals_are_those_of_the_oracle(device, wire_format, feedback, dtype, flat):
    numels, exact_numels = ([700, 1, 301], []) if flat else ([0, 1, 31, 129, 0, 600, 7, 2, 256], [5, 0, 101])
    gaps = [0] if flat else GAPS
    numels, exact_numels = with_holes((numels, exact_numels), gaps, dtype)
    whole = bucket_layout(wire_format, 32, 2, count(exact_numels), count(numels))
    layout = bucket_layout(wire_format, 32, 2, count(exact_numels), count(numels), whole.chunk_nbytes // 2)
    assert layout.num_chunks > 1
    check_steps([layout], [numels], exact_numels, device, feedback, dtype, gaps=gaps)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("wire_format", "feedback", "block"),
    [("bf16", "fp32", 128), ("int8", "bf16", 4096), ("int4-rotated", "fp32", 128)],
)
def test_residuals_at_the_real_tile(device, wire_format, feedback, block):
    numels = [3 * TILE - 4, 2 * TILE]
    layout = bucket_layout(wire_format, block, 2, 0, sum(numels))
    check_steps([layout], [numels], [], device, feedback, tile=tile_of(layout.wire, block))


@pytest.mark.sampled
@pytest.mark.parametrize("feedback", [None, "bf16"])
def test_several_layouts_in_a_message(device, feedback):
    *numels, exact_numels = with_holes(([1, 300, 0, 77], [500], [9, 9, 200], [50, 5]), GAPS)
    formats = [
        (*of_wire, count(of_list))
        for of_wire, of_list in zip(
            [("int8", 64, False), ("int4", 32, True), ("bf16", 128, False)], numels, strict=True
        )
    ]
    layouts = _C.bucket_layouts(formats, 2, count(exact_numels), 1000)
    assert layouts[0].num_chunks > 1
    check_steps(layouts, numels, exact_numels, device, feedback, gaps=GAPS)


@pytest.mark.sampled
@pytest.mark.parametrize("wire", WIRES[1:])
def test_special_values_with_residuals(device, wire):
    """Includes values between codes, and values that round up beyond the format's greatest."""
    blocks = [blocks_of_32()] + ([blocks_around_codes(wire), blocks_around_codes(wire) / 3] if wire in BLOCKS else [])
    flat = torch.cat([*(block.flatten() for block in blocks), special_fp32()])
    layout = bucket_layout(wire, 32, 1, 0, len(flat))
    encoder = Encoder("fp32", layout.padded_numel, device)
    bucket = make_bucket(layout, flat.to(device), [(0, len(flat))], [], 1024)
    for _ in range(2):
        memory, packed = guarded(layout.chunk_nbytes, device)
        pack(bucket, 0, 1.0, packed, 2, encoder.of_kernel())
        assert_bytes(memory, reference.pack(layout, 0, flat, flat[:0], 1.0, encoder.of_reference()))
        encoder.check()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("in_wire", "wire_format", "feedback"),
    [
        ("bf16", "int8", None),
        ("bf16", "int4-rotated", "bf16"),
        ("fp16", "fp8-rotated", "bf16"),
        ("fp32", "int4-rotated", None),
        ("fp32", "fp8", "fp32"),
        ("fp16", "bf16", None),
        ("bf16", "fp32", None),
        ("bf16", "bf16", "fp32"),
    ],
)
def test_sums_in_one_wire_and_encodes_in_another(device, in_wire, wire_format, feedback):
    """The part of each of a host's 3 ranks becomes 2 parts, one for each of 2 hosts."""
    chunk, num_parts, exact_numel = 1, 2, 8
    numels = 6, 4 * 6 * exact_numel, 4 * 6 * 640
    to = bucket_layout(wire_format, 64, *numels, 1)
    to = bucket_layout(wire_format, 64, *numels, 6 * _part_nbytes(wire_format, exact_numel, 640))
    layout = bucket_layout(in_wire, 64, 3, *numels[1:], 3 * num_parts * _part_nbytes(in_wire, exact_numel, 640))
    assert to.num_chunks == layout.num_chunks == 4
    assert (layout.part.lossy_numel, layout.part.exact_numel) == (2 * to.part.lossy_numel, 2 * to.part.exact_numel)
    numel = to.num_chunks * num_parts * to.part.lossy_numel
    encoder = Encoder(feedback, numel, device)
    for step in range(2):
        flats = signed(numels[2], seed=step, specials=True), signed(numels[1], seed=9)
        parts = reference.pack(layout, chunk, *flats, 1.0)
        memory, reduced = guarded(num_parts * to.part_stride, device)
        place = {"chunk": chunk, "to": to, "num_parts": num_parts}
        reduce(layout, parts.to(device), 1 / 3, reduced, 2, 256, encoder.of_kernel(), **place)
        assert_bytes(memory, reference.reduce(layout, parts, 1 / 3, encoder.of_reference(), **place))
        encoder.check()


def _part_nbytes(wire_format, exact_numel, lossy_numel):
    return bucket_layout(wire_format, 64, 1, exact_numel, lossy_numel).part.nbytes
