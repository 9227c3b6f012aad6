"""Instructions in which threads meet, ready to run: PTX ISA, sections shfl.sync, redux.sync and bar.

Each comes with a function ready(grid, arrived): of the threads that have arrived, bool [threads], those whose partners
have arrived, too. None means all threads.
"""

from collections.abc import Callable

import numpy as np

from .memory import WARP, MemoryFault
from .operands import Grid, Run, reader, writer
from .operation import DTYPES, Modifiers, Unsupported, require
from .parse import Instruction, Kernel

Ready = Callable[[Grid, np.ndarray], "np.ndarray | None"]


def warps_ready(member_mask: Callable[[Grid], np.ndarray]) -> Ready:
    """ready() of whole warps: no kernel has exchanges of some lanes."""

    def ready(grid, arrived):
        masks = grid.full(member_mask(grid), arrived)
        if (masks != np.uint32(0xFFFFFFFF)).any():
            bad = int(np.flatnonzero(arrived)[np.argmax(masks != np.uint32(0xFFFFFFFF))])
            raise MemoryFault("the member mask leaves out lanes, which is not known here", bad, -1, 0)
        whole = arrived.reshape(-1, WARP).all(axis=1)
        return None if whole.all() else np.repeat(whole, WARP)

    return ready


def shfl_step(kernel: Kernel, instruction: Instruction) -> tuple[Run, Ready]:
    """shfl.sync.bfly of a whole warp: each lane gets the value of the lane whose number differs in the bits of b."""
    if instruction.opcode != ("shfl", "sync", "bfly", "b32"):
        raise Unsupported("unknown exchange")
    destination, source, other, clamp, masks = instruction.operands
    if clamp != "31" or "|" in destination:
        raise Unsupported("only exchanges of 32 lanes without a predicate are known")
    value, other, masks = (reader(kernel, text, "b32") for text in (source, other, masks))
    bits = writer(kernel, destination, "b32")

    def run(grid, mask):
        values = value(grid)
        place = grid.threads ^ (other(grid).astype(np.int64) & 31)
        grid.put(destination, bits(values if len(values) == 1 else values[place]), mask)

    return run, warps_ready(masks)


def redux_step(kernel: Kernel, instruction: Instruction) -> tuple[Run, Ready]:
    modifiers, kind = Modifiers(instruction.opcode[1:-1]), instruction.opcode[-1]
    functions = {"add": np.add, "min": np.minimum, "max": np.maximum}
    modifiers.one("sync")
    function = functions[modifiers.one(*functions)]
    modifiers.check()
    require(kind, "u32", "s32")
    destination, source, masks = instruction.operands
    value, masks, bits = reader(kernel, source, kind), reader(kernel, masks, "b32"), writer(kernel, destination, kind)

    def run(grid, mask):
        by_warp = grid.full(value(grid)).reshape(-1, WARP)
        grid.put(destination, bits(np.repeat(function.reduce(by_warp, axis=1, dtype=DTYPES[kind]), WARP)), mask)

    return run, warps_ready(masks)


def bar_step(kernel: Kernel, instruction: Instruction) -> tuple[Run, Ready]:
    """bar.sync of all threads of a block."""
    if instruction.opcode != ("bar", "sync") or len(instruction.operands) != 1:
        raise Unsupported("unknown barrier")

    def ready(grid, arrived):
        complete = arrived.reshape(grid.num_blocks, grid.num_threads).all(axis=1)
        return None if complete.all() else np.repeat(complete, grid.num_threads)

    def run(grid, mask):
        grid.tick(mask)
        grid.shared.check_reads(forget=mask is None)

    return run, ready


EXCHANGES = {"shfl": shfl_step, "redux": redux_step, "bar": bar_step}
