"""Instructions of one thread, ready to run: arithmetic, mov, and access to memory."""

import functools

import numpy as np

from .arithmetic import operation
from .operands import UNSIGNED, Run, address_reader, members, reader, writer
from .operation import DTYPES, Modifiers, Unsupported, require
from .parse import Instruction, Kernel

# ---- arithmetic and mov


def arithmetic_step(kernel: Kernel, instruction: Instruction) -> Run:
    op = operation(instruction.opcode)
    destination, *sources = instruction.operands
    if len(sources) != len(op.sources):
        raise Unsupported(f"{len(sources)} operands instead of {len(op.sources)}")
    read = [reader(kernel, text, kind, op.any_width) for text, kind in zip(sources, op.sources, strict=True)]
    bits, compute = writer(kernel, destination, op.result, op.any_width), op.compute

    def run(grid, mask):
        operands = [operand(grid) for operand in read]
        grid.put(destination, bits(compute(*operands)), mask)

    return run


def mov_step(kernel: Kernel, instruction: Instruction) -> Run:
    """mov, also between a vector and a register of the same bits."""
    kind = instruction.opcode[-1]
    destination, source = instruction.operands
    if len(instruction.opcode) != 2 or kind not in DTYPES:
        raise Unsupported("unknown type or modifier")
    if not (destination + source).count("{"):
        read, bits = reader(kernel, source, kind), writer(kernel, destination, kind)
        return lambda grid, mask: grid.put(destination, bits(read(grid)), mask)
    vector = members(destination if destination.startswith("{") else source)
    part, dtype = f"b{8 * DTYPES[kind].itemsize // len(vector)}", DTYPES[kind]
    shifts = [dtype.type(DTYPES[part].itemsize * 8 * index) for index in range(len(vector))]
    if destination.startswith("{"):
        read, narrow = reader(kernel, source, kind), [writer(kernel, name, part) for name in vector]

        def unpack(grid, mask):
            values = read(grid)
            for name, shift, bits in zip(vector, shifts, narrow, strict=True):
                if name != "_":
                    grid.put(name, bits((values >> shift).astype(DTYPES[part])), mask)

        return unpack
    parts, bits = [reader(kernel, name, part) for name in vector], writer(kernel, destination, kind)

    def pack(grid, mask):
        whole = [value(grid).astype(dtype) << shift for value, shift in zip(parts, shifts, strict=True)]
        grid.put(destination, bits(functools.reduce(np.bitwise_or, whole)), mask)

    return pack


# ---- ld, st, atom and red


def ld_param_step(kernel: Kernel, instruction: Instruction) -> Run:
    destination, source = instruction.operands
    name, kind = source.strip("[] "), instruction.opcode[-1]
    if len(instruction.opcode) != 3 or name not in kernel.params:
        raise Unsupported(f"unknown parameter or modifier: {name}")
    nbytes, dtype = DTYPES["u64" if kernel.params[name] == "ptr" else kernel.params[name]].itemsize, DTYPES[kind]
    if dtype.itemsize > nbytes:
        raise Unsupported(f"{name} has {nbytes} bytes")
    bits = writer(kernel, destination, kind, any_width=True)
    return lambda grid, mask: grid.put(destination, bits(grid.params[name].view(dtype)[:1]), mask)  # the low bytes


def memory_step(kernel: Kernel, instruction: Instruction) -> Run:
    name, *middle = instruction.opcode
    if middle[:1] == ["param"] and name == "ld":
        return ld_param_step(kernel, instruction)
    modifiers, kind = Modifiers(tuple(middle[:-1])), middle[-1]
    space = {"global": "memory", "shared": "shared"}[modifiers.one("global", "shared")]
    if kind not in DTYPES or kind == "pred":
        raise Unsupported(f"unknown type .{kind}")
    if name in ("atom", "red"):
        return atomic_step(kernel, instruction, modifiers, space, kind)
    count = next((numel for numel in (2, 4) if modifiers.has(f"v{numel}")), 1)
    modifiers.check()
    place, vector = instruction.operands[:: 1 if name == "st" else -1]
    names, address = members(vector), address_reader(kernel, place, "u64" if space == "memory" else "u32")
    nbytes, line = DTYPES[kind].itemsize, instruction.line
    if len(names) != count:
        raise Unsupported(f"{len(names)} registers instead of {count}")
    if name == "st":
        values = [reader(kernel, text, kind, any_width=True) for text in names]

        def store(grid, mask):
            stored = [grid.full(value(grid), mask).view(UNSIGNED[nbytes]) for value in values]
            getattr(grid, space).store(grid.full(address(grid), mask), grid.by(mask, line), stored)

        return store
    bits = [writer(kernel, text, kind, any_width=True) for text in names]

    def load(grid, mask):
        loaded = getattr(grid, space).load(grid.full(address(grid), mask), grid.by(mask, line), nbytes, count)
        for text, extend, word in zip(names, bits, loaded, strict=True):
            grid.put_chosen(text, extend(word.view(DTYPES[kind])), mask)

    return load


def atomic_step(kernel: Kernel, instruction: Instruction, modifiers: Modifiers, space: str, kind: str) -> Run:
    """atom and red: add, of which no other order than that of threads is known to come out."""
    for needed in ("gpu", "relaxed", "add"):
        modifiers.one(needed)
    modifiers.check()
    require(kind, "u32", "u64")
    *destination, place, source = instruction.operands
    address, value = address_reader(kernel, place, "u64" if space == "memory" else "u32"), reader(kernel, source, kind)
    bits, line = writer(kernel, (destination or ["_"])[0], kind), instruction.line

    def run(grid, mask):
        by = grid.by(mask, line)
        before = getattr(grid, space).add(grid.full(address(grid), mask), by, grid.full(value(grid), mask))
        if destination:
            grid.put_chosen(destination[0], bits(before), mask)

    return run
