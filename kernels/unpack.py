"""Wire bytes → gradients: x = decoded·scale, rounded to the gradient's dtype. Each byte is read once.

With SUMS there are several messages of one part each, one after the other. Then x = (fp32 sum of the decoded messages,
in their order)·scale.
"""

import triton
import triton.language as tl

from .elements import (
    FP32,
    code_places,
    decode,
    has_scales,
    per_code,
    scale_places,
    times_scales,
    to_gradient,
    to_scales,
    vector_numel,
)
from .tiles import (
    addresses,
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
def load_message(scales_in, codes_in, begin, numel, VEC: tl.constexpr, TILE: tl.constexpr, decoder):
    """fp32 [TILE]: the decoded elements of a part from `begin` on. `numel` of them exist; the others are undefined.

    decoder: constants (WIRE, BLOCK, …).
    """
    WIRE: tl.constexpr = decoder[0]
    BLOCK: tl.constexpr = decoder[1]
    places, mask = code_places(codes_in + begin // per_code(WIRE), numel, VEC, WIRE, TILE)
    if numel == TILE:
        codes = tl.load(places)
    else:
        codes = tl.load(places, mask=mask)
    values = decode(codes, WIRE)
    if has_scales(WIRE):
        scales_at, in_part = scale_places(scales_in + begin // BLOCK, numel, VEC, BLOCK, TILE)
        values = times_scales(values, to_scales(tl.load(scales_at, mask=in_part)), VEC)
    return values


@triton.jit
def store_tile(grads, slices, number, num_tiles, begin, end, run, offset, g, VEC: tl.constexpr, RATIO: tl.constexpr):
    """Writes the real elements of a tile: `g` [TILE], in the gradients' dtype.

    number, num_tiles, RATIO: as for table_place. begin, end: as for look_up. run, offset: as from run_of.
    """
    TILE: tl.constexpr = g.shape[0]
    if (run == TILE * RATIO) & (offset >= 0):  # always is: both are loaded at once, before the branch
        lane = tl.max_contiguous(tl.arange(0, TILE), VEC)
        tl.store(grads + offset // VEC * VEC + lane, g)
    else:
        V: tl.constexpr = vector_numel(grads.dtype.element_ty)
        index, _ = table_place(number, num_tiles, TILE, RATIO)
        places, low, high = look_up(slices, index, begin, end, VEC, TILE, V)
        g_at = addresses(grads, places, VEC)
        if run == 0:
            full = high - low == VEC
            tl.store(g_at, g, mask=whole(full, VEC))
            high = tl.where(full, low, high)
        tl.store(g_at, g, mask=lanes(low, high, VEC))


@triton.jit
def unpack_slices(
    grads, slices, sections, parts, num_messages, taken, scale, decoder, TILE: tl.constexpr, RATIO: tl.constexpr
):
    """Unpacks this program's tiles of a slice list.

    sections: (scales, codes) of part 0 in the first message. parts: (bytes from one part, or message, to the next,
    elements of a part, number of the first part, number of parts). taken: number of units before the list. decoder:
    constants (WIRE, BLOCK, SUMS). RATIO: tiles in a tile of the tables.
    """
    SUMS: tl.constexpr = decoder[2]
    VEC: tl.constexpr = vector_numel(grads.dtype.element_ty, sections[1].dtype.element_ty)
    stride, part_numel, first_part, num_parts = parts
    num_tiles = tiles_of(part_numel, TILE)
    first = first_part.to(tl.int32) * num_tiles - taken
    for unit in range(first_unit(taken), taken + num_parts * num_tiles, tl.num_programs(0)):
        run, offset = run_of(slices, first + unit, num_tiles, TILE, RATIO)
        part, tile = part_of(unit - taken, num_tiles)
        inside = tl.cast(tile, tl.int64) * TILE
        numel = tl.minimum(part_numel - inside, TILE).to(tl.int32)
        scales, codes = section_of(sections[0], stride, part), section_of(sections[1], stride, part)
        values = load_message(scales, codes, inside, numel, VEC, TILE, decoder)
        if SUMS:
            for message in range(1, num_messages):
                scales, codes = section_of(sections[0], stride, message), section_of(sections[1], stride, message)
                values += load_message(scales, codes, inside, numel, VEC, TILE, decoder)
        g = to_gradient(values * scale, grads.dtype.element_ty)
        begin = (first_part + part) * part_numel + inside
        store_tile(grads, slices, first + unit, num_tiles, begin, begin + numel, run, offset, g, VEC, RATIO)


@triton.jit(
    do_not_specialize=["lossy", "exact", "shape", "first_part", "num_parts", "num_messages", "scale"],
)
def unpack_kernel(
    grads,
    lossy,  # Slices
    exact,  # Slices
    message,  # Sections
    shape,  # PartShape
    first_part: tl.int64,
    num_parts: tl.int32,
    num_messages: tl.int32,
    scale: tl.float32,
    WIRE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SUMS: tl.constexpr,
):
    RATIO: tl.constexpr = exact_ratio(vector_numel(grads.dtype.element_ty, message.codes.dtype.element_ty))
    # The decoder tuples are not assigned to variables: Triton 3.6 would turn their constants into variables.
    unpack_slices(
        grads,
        exact,
        (message.scales, message.exact),
        (shape.stride, shape.exact_numel, first_part, num_parts),
        num_messages,
        0,
        scale,
        (FP32, BLOCK, SUMS),
        TILE // RATIO,
        RATIO,
    )
    unpack_slices(
        grads,
        lossy,
        (message.scales, message.codes),
        (shape.stride, shape.numel, first_part, num_parts),
        num_messages,
        num_parts * tiles_of(shape.exact_numel, TILE // RATIO),
        scale,
        (WIRE, BLOCK, SUMS),
        TILE,
        1,
    )
