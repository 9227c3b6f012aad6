"""The wire layout: every element has one place, cuts fall on block boundaries, and offsets are aligned."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedcomm
from fusedcomm.native import _C

BLOCK_WIRES = ("int8", "fp8", "int4")
WIRES = ("fp32", "bf16", "fp16", *BLOCK_WIRES)
CODE_NBYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1, "int4": 0.5}
SCALE_NBYTES = {"int8": 4, "fp8": 4, "int4": 2}

blocks = st.sampled_from([2**k for k in range(5, 13)])
numels = st.one_of(st.integers(0, 300), st.integers(0, 2**22), st.integers(2**31, 2**42))


@st.composite
def layouts(draw):
    exact_numel, lossy_numel = draw(numels), draw(numels)
    # There are at most about 1000 chunks, so that a test can visit all of them.
    least = max(1, (exact_numel + lossy_numel) * 5 // 1000)
    max_chunk_nbytes = draw(st.integers(least, max(4 * least, 1 << 20)))
    wire, num_parts = draw(st.sampled_from(WIRES)), draw(st.integers(1, 9))
    return _C.bucket_layout(wire, draw(blocks), num_parts, exact_numel, lossy_numel, max_chunk_nbytes), max_chunk_nbytes


def grain_numel(layout):
    return layout.block_numel if layout.wire in BLOCK_WIRES else 8


def the_part(wire, block, exact_numel, lossy_numel):
    """The layout of the only part of a message of one chunk."""
    return _C.bucket_layout(wire, block, 1, exact_numel, lossy_numel, 1 << 20).part


def test_constants():
    assert _C.WIRE_LAYOUT_VERSION == 7
    assert _C.ALIGN_NBYTES == 16
    assert _C.ROTATION_NUMEL == 32
    assert [_C.default_block_numel(wire) for wire in BLOCK_WIRES] == [128, 128, 32]
    assert [wire for wire in WIRES if _C.has_scales(wire)] == list(BLOCK_WIRES)


def test_there_is_one_list_of_wires_and_their_ids_stay():
    """Id 5 belonged to fp8_e5m2 and 7 to int2; they are not used again."""
    ids = {"fp32": 0, "bf16": 1, "fp16": 2, "int8": 3, "fp8": 4, "int4": 6}
    assert {wire: _C.wire_id(wire) for wire in _C.WIRES} == ids
    assert fusedcomm.WIRES == _C.WIRES == WIRES
    assert [_C.code_nbits(wire) for wire in _C.WIRES] == [8 * CODE_NBYTES[wire] for wire in _C.WIRES]
    assert all(_C.scale_nbytes(wire) == nbytes for wire, nbytes in SCALE_NBYTES.items())


def test_an_int8_part_byte_by_byte():
    part = the_part("int8", 128, 5, 384)
    # 5 fp32, padded to 8 = 32 bytes; 3 scales = 12 bytes, padded to 48; 384 codes.
    assert (part.scale_offset, part.code_offset, part.nbytes) == (32, 48, 48 + 384)
    assert (part.exact_numel, part.lossy_numel) == (8, 384)


def test_an_int4_part_byte_by_byte():
    part = the_part("int4", 32, 5, 96)
    # 5 fp32, padded to 8 = 32 bytes; 3 scales = 6 bytes, padded to 48; 96 codes, two in a byte.
    assert (part.scale_offset, part.code_offset, part.nbytes) == (32, 48, 48 + 48)


@pytest.mark.parametrize(("wire", "most"), [("int8", 0.265), ("fp8", 0.265), ("int4", 0.145)])
@pytest.mark.parametrize("nbytes", [64 << 10, 1 << 20, (25 << 20) + 12])
@pytest.mark.parametrize("num_parts", [1, 2, 8])
def test_the_payload_beside_that_of_fp32(wire, most, nbytes, num_parts):
    """The payload counts all bytes that are sent, with scales and padding. `most`: its largest ratio to fp32."""
    layout = _C.bucket_layout(wire, _C.default_block_numel(wire), num_parts, 0, nbytes // 4, 4 << 20)
    assert layout.num_chunks * layout.chunk_nbytes <= most * nbytes


def test_wires_without_scales_are_not_rotated():
    for wire in WIRES:
        if wire in BLOCK_WIRES:
            assert _C.bucket_layout(wire, 128, 1, 0, 1000, 1 << 20, rotated=True).rotated
            assert not _C.bucket_layout(wire, 128, 1, 0, 1000, 1 << 20).rotated
        else:
            with pytest.raises(ValueError, match="rotate=True is for wires with scales"):
                _C.bucket_layout(wire, 128, 1, 0, 1000, 1 << 20, rotated=True)


@pytest.mark.parametrize(("wire", "nbytes"), [("fp32", 416), ("bf16", 208), ("fp16", 208), ("int8", 16 + 128)])
def test_a_part_without_exact_elements(wire, nbytes):
    part = the_part(wire, 128, 0, 100)  # padded to 104, with scales to a block of 128
    assert part.scale_offset == 0
    assert part.code_offset == (16 if wire == "int8" else 0)
    assert part.nbytes == nbytes


@settings(deadline=None)
@given(layouts())
def test_every_element_has_one_place(case):
    layout, _ = case
    for ranges_of, numel in ((layout.lossy_range, layout.lossy_numel), (layout.exact_range, layout.exact_numel)):
        position = 0
        for chunk in range(layout.num_chunks):
            for part in range(layout.num_parts):
                begin, end = ranges_of(chunk, part)
                assert begin == position
                assert begin <= end
                position = end
        assert position == numel


@settings(deadline=None)
@given(layouts())
def test_cuts_fall_on_the_grain_and_blocks_are_counted_from_the_start(case):
    layout, _ = case
    for chunk in {0, layout.num_chunks // 2, max(layout.num_chunks - 1, 0)}:
        for part in range(layout.num_parts):
            begin, _ = layout.lossy_range(chunk, part)
            assert begin % grain_numel(layout) == 0 or begin == layout.lossy_numel
            begin, _ = layout.exact_range(chunk, part)
            assert begin % 4 == 0 or begin == layout.exact_numel


@settings(deadline=None)
@given(layouts())
def test_sections_are_aligned_disjoint_and_long_enough(case):
    layout, _ = case
    part = layout.part
    scales_nbytes = -(-part.lossy_numel // layout.block_numel) * SCALE_NBYTES.get(layout.wire, 0)
    assert part.scale_offset % 16 == part.code_offset % 16 == part.nbytes % 16 == 0
    assert 0 <= part.scale_offset - part.exact_numel * 4 < 16
    assert 0 <= part.code_offset - (part.scale_offset + scales_nbytes) < 16
    assert 0 <= part.nbytes - (part.code_offset + part.lossy_numel * CODE_NBYTES[layout.wire]) < 16
    assert layout.chunk_nbytes == part.nbytes * layout.num_parts


@settings(deadline=None)
@given(layouts())
def test_no_chunk_is_empty(case):
    layout, _ = case
    for chunk in range(layout.num_chunks):
        ranges = [layout.lossy_range(chunk, 0), layout.exact_range(chunk, 0)]
        assert any(begin < end for begin, end in ranges)


@settings(deadline=None)
@given(layouts())
def test_chunks_are_bounded(case):
    """A part may exceed its share by a grain of lossy elements, by eight exact elements, and by the padding of its
    three sections."""
    layout, max_chunk_nbytes = case
    slack = grain_numel(layout) * CODE_NBYTES[layout.wire] + 4 + 32 + 3 * 16
    assert layout.chunk_nbytes <= max_chunk_nbytes + layout.num_parts * slack


def test_an_empty_bucket_has_no_chunks():
    layout = _C.bucket_layout("bf16", 128, 4, 0, 0, 1 << 20)
    assert (layout.num_chunks, layout.chunk_nbytes) == (0, 0)


def test_offsets_beyond_32_bits():
    numel = 2**40 + 12345
    layout = _C.bucket_layout("int8", 128, 8, 0, numel, 1 << 20)
    assert layout.lossy_range(layout.num_chunks - 1, 0)[0] > 2**39
    assert layout.lossy_range(layout.num_chunks - 1, 7)[1] == numel
    assert _C.bucket_layout("fp32", 128, 1, 0, numel, 2**50).chunk_nbytes == 4 * numel + (-4 * numel) % 32


@pytest.mark.parametrize("block", [-128, 0, 1, 16, 100, 129, 8192])
def test_a_block_must_be_a_power_of_two_within_limits(block):
    with pytest.raises(ValueError, match=f"block={block} .*32 to 4096"):
        _C.bucket_layout("int8", block, 1, 0, 1000, 1 << 20)


@pytest.mark.parametrize("wire", ["int3", "", "BF16"])
def test_an_unknown_wire_is_named_with_the_choices(wire):
    with pytest.raises(ValueError, match=f"wire='{wire}' .*fp32, bf16, fp16, int8, fp8, int4"):
        _C.bucket_layout(wire, 128, 1, 0, 1000, 1 << 20)


@pytest.mark.parametrize("numbers", [(0, 0, 1, 1), (1, -1, 1, 1), (1, 0, -1, 1), (1, 0, 1, 0)])
def test_impossible_numbers(numbers):
    with pytest.raises(ValueError, match="must be positive"):
        _C.bucket_layout("bf16", 128, *numbers)


def test_layouts_are_read_only():
    layout = _C.bucket_layout("bf16", 128, 1, 0, 1000, 1 << 20)
    with pytest.raises(AttributeError):
        layout.num_parts = 2
    with pytest.raises(AttributeError):
        layout.part.nbytes = 2
    assert "wire='bf16'" in repr(layout)
