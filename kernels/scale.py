"""x *= scale, for fp32 buckets that are sent in place. Counts products that are not finite by slice, as pack does."""

import triton
import triton.language as tl

from .constants import NUM_THREADS
from .elements import INF_BITS, magnitude_bits, max_in_thread
from .tiles import count_by_slice


@triton.jit
def count_products(data, numel, slices, num_tiles, TILE: tl.constexpr):
    # A thread reads elements that other threads have written.
    tl.debug_barrier()
    lane = tl.arange(0, TILE)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        begin = tl.cast(tile, tl.int64) * TILE
        y = tl.load(data + begin + lane, mask=lane < numel - begin, other=0.0)
        count_by_slice(slices, begin, magnitude_bits(y) >= INF_BITS)


@triton.jit(do_not_specialize=["numel", "scale", "slices"])
def scale_kernel(
    data,
    numel: tl.int64,
    scale: tl.float32,
    slices,  # Counts
    TILE: tl.constexpr,
):
    VEC: tl.constexpr = 4
    lane = tl.max_contiguous(tl.arange(0, TILE), VEC)
    num_tiles = tl.cdiv(numel, TILE).to(tl.int32)
    seen = tl.zeros([min(NUM_THREADS, TILE // 16)], tl.int32)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        begin = tl.cast(tile, tl.int64) * TILE
        if begin + TILE <= numel:
            y = tl.load(data + begin + lane) * scale
            tl.store(data + begin + lane, y)
            seen = tl.maximum(seen, max_in_thread(magnitude_bits(y), seen.shape[0], VEC))
        else:
            mask = lane < numel - begin
            y = tl.load(data + begin + lane, mask=mask, other=0.0) * scale
            tl.store(data + begin + lane, y, mask=mask)
            seen = tl.maximum(seen, max_in_thread(tl.where(mask, magnitude_bits(y), 0), seen.shape[0], VEC))
    if tl.max(seen, axis=0) >= INF_BITS:
        count_products(data, numel, slices, num_tiles, TILE)
