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
    assert _C.WIRE_LAYOUT_VERSION == 9
    assert _C.ALIGN_NBYTES == 16
    assert [_C.default_block_numel(wire) for wire in BLOCK_WIRES] == [128, 128, 32]
    assert [wire for wire in WIRES if _C.has_scales(wire)] == list(BLOCK_WIRES)


def test_there_is_one_list_of_wires_and_their_ids_stay():
    """Id 5 belonged to fp8_e5m2 and 7 to int2; they are not used again."""
    ids = {"fp32": 0, "bf16": 1, "fp16": 2, "int8": 3, "fp8": 4, "int4": 6}
    assert {wire: _C.wire_id(wire) for wire in _C.WIRES} == ids
    assert fusedcomm.WIRES == _C.WIRES == WIRES
    assert [_C.code_nbits(wire) for wire in _C.WIRES] == [8 * CODE_NBYTES[wire] for wire in _C.WIRES]
    assert all(_C.scale_nbytes(wire) == nbytes for wire, nbytes in SCALE_NBYTES.items())


def test_parts_byte_by_byte():
    # 5 fp32, padded to 8 = 32 bytes; 3 scales = 12 or 6 bytes, padded to 48; 384 codes of a byte, or 96 of half a byte.
    for wire, block, code_nbytes in (("int8", 128, 384), ("int4", 32, 48)):
        part = the_part(wire, block, 5, 3 * block)
        assert (part.scale_offset, part.code_offset, part.nbytes) == (32, 48, 48 + code_nbytes)
        assert (part.exact_numel, part.lossy_numel) == (8, 3 * block)
    # 100 elements are padded to 104, with scales to a block of 128.
    for wire, nbytes in (("fp32", 416), ("bf16", 208), ("fp16", 208), ("int8", 16 + 128)):
        part = the_part(wire, 128, 0, 100)
        assert (part.scale_offset, part.code_offset, part.nbytes) == (0, 16 * (wire == "int8"), nbytes)


@pytest.mark.parametrize(("wire", "most"), [("int8", 0.265), ("fp8", 0.265), ("int4", 0.145)])
@pytest.mark.parametrize("nbytes", [64 << 10, 1 << 20, (25 << 20) + 12])
@pytest.mark.parametrize("num_parts", [1, 2, 8])
def test_the_payload_beside_that_of_fp32(wire, most, nbytes, num_parts):
    """The payload counts all bytes that are sent, with scales and padding. `most`: its largest ratio to fp32."""
    layout = _C.bucket_layout(wire, _C.default_block_numel(wire), num_parts, 0, nbytes // 4, 4 << 20)
    assert layout.num_chunks * layout.chunk_nbytes <= most * nbytes


@settings(deadline=None)
@given(layouts())
def test_every_element_has_one_place_and_cuts_fall_on_the_grain(case):
    layout, max_chunk_nbytes = case
    kinds = (
        (layout.lossy_range, layout.lossy_numel, grain_numel(layout)),
        (layout.exact_range, layout.exact_numel, 4),
    )
    chunks_with_elements = set()
    for ranges_of, numel, grain in kinds:
        position = 0
        for chunk in range(layout.num_chunks):
            for part in range(layout.num_parts):
                begin, end = ranges_of(chunk, part)
                assert begin == position <= end
                assert begin % grain == 0 or begin == numel
                position = end
                chunks_with_elements |= {chunk} if begin < end else set()
        assert position == numel
    assert len(chunks_with_elements) == layout.num_chunks
    # A part may exceed its share by a grain of lossy elements, by eight exact elements, and by the padding of its three
    # sections.
    slack = grain_numel(layout) * CODE_NBYTES[layout.wire] + 4 + 32 + 3 * 16
    assert layout.chunk_nbytes <= max_chunk_nbytes + layout.num_parts * slack


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *((("int8", block, 1, 0, 9, 9), f"block={block} .*32 to 4096") for block in (-128, 0, 1, 16, 100, 129, 8192)),
        *((("bf16", 128, *numbers), "must be positive") for numbers in ((0, 0, 1, 1), (1, -1, 1, 1), (1, 0, 1, 0))),
        (("int3", 128, 1, 0, 1000, 1 << 20), "wire='int3' .*fp32, bf16, fp16, int8, fp8, int4"),
        (("BF16", 128, 1, 0, 1000, 1 << 20), "wire='BF16' .*fp32, bf16, fp16, int8, fp8, int4"),
    ],
    ids=str,
)
def test_impossible_layouts_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        _C.bucket_layout(*arguments)


def test_layouts_are_read_only():
    layout = _C.bucket_layout("bf16", 128, 1, 0, 1000, 1 << 20)
    with pytest.raises(AttributeError):
        layout.num_parts = 2
    with pytest.raises(AttributeError):
        layout.part.nbytes = 2
    assert "wire='bf16'" in repr(layout)
