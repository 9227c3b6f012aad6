"""Instructions in which threads meet, ready to run: PTX ISA, sections shfl.sync, vote.sync, redux.sync, bar,
bar.warp.sync, ldmatrix and stmatrix.

Each comes with a function ready(grid, arrived): of the threads that have arrived, bool [threads], those whose partners
have arrived, too. None means all threads.
"""

from collections.abc import Callable

import numpy as np

from .memory import WARP, MemoryFault
from .operands import Grid, Run, address_reader, members, reader, writer
from .operation import DTYPES, Modifiers, Unsupported, require
from .parse import Instruction, Kernel

ALL = np.uint32(0xFFFFFFFF)

Ready = Callable[[Grid, np.ndarray], "np.ndarray | None"]


def warps_ready(member_mask: Callable[[Grid], np.ndarray]) -> Ready:
    """ready() of the threads of a warp that a member mask names."""

    def ready(grid, arrived):
        masks = member_mask(grid)
        lanes = arrived.reshape(-1, WARP)
        if len(masks) == 1 and masks[0] == ALL:
            whole = lanes.all(axis=1)
            return None if whole.all() else np.repeat(whole, WARP)
        masks = grid.full(masks).reshape(-1, WARP)
        here = np.packbits(lanes, axis=1, bitorder="little").view(np.uint32)
        bits = masks[:, :, None] >> np.arange(WARP, dtype=np.uint32) & 1 == 1
        alone = lanes & ~bits[:, range(WARP), range(WARP)]
        if alone.any():
            bad = int(np.argmax(alone))
            raise MemoryFault(f"the member mask {int(masks.flat[bad]):#x} leaves out the thread itself", bad, -1, 0)
        complete = lanes & (masks & ~here == 0)
        different = complete[:, :, None] & bits & (masks[:, :, None] != masks[:, None, :])
        if different.any():
            bad = int(np.argmax(different.any(axis=2)))
            raise MemoryFault("threads of a warp meet with different member masks", bad, -1, 0)
        return None if complete.all() else complete.reshape(-1)

    return ready


def shfl_step(kernel: Kernel, instruction: Instruction) -> tuple[Run, Ready]:
    modifiers = Modifiers(instruction.opcode[1:-1])
    require(instruction.opcode[-1], "b32")
    mode = modifiers.one("up", "down", "bfly", "idx") if modifiers.has("sync") else modifiers.one("sync")
    modifiers.check()
    target, source, *others = instruction.operands
    destination, _, predicate = target.partition("|")
    value, offset, clamps, masks = (reader(kernel, text, "b32") for text in (source, *others))
    bits = writer(kernel, destination, "b32")

    def run(grid, mask):
        lane = (grid.threads % WARP).astype(np.int64)
        b, c = offset(grid).astype(np.int64) & 31, clamps(grid).astype(np.int64)
        clamp, segment = c & 31, c >> 8 & 31
        last = (lane & segment) | (clamp & ~segment)
        first = lane & segment
        other = {
            "up": lambda: lane - b,
            "down": lambda: lane + b,
            "bfly": lambda: lane ^ b,
            "idx": lambda: first | (b & ~segment),
        }[mode]()
        inside = other >= last if mode == "up" else other <= last
        place = grid.threads - lane + np.where(inside, other, lane)
        foreign = grid.full(masks(grid)) >> (place % WARP).astype(np.uint32) & 1 == 0
        foreign = foreign if mask is None else foreign & mask
        if foreign.any():
            bad = int(np.argmax(foreign))
            raise MemoryFault(f"reads lane {int(place[bad] % WARP)}, which the member mask leaves out", bad, -1, 0)
        values = value(grid)
        if destination != "_":
            grid.put(destination, bits(values if len(values) == 1 else values[place]), mask)
        if predicate and predicate != "_":
            grid.put(predicate, inside, mask)

    return run, warps_ready(masks)


def by_warp(grid: Grid, mask: np.ndarray | None, values: np.ndarray, neutral) -> np.ndarray:
    """[warps, 32]: the values of the threads in the mask, and `neutral` for the others."""
    values = grid.full(values)
    return (values if mask is None else np.where(mask, values, neutral)).reshape(-1, WARP)


def vote_step(kernel: Kernel, instruction: Instruction) -> tuple[Run, Ready]:
    modifiers = Modifiers(instruction.opcode[1:-1])
    mode = modifiers.one("ballot", "any", "all", "uni") if modifiers.has("sync") else modifiers.one("sync")
    modifiers.check()
    destination, predicate, masks = instruction.operands
    require(instruction.opcode[-1], "b32" if mode == "ballot" else "pred")
    vote, masks = reader(kernel, predicate, "pred"), reader(kernel, masks, "b32")
    bits = writer(kernel, destination, instruction.opcode[-1])

    def run(grid, mask):
        true, false = by_warp(grid, mask, vote(grid), False), by_warp(grid, mask, ~vote(grid), False)
        result = {
            "ballot": lambda: np.packbits(true, axis=1, bitorder="little").view(np.uint32)[:, 0],
            "any": lambda: true.any(axis=1),
            "all": lambda: ~false.any(axis=1),
            "uni": lambda: ~(true.any(axis=1) & false.any(axis=1)),
        }[mode]()
        grid.put(destination, bits(np.repeat(result, WARP)), mask)

    return run, warps_ready(masks)


def redux_step(kernel: Kernel, instruction: Instruction) -> tuple[Run, Ready]:
    modifiers, kind = Modifiers(instruction.opcode[1:-1]), instruction.opcode[-1]
    functions = {"add": np.add, "min": np.minimum, "max": np.maximum}
    functions |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    modifiers.one("sync")
    name = modifiers.one(*functions)
    modifiers.check()
    require(kind, *(("u32", "s32") if name in ("add", "min", "max") else ("b32",)))
    function, dtype = functions[name], DTYPES[kind]
    limits = np.iinfo(dtype)
    neutral = dtype.type({"min": limits.max, "max": limits.min, "and": limits.max}.get(name, 0))
    destination, source, masks = instruction.operands
    value, masks, bits = reader(kernel, source, kind), reader(kernel, masks, "b32"), writer(kernel, destination, kind)

    def run(grid, mask):
        result = function.reduce(by_warp(grid, mask, value(grid), neutral), axis=1, dtype=dtype)
        grid.put(destination, bits(np.repeat(result, WARP)), mask)

    return run, warps_ready(masks)


def bar_step(kernel: Kernel, instruction: Instruction) -> tuple[Run, Ready]:
    kind = [name for name in instruction.opcode[1:] if name not in ("cta", "aligned")]
    if kind == ["warp", "sync"]:
        masks = reader(kernel, instruction.operands[0], "b32")
        return lambda grid, mask: grid.tick(mask, of_block=False), warps_ready(masks)
    if kind != ["sync"] or len(instruction.operands) > 2:
        raise Unsupported("unknown barrier")
    wanted = reader(kernel, instruction.operands[1], "u32") if len(instruction.operands) == 2 else None

    def ready(grid, arrived):
        count = grid.num_threads if wanted is None else int(wanted(grid)[0])
        num_arrived = arrived.reshape(grid.num_blocks, grid.num_threads).sum(axis=1)
        if count % WARP or (num_arrived > count).any():
            bad = int(np.argmax(arrived))
            raise MemoryFault(f"{num_arrived.max()} threads come to a barrier of {count}", bad, -1, 0)
        complete = num_arrived == count
        if complete.all() and count == grid.num_threads:
            return None
        return arrived & np.repeat(complete, grid.num_threads)

    def run(grid, mask):
        grid.tick(mask, of_block=True)
        grid.shared.check_reads(forget=mask is None)

    return run, ready


def matrix_step(kernel: Kernel, instruction: Instruction) -> tuple[Run, Ready]:
    """ldmatrix and stmatrix: matrices of 8 rows of 16 bytes in shared memory. Lanes 8·i to 8·i + 7 hold the addresses
    of the rows of matrix i. A lane holds two neighbors of row lane // 4, or with .trans of that column."""
    name, modifiers = instruction.opcode[0], Modifiers(instruction.opcode[1:-1])
    require(instruction.opcode[-1], "b16")
    for needed in ("sync", "aligned", "m8n8", "shared"):
        modifiers.one(needed)
    num_matrices, transposed = int(modifiers.one("x1", "x2", "x4")[1:]), modifiers.has("trans")
    modifiers.check()
    place, vector = instruction.operands[:: 1 if name == "stmatrix" else -1]
    names, address, line = members(vector), address_reader(kernel, place, "u32"), instruction.line
    values, bits = [reader(kernel, text, "b32") for text in names], [writer(kernel, text, "b32") for text in names]
    if len(names) != num_matrices:
        raise Unsupported(f"{len(names)} registers instead of {num_matrices}")

    def places(grid, mask, matrix, half):
        """Addresses of two bytes of the matrix for each lane in the mask."""
        lane, rows = grid.threads % WARP, grid.full(address(grid))
        row, column = (2 * (lane % 4) + half, lane // 4) if transposed else (lane // 4, 2 * (lane % 4) + half)
        starts = grid.full(rows[grid.threads - lane + 8 * matrix + row], mask)
        misaligned = starts % np.uint64(16) != 0
        if misaligned.any():
            bad = int(np.argmax(misaligned))
            raise MemoryFault(
                "misaligned row of 16 bytes", int(grid.full(grid.threads, mask)[bad]), int(starts[bad]), line
            )
        return starts + (2 * grid.full(column, mask)).astype(np.uint64)

    def load(grid, mask):
        by = grid.by(mask, line)
        for matrix, (text, extend) in enumerate(zip(names, bits, strict=True)):
            low, high = (
                grid.shared.load(places(grid, mask, matrix, half), by, 2, 1)[0].astype(np.uint32) for half in (0, 1)
            )
            grid.put_chosen(text, extend(low | high << np.uint32(16)), mask)

    def store(grid, mask):
        by = grid.by(mask, line)
        for matrix, value in enumerate(values):
            word = grid.full(value(grid), mask)
            for half in (0, 1):
                part = (word >> np.uint32(16 * half)).astype(np.uint16)
                grid.shared.store(places(grid, mask, matrix, half), by, [part])

    everyone = np.array([ALL])
    return (store if name == "stmatrix" else load), warps_ready(lambda grid: everyone)


EXCHANGES = {
    **{"shfl": shfl_step, "vote": vote_step, "redux": redux_step},
    **{"bar": bar_step, "barrier": bar_step},
    **{"ldmatrix": matrix_step, "stmatrix": matrix_step},
}
