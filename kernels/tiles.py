"""Where a tile lies: its range of the slice list, and its elements' places in memory.

A tile is at most TILE consecutive elements of one section of one part. If they are contiguous in memory, from an
aligned address on, the tile takes the fast path: 128-bit accesses and no masks. Otherwise every element finds its slice
by bisection among the slices that overlap the tile. Most such tiles overlap two or three slices, but a tile of small
parameters overlaps a hundred. Going over these one by one would be slow.
"""

import triton
import triton.language as tl


@triton.jit
def tiles_of(part_numel, TILE: tl.constexpr):
    return tl.cdiv(part_numel, TILE).to(tl.int32)


@triton.jit
def first_unit(num_taken):
    """The first tile of a list that this program takes, if `num_taken` tiles of another list were dealt before."""
    num_programs = tl.num_programs(0)
    return (tl.program_id(0) + num_programs - num_taken % num_programs) % num_programs


@triton.jit
def extent(numel, part_numel, part, tile, TILE: tl.constexpr):
    """(begin, on_wire, real) of a tile of the bucket's part number `part`.

    begin: the tile's first element, i64. on_wire: the number of its elements, i32. real: the number of its
    elements before the list's end, `numel`, i32.
    """
    inside = tl.cast(tile, tl.int64) * TILE
    begin = part * part_numel + inside
    on_wire = tl.minimum(part_numel - inside, TILE)
    real = tl.maximum(tl.minimum(numel - begin, on_wire), 0)
    return begin, on_wire.to(tl.int32), real.to(tl.int32)


@triton.jit
def overlapping(slices, part_numel, part, tile, TILE: tl.constexpr):
    """(low, high): a tile's elements lie in the slices low … high, both included. `slices`: see arguments.py."""
    index = part * tiles_of(part_numel, TILE) + tile
    end = part * part_numel + tl.minimum((tl.cast(tile, tl.int64) + 1) * TILE, part_numel)
    # The table's next entry belongs to the element at `end`, even if that is the next part's first.
    last = slices.num_slices - 1
    low = tl.minimum(tl.load(slices.first + index), last)
    high = tl.minimum(tl.load(slices.first + index + 1, mask=end < slices.numel, other=last), last)
    return low, high


@triton.jit
def slice_of(slices, low, high, element):
    """i32, shaped like `element` (tensor or scalar): the last of the slices low … high that starts at or before it.

    Slice `low` must do so.
    """
    width = high - low
    step = 1
    while step <= width:
        step *= 2
    found = (element * 0).to(tl.int32) + low
    while step > 1:
        step = step // 2
        probe = found + step
        start = tl.load(slices.starts + probe, mask=probe <= high, other=0)
        found = tl.where((probe <= high) & (start <= element), probe, found)
    return found


@triton.jit
def place_of(slices, part_numel, part, tile, TILE: tl.constexpr, FLAT: tl.constexpr):
    """(offset, run, low, high) of a tile.

    offset: where its first element lies, in elements from the bucket's origin. run: the number of elements, from
    that one on, that are known to be contiguous in memory. low, high: as from overlapping(); zeros if FLAT.
    """
    begin, _, real = extent(slices.numel, part_numel, part, tile, TILE)
    if FLAT:
        low = 0
        high = 0
        offset = begin
        run = real.to(tl.int64)
    else:
        low, high = overlapping(slices, part_numel, part, tile, TILE)
        offset = tl.load(slices.offsets + low) + begin - tl.load(slices.starts + low)
        run = tl.load(slices.starts + low + 1) - begin
    return offset, run, low, high


@triton.jit
def offsets_of(slices, begin, low, high, lane, mask, FLAT: tl.constexpr):
    """i64, shaped like `lane`: where the elements begin + lane lie, in elements from the bucket's origin.

    Undefined where `mask` is False. low, high: the slices that hold the elements.
    """
    element = begin + lane
    if FLAT:
        return element
    else:
        index = slice_of(slices, low, high, element)
        return element + tl.load(slices.offsets + index, mask=mask) - tl.load(slices.starts + index, mask=mask)


@triton.jit
def count_by_slice(slices, low, high, begin, bad):
    """Adds the number of bad elements to slices.counts, slice by slice.

    bad: bool [numel], for the elements from `begin` on. There is one atomic addition for each slice, not for each
    bad element: in an overflow every element of a model is bad.
    """
    NUMEL: tl.constexpr = bad.shape[0]
    lane = tl.arange(0, NUMEL)
    if tl.max(bad.to(tl.int32), axis=0) > 0:
        for index in range(low, high + 1):
            start = tl.maximum(tl.load(slices.starts + index) - begin, 0).to(tl.int32)
            end = tl.minimum(tl.load(slices.starts + index + 1) - begin, NUMEL).to(tl.int32)
            count = tl.sum((bad & (lane >= start) & (lane < end)).to(tl.int32), axis=0)
            if count > 0:
                tl.atomic_add(slices.counts + index, count.to(tl.int64), sem="relaxed")


@triton.jit
def section_of(section, part_nbytes, part):
    """A section of part number `part`, given the same section of part 0.

    part_nbytes: bytes from one part to the next; it is i64, so that the product is i64, too.
    """
    NBYTES: tl.constexpr = section.dtype.element_ty.primitive_bitwidth // 8
    return section + tl.multiple_of(part * (part_nbytes // NBYTES), 16 // NBYTES)
