"""Holes of slice lists, and the tables that say where a list's elements lie: what every vector access relies on."""

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedcomm.native import _C

HOLE, TILE = _C.HOLE, 64
NUMELS = st.lists(st.tuples(st.integers(0, 200), st.booleans()), min_size=1, max_size=30)


def slices_of(numels: list[tuple[int, bool]]) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Slices one after another in memory: (the mask of those that are chosen, their (offset, numel))."""
    mask = torch.cat([torch.full((numel,), chosen) for numel, chosen in numels])
    offsets = [sum(numel for numel, _ in numels[:i]) for i in range(len(numels))]
    return mask, [(at, numel) for at, (numel, chosen) in zip(offsets, numels, strict=True) if chosen]


def positions(places: list[tuple[int, int]]) -> torch.Tensor:
    """int64: of each element of the list its place in memory, HOLE in holes."""
    return torch.tensor([HOLE if at == HOLE else at + i for at, numel in places for i in range(numel)])


@settings(max_examples=150, deadline=None)
@given(numels=NUMELS, grad_nbytes=st.sampled_from([2, 4]))
def test_a_vector_lies_in_one_run_of_memory_at_an_aligned_address(numels, grad_nbytes):
    vector = _C.ALIGN_NBYTES // grad_nbytes
    mask, slices = slices_of(numels)
    at = positions(_C.with_holes(slices, grad_nbytes))
    assert torch.equal(at, reference.slice_list(mask, grad_nbytes))
    assert at[at != HOLE].tolist() == mask.nonzero().view(-1).tolist()
    for begin in range(0, len(at), vector):
        place = at[begin : begin + vector]
        origins = (place - torch.arange(len(place)))[place != HOLE]
        assert len(origins.unique()) <= 1 and not (origins % vector).any()
    assert int((at == HOLE).sum()) <= 2 * (vector - 1) * len(slices)


@settings(max_examples=100, deadline=None)
@given(numels=NUMELS, grad_nbytes=st.sampled_from([2, 4]), num_parts=st.integers(1, 3), shift=st.integers(0, 3))
def test_the_tables_find_every_element(numels, grad_nbytes, num_parts, shift):
    """`shift`: gradients that lie elsewhere than the list supposes, as views of a tensor do."""
    vector = _C.ALIGN_NBYTES // grad_nbytes
    _, slices = slices_of(numels)
    places = [(at if at == HOLE else at + shift, numel) for at, numel in _C.with_holes(slices, grad_nbytes)]
    wanted = positions(places)
    layout = _C.bucket_layout("bf16", 128, num_parts, 0, len(wanted), 512)
    tile_offset, tile_run, first, vectors, starts, ends, deltas, slice_starts = _C.slice_table(
        layout, False, places, TILE, grad_nbytes
    )
    part, tiles_per_part = layout.part.lossy_numel, -(-layout.part.lossy_numel // TILE)
    assert len(tile_run) == layout.num_chunks * num_parts * tiles_per_part == len(first) - 1
    found = torch.full((layout.padded_numel,), HOLE)
    for tile, run in enumerate(tile_run.tolist()):
        begin = tile // tiles_per_part * part + tile % tiles_per_part * TILE
        end = min(begin + TILE, begin // part * part + part)
        if run > 0:
            assert run == TILE == end - begin and tile_offset[tile] % vector == 0
            found[begin:end] = tile_offset[tile] + torch.arange(TILE)
            continue
        for at in range(begin, end):
            of = max(i for i in range(first[tile], first[tile + 1] + 1) if i == 0 or vectors[i] <= at // vector)
            if starts[of] <= at < ends[of]:
                found[at] = at + deltas[of]
                assert run == -1 or deltas[of] % vector == 0
    assert torch.equal(found[: len(wanted)], wanted) and (found[len(wanted) :] == HOLE).all()
    assert slice_starts[0] == 0 and slice_starts[-1] == len(wanted)


def test_a_table_refuses_slices_that_are_not_the_layouts():
    layout = _C.bucket_layout("bf16", 128, 1, 0, 8, 512)
    with pytest.raises(ValueError, match="the slices hold 7 elements, the layout 8"):
        _C.slice_table(layout, False, [(0, 7)], TILE, 4)
