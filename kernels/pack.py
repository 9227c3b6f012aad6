"""Gradients → wire bytes: y = x·scale, rounded to the wire's dtype. Each gradient is read once, each byte written once.

With FEEDBACK, the residual is added to y first. The count of elements that are not finite is of y before that.

The main loop only notes whether it has met an element that is not finite. A program that has met one goes over its
tiles again and counts by slice. Such elements are rare, so this may be slow.
"""

import triton
import triton.language as tl

from .constants import NUM_THREADS
from .elements import FP32, INF_BITS, magnitude_bits, max_in_thread, to_fp32, vector_numel
from .encode import encode_tile
from .residual import load_residual
from .tiles import (
    addresses,
    count_by_slice,
    exact_ratio,
    first_unit,
    lanes,
    look_up,
    part_of,
    run_of,
    section_of,
    table_place,
    tiles_of,
    whole,
)


@triton.jit
def load_tile(
    grads,
    slices,
    number,
    num_tiles,
    begin,
    end,
    run,
    offset,
    scale,
    VEC: tl.constexpr,
    TILE: tl.constexpr,
    RATIO: tl.constexpr,
):
    """fp32 [TILE]: the scaled gradients of a tile; +0 in holes and past its part's end, which are not scaled: NaN·0 is
    NaN.

    number, num_tiles, RATIO: as for table_place. begin, end: as for look_up. run, offset: as from run_of.
    """
    if (run == TILE * RATIO) & (offset >= 0):  # always is: both are loaded at once, before the branch
        lane = tl.max_contiguous(tl.arange(0, TILE), VEC)
        y = to_fp32(tl.load(grads + offset // VEC * VEC + lane)) * scale
    else:
        V: tl.constexpr = vector_numel(grads.dtype.element_ty)
        index, _ = table_place(number, num_tiles, TILE, RATIO)
        places, low, high = look_up(slices, index, begin, end, VEC, TILE, V)
        x_at = addresses(grads, places, VEC)
        real = lanes(low, high, VEC)
        if run == 0:
            # A vector at a run's edge is loaded whole.
            x = tl.load(x_at, mask=whole(low < high, VEC))
        else:
            x = tl.load(x_at, mask=real)
        y = tl.where(real, to_fp32(x) * scale, 0.0)
    return y


@triton.jit
def pack_slices(seen, grads, slices, sections, parts, taken, scale, encoder, TILE: tl.constexpr, RATIO: tl.constexpr):
    """Packs this program's tiles of a slice list. Returns `seen`, each thread's greatest magnitude so far, updated.

    sections: (scales, codes) of part 0. parts: (bytes from one part to the next, elements of a part, number of the
    first part, number of parts). taken: number of units before the list. encoder: as for encode_tile. RATIO: tiles in a
    tile of the tables.
    """
    residual = encoder[0]
    FEEDBACK: tl.constexpr = encoder[3]
    VEC: tl.constexpr = vector_numel(grads.dtype.element_ty, sections[1].dtype.element_ty, residual.dtype.element_ty)
    stride, part_numel, first_part, num_parts = parts
    num_tiles = tiles_of(part_numel, TILE)
    first = first_part.to(tl.int32) * num_tiles - taken
    for unit in range(first_unit(taken), taken + num_parts * num_tiles, tl.num_programs(0)):
        run, offset = run_of(slices, first + unit, num_tiles, TILE, RATIO)
        part, tile = part_of(unit - taken, num_tiles)
        own = (section_of(sections[0], stride, part), section_of(sections[1], stride, part))
        inside = tl.cast(tile, tl.int64) * TILE
        begin = (first_part + part) * part_numel + inside
        numel = tl.minimum(part_numel - inside, TILE).to(tl.int32)
        kept = load_residual(residual, begin, numel, VEC, TILE, FEEDBACK)
        y = load_tile(
            grads, slices, first + unit, num_tiles, begin, begin + numel, run, offset, scale, VEC, TILE, RATIO
        )
        seen = tl.maximum(seen, max_in_thread(magnitude_bits(y), seen.shape[0], VEC))
        encode_tile(y, own, tile, numel, part_numel, kept, begin, VEC, encoder)
    return seen


@triton.jit
def count_slices(grads, slices, parts, taken, scale, VEC: tl.constexpr, TILE: tl.constexpr, RATIO: tl.constexpr):
    """Goes over a slice list as pack_slices does, and adds the number of non-finite elements to slices.counts."""
    _stride, part_numel, first_part, num_parts = parts
    num_tiles = tiles_of(part_numel, TILE)
    first = first_part.to(tl.int32) * num_tiles - taken
    for unit in range(first_unit(taken), taken + num_parts * num_tiles, tl.num_programs(0)):
        part, tile = part_of(unit - taken, num_tiles)
        begin = (first_part + part) * part_numel + tl.cast(tile, tl.int64) * TILE
        end = (first_part + part + 1) * part_numel
        run, offset = run_of(slices, first + unit, num_tiles, TILE, RATIO)
        y = load_tile(grads, slices, first + unit, num_tiles, begin, end, run, offset, scale, VEC, TILE, RATIO)
        count_by_slice(slices, begin, magnitude_bits(y) >= INF_BITS)


@triton.jit(do_not_specialize=["lossy", "exact", "shape", "first_part", "num_parts", "scale"])
def pack_kernel(
    grads,
    lossy,  # CountedSlices
    exact,  # CountedSlices
    out,  # Sections
    shape,  # PartShape
    first_part: tl.int64,
    num_parts: tl.int32,
    scale: tl.float32,
    residual,
    WIRE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    FEEDBACK: tl.constexpr,
):
    parts = (shape.stride, shape.numel, first_part, num_parts)
    exact_parts = (shape.stride, shape.exact_numel, first_part, num_parts)
    VEC: tl.constexpr = vector_numel(grads.dtype.element_ty, out.codes.dtype.element_ty, residual.dtype.element_ty)
    RATIO: tl.constexpr = exact_ratio(VEC)
    EXACT_TILE: tl.constexpr = TILE // RATIO
    num_exact = num_parts * tiles_of(shape.exact_numel, EXACT_TILE)
    seen = tl.zeros([min(NUM_THREADS, EXACT_TILE // 4)], tl.int32)
    # The encoder tuples are not assigned to variables: Triton 3.6 would turn their constants into variables.
    seen = pack_slices(
        seen,
        grads,
        exact,
        (out.scales, out.exact),
        exact_parts,
        0,
        scale,
        (residual, FP32, BLOCK, 0),
        EXACT_TILE,
        RATIO,
    )
    seen = pack_slices(
        seen,
        grads,
        lossy,
        (out.scales, out.codes),
        parts,
        num_exact,
        scale,
        (residual, WIRE, BLOCK, FEEDBACK),
        TILE,
        1,
    )
    if tl.max(seen, axis=0) >= INF_BITS:
        count_slices(grads, exact, exact_parts, 0, scale, 4, EXACT_TILE, RATIO)
        count_slices(grads, lossy, parts, num_exact, scale, VEC, TILE, 1)
