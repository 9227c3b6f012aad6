"""The place of a tile: its range of the list, and its elements' places in memory.

A tile is at most TILE consecutive elements of one section of one part. An element's place in the list is congruent to
its place in memory, modulo 16 bytes of gradients; holes in the list see to that. Every vector, VEC consecutive elements
from a multiple of VEC on, therefore lies in one run or in a hole, and its address is aligned. The run is looked up once
for each vector. A tile that lies in one run needs no lookup. Only where a run is not aligned, as a view may be, are
elements accessed one by one.
"""

import triton
import triton.language as tl


@triton.jit
def tiles_of(part_numel, TILE: tl.constexpr):
    return tl.cdiv(part_numel, TILE).to(tl.int32)


@triton.jit
def first_unit(num_taken):
    """The first tile of a list that this program takes, if the first `num_taken` tiles are another list's."""
    unit = tl.program_id(0)
    if num_taken > 0:
        unit += tl.cdiv(tl.maximum(num_taken - unit, 0), tl.num_programs(0)) * tl.num_programs(0)
    return unit


@triton.jit
def part_of(unit, num_tiles):
    """(part, tile) of tile number `unit` of parts with `num_tiles` tiles: int64 and int32."""
    part = (tl.cast(unit, tl.uint32) // tl.cast(num_tiles, tl.uint32)).to(tl.int32)
    return part.to(tl.int64), unit - part * num_tiles


@triton.constexpr_function
def exact_ratio(vec):
    """Exact tiles in one of the tables' tiles, if lossy ones have vectors of `vec` elements.

    For all tiles of one shape Triton loads as many elements per thread as the widest access of that shape does. If a
    lossy tile has more than four per thread, exact tiles get a shape of their own: fp32 values of more than four per
    thread would pass through shared memory before they are stored.
    """
    return 1 if vec == 4 else 4


@triton.jit
def table_place(number, num_tiles, TILE: tl.constexpr, RATIO: tl.constexpr):
    """(index, within): the tables' tile, of RATIO · TILE elements, in which a tile lies, and the elements before it
    there.

    number: the tile's in the bucket. num_tiles: of a part.
    """
    if RATIO == 1:
        index, within = number, 0
    else:
        part, tile = part_of(number, num_tiles)
        index = part.to(tl.int32) * tl.cdiv(num_tiles, RATIO) + tile // RATIO
        within = tile % RATIO * TILE
    return index, within


@triton.jit
def run_of(slices, number, num_tiles, TILE: tl.constexpr, RATIO: tl.constexpr):
    """(run, offset) of a tile. The parameters are those of table_place.

    run: the tables' tile_run. offset: if the tile is one run, where it lies, in elements from the bucket's origin.
    """
    index, within = table_place(number, num_tiles, TILE, RATIO)
    return tl.load(slices.tile_run + index), tl.load(slices.tile_offset + index) + within


@triton.jit
def spread(x, VEC: tl.constexpr):
    """[n · VEC] from [n]: each value VEC times."""
    return tl.reshape(tl.broadcast_to(x[:, None], (x.shape[0], VEC)), (x.shape[0] * VEC,))


@triton.jit
def last_before(begins, low, high, place):
    """int32, shaped like `place`: the last of low … high that begins there or before; `low` if none does.

    begins: where each begins, in the unit of `place`.
    """
    step = 1
    while step <= high - low:
        step *= 2
    found = (place * 0).to(tl.int32) + low
    while step > 1:
        step = step // 2
        probe = tl.minimum(found + step, high)
        found = tl.where(tl.load(begins + probe) <= place, probe, found)
    return found


@triton.jit
def look_up(slices, index, begin, end, VEC: tl.constexpr, TILE: tl.constexpr, V: tl.constexpr):
    """(places, low, high), each [TILE // VEC]: where the vectors of a tile lie, and which of their elements are real.

    places: int64, elements from the bucket's origin to the vector; undefined if none of its elements is real.
    low, high: int32 from 0 to VEC: elements low … high - 1 of the vector lie in a run and before `end`.

    Args:
        index: the number of the tables' tile in which the tile lies.
        begin, end: the tile's first element in the list and the end of its part there.
        V: elements of 16 bytes of gradients.
    """
    lane = tl.arange(0, TILE // VEC)
    if V == VEC:
        vector = (begin // V).to(tl.int32) + lane
    else:
        vector = (begin // V).to(tl.int32) + ((begin % V).to(tl.int32) + lane * VEC) // V
    found = last_before(slices.vectors, tl.load(slices.first + index), tl.load(slices.first + index + 1), vector)
    position = begin + lane * VEC
    high = tl.minimum(tl.load(slices.ends + found), end) - position
    high = tl.minimum(tl.maximum(high, 0), VEC).to(tl.int32)
    low = tl.maximum(tl.load(slices.starts + found) - position, 0)
    low = tl.minimum(low, high).to(tl.int32)
    return position + tl.load(slices.deltas + found), low, high


@triton.jit
def addresses(grads, places, VEC: tl.constexpr):
    """Pointers [n · VEC] to the elements of vectors. `places`: of the vectors, from look_up.

    Aligned vectors can be accessed with masks from whole(), and any with masks from lanes(), with which Triton accesses
    elements one by one. With other masks the vectors must be aligned.
    """
    lane = tl.arange(0, places.shape[0] * VEC) % VEC
    return grads + tl.multiple_of(tl.max_contiguous(spread(places, VEC) + lane, VEC), VEC)


@triton.jit
def lanes(low, high, VEC: tl.constexpr):
    """bool [n · VEC]: whether an element is one of low … high - 1 of its vector.

    Made from bits: for comparisons with the element's number Triton 3.9 stores all of a vector's elements if its first
    is to be stored.
    """
    bits = spread((1 << high) - (1 << low), VEC) >> (tl.arange(0, low.shape[0] * VEC) % VEC)
    return (bits & 1) != 0


@triton.jit
def whole(vectors, VEC: tl.constexpr):
    """bool [n · VEC] from bool [n]: a mask that is the same for all elements of a vector."""
    return tl.max_constancy(spread(vectors.to(tl.int32), VEC) != 0, VEC)


@triton.jit
def count_by_slice(slices, begin, bad):
    """Adds the number of bad elements in each slice to its count.

    slices: CountedSlices or Counts. bad: bool [numel], for the elements from `begin` on. There is one atomic addition
    for each slice, not for each bad element: in an overflow every element of a model is bad.
    """
    NUMEL: tl.constexpr = bad.shape[0]
    lane = tl.arange(0, NUMEL)
    if tl.max(bad.to(tl.int32), axis=0) > 0:
        low = last_before(slices.slice_starts, 0, slices.num_slices - 1, begin)
        high = last_before(slices.slice_starts, low, slices.num_slices - 1, begin + NUMEL - 1)
        for index in range(low, high + 1):
            start = tl.load(slices.slice_starts + index) - begin
            end = tl.load(slices.slice_starts + index + 1) - begin
            count = tl.sum((bad & (lane >= start) & (lane < end)).to(tl.int32), axis=0)
            if count > 0:
                slot = tl.load(slices.slots + index)
                tl.atomic_add(slices.counts + slot, count.to(tl.int64), sem="relaxed")


@triton.jit
def section_of(section, part_nbytes, part):
    """A section of part number `part`, given the same section of part 0.

    part_nbytes: bytes from one part to the next, less than 2^31: a chunk has at most 2^30. The product is i64.
    """
    NBYTES: tl.constexpr = section.dtype.element_ty.primitive_bitwidth // 8
    stride = (tl.cast(part_nbytes, tl.int32) >> (NBYTES // 2)).to(tl.int64)
    return section + tl.multiple_of(tl.cast(part, tl.int64) * stride, 16 // NBYTES)
