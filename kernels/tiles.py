"""Where a tile lies: its piece of the stream, and the memory its elements live in.

A tile is at most TILE consecutive elements of one section of one part. If they lie in one piece at an aligned address
the tile takes the fast path: 128-bit accesses and no masks. Otherwise every element looks up its slice by bisection
among the slices that overlap the tile; most such tiles overlap two or three, but a tile of small parameters overlaps a
hundred, and then going over the slices one by one would be slow.
"""

import triton
import triton.language as tl


@triton.jit
def tiles_of(part_numel, TILE: tl.constexpr):
    return tl.cdiv(part_numel, TILE).to(tl.int32)


@triton.jit
def first_unit(num_taken):
    """The first of a stream's tiles that this program does, after `num_taken` tiles of another were dealt out."""
    num_programs = tl.num_programs(0)
    return (tl.program_id(0) + num_programs - num_taken % num_programs) % num_programs


@triton.jit
def extent(numel, part_numel, part, tile, TILE: tl.constexpr):
    """(begin, on_wire, real) of a tile of the bucket's part number `part`.

    begin: its first stream element, i64; on_wire: how many elements it has, real: how many lie before `numel`, i32.
    """
    inside = tl.cast(tile, tl.int64) * TILE
    begin = part * part_numel + inside
    on_wire = tl.minimum(part_numel - inside, TILE)
    real = tl.maximum(tl.minimum(numel - begin, on_wire), 0)
    return begin, on_wire.to(tl.int32), real.to(tl.int32)


@triton.jit
def overlapping(slices, part_numel, part, tile, TILE: tl.constexpr):
    """(low, high): the slices among which a tile's elements are, both included. `slices`: see arguments.py."""
    index = part * tiles_of(part_numel, TILE) + tile
    end = part * part_numel + tl.minimum((tl.cast(tile, tl.int64) + 1) * TILE, part_numel)
    # The next entry belongs to the element at `end`, also where that is the next part's first.
    last = slices.num_slices - 1
    low = tl.minimum(tl.load(slices.first + index), last)
    high = tl.minimum(tl.load(slices.first + index + 1, mask=end < slices.numel, other=last), last)
    return low, high


@triton.jit
def slice_of(slices, low, high, element):
    """i32, like `element` (tensor or scalar): the last slice in low…high that starts at or before it; `low` has to."""
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
    """(offset, run, low, high): where the tile's first element lies, and how many that follow it lie behind it."""
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
    """i64, like `lane`: where elements of a tile lie that is not in one piece; garbage where `mask` is False."""
    element = begin + lane
    if FLAT:
        return element
    else:
        index = slice_of(slices, low, high, element)
        return element + tl.load(slices.offsets + index, mask=mask) - tl.load(slices.starts + index, mask=mask)


@triton.jit
def count_by_slice(slices, low, high, begin, bad):
    """slices.counts[slice] += how many elements (bool [numel], from stream element `begin` on) are `bad`.

    Slice by slice, so that there is one atomic addition for each: in an overflow every element of a model is bad.
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
    """A section of a part, given the same section of part 0; `part_nbytes` is i64, so that the product is."""
    NBYTES: tl.constexpr = section.dtype.element_ty.primitive_bitwidth // 8
    return section + tl.multiple_of(part * (part_nbytes // NBYTES), 16 // NBYTES)
