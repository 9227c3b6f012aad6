"""The state of a launch, and how instructions read and write its registers."""

import re
import zlib
from collections.abc import Callable

import numpy as np

from .memory import SHARED_BASE, By, Memory
from .operation import DTYPES, Unsupported
from .parse import Kernel

UNSIGNED = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}


def bits_dtype(kind: str) -> np.dtype:
    """The dtype in which a register of this type is kept: unsigned, or bool for predicates."""
    return DTYPES[kind] if kind == "pred" else UNSIGNED[int(kind[1:]) // 8]


class Registers(dict):
    """Values by register: unsigned bits [number of threads], or [1] if all threads have the same. Never changed in
    place. What was never written is garbage that depends on the seed."""

    def __init__(self, types: dict[str, str], numel: int, seed: int) -> None:
        super().__init__()
        self._types = types
        self._garbage = np.frombuffer(np.random.default_rng(seed).bytes(8 * numel), np.uint64)

    def __missing__(self, name: str) -> np.ndarray:
        dtype = bits_dtype(self._types[name])
        # The same random numbers serve all registers, each with other bits of them changed.
        garbage = self._garbage ^ np.uint64(zlib.crc32(name.encode()) * 0x100000001)
        self[name] = garbage & np.uint64(1) == 1 if dtype.kind == "b" else garbage.astype(dtype)
        return self[name]


class Grid:
    """The state of a launch."""

    def __init__(self, registers: dict[str, str], num_blocks: int, num_threads: int, memory: Memory, seed: int) -> None:
        self.num_blocks, self.num_threads = num_blocks, num_threads
        self.numel = num_blocks * num_threads
        self.threads = np.arange(self.numel)
        self.blocks = self.threads // num_threads
        self.regs = Registers(registers, self.numel, seed)
        self.times = np.zeros(self.numel, np.uint64)  # as in memory.py
        self.words = self.threads.astype(np.uint64) + np.uint64(1)
        self.memory, self.shared = memory, memory
        self.params: dict[str, np.ndarray] = {}

    def by(self, mask: np.ndarray | None, line: int) -> By:
        everyone = By(self.threads, self.blocks, self.words, line)
        return everyone if mask is None else everyone[mask]

    def full(self, values: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """Values of all threads, or of those in the mask, even if one value stands for all."""
        every = values if len(values) == self.numel else np.broadcast_to(values, self.numel)
        return every if mask is None else every[mask]

    def put(self, name: str, bits: np.ndarray, mask: np.ndarray | None) -> None:
        self.regs[name] = bits if mask is None else np.where(mask, bits, self.regs[name])

    def put_chosen(self, name: str, bits: np.ndarray, mask: np.ndarray | None) -> None:
        """Like put, but `bits` has an element for each thread in the mask only."""
        if mask is not None:
            every = self.full(self.regs[name]).copy()
            every[mask] = bits
            bits = every
        self.regs[name] = bits

    def tick(self, ready: np.ndarray | None) -> None:
        """Advances the time of threads that have met in a barrier of their block."""
        later = self.times + np.uint64(1)
        self.times = later if ready is None else np.where(ready, later, self.times)
        self.words = (self.times << np.uint64(32)) | (self.threads.astype(np.uint64) + np.uint64(1))


Run = Callable[[Grid, np.ndarray | None], None]
"""Executes an instruction for the threads in the mask, or for all."""


# ---- operands

SPECIAL = {
    "%tid.x": lambda grid: grid.threads % grid.num_threads,
    "%ctaid.x": lambda grid: grid.blocks,
    "%nctaid.x": lambda grid: np.array([grid.num_blocks]),
}


def constant(kernel: Kernel, text: str, kind: str) -> np.ndarray:
    """An immediate, or a variable's address: section "Constants". Integers are cut to the type's bits."""
    dtype = DTYPES[kind]
    if text in kernel.symbols:
        value = SHARED_BASE + kernel.symbols[text]
    elif re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        value = int(text[2:], 16)
    elif re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        value = int(text.rstrip("U"), 0)
    else:
        raise Unsupported(f"unknown operand {text}")
    nbits = 8 * dtype.itemsize
    return np.array([value % (1 << nbits)], f"u{dtype.itemsize}").view(dtype)


def reader(kernel: Kernel, text: str, kind: str, any_width: bool = False) -> Callable[[Grid], np.ndarray]:
    """A function that returns an operand's values as the type's dtype.

    Raises Unsupported if the register's width is another one. With `any_width` it may be wider: its low bits count.
    """
    dtype = DTYPES[kind]
    if text in SPECIAL:
        special, nbits = SPECIAL[text], dtype.itemsize
        return lambda grid: special(grid).astype(f"u{nbits}").view(dtype)
    if text not in kernel.registers:
        value = constant(kernel, text, kind)
        return lambda grid: value
    have = bits_dtype(kernel.registers[text])
    if have == dtype:
        return lambda grid: grid.regs[text]
    if have.itemsize == dtype.itemsize and (have.kind == "b") == (dtype.kind == "b"):
        return lambda grid: grid.regs[text].view(dtype)
    if not any_width or have.itemsize < dtype.itemsize or have.kind == "b":
        raise Unsupported(f"{text} is .{kernel.registers[text]}, the instruction wants .{kind}")
    narrow = UNSIGNED[dtype.itemsize]
    return lambda grid: grid.regs[text].astype(narrow).view(dtype)


def writer(kernel: Kernel, text: str, kind: str, any_width: bool = False) -> Callable[[np.ndarray], np.ndarray]:
    """A function that turns a result of this type into the bits of the register, which may be wider: see reader()."""
    if text == "_":
        return lambda values: values
    if text not in kernel.registers:
        raise Unsupported(f"{text} is not a register")
    have, dtype = bits_dtype(kernel.registers[text]), DTYPES[kind]
    if have == dtype:
        return lambda values: values
    if have.itemsize == dtype.itemsize and (have.kind == "b") == (dtype.kind == "b"):
        return lambda values: values.view(have)
    if not any_width or have.itemsize < dtype.itemsize or have.kind == "b":
        raise Unsupported(f"{text} is .{kernel.registers[text]}, the instruction has .{kind}")
    extended = np.dtype(f"{'i' if dtype.kind == 'i' else 'u'}{have.itemsize}")
    integer = dtype if dtype.kind != "f" else UNSIGNED[dtype.itemsize]
    return lambda values: values.view(integer).astype(extended).view(have)


def members(text: str) -> list[str]:
    """The operands in the braces of a vector, or the operand itself."""
    return re.findall(r"[^\s,{}]+", text)


def address_reader(kernel: Kernel, text: str, kind: str) -> Callable[[Grid], np.ndarray]:
    """uint64: the address of "[register + offset]", "[variable]", …"""
    match = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\d+))?\s*\]", text)
    if match is None:
        raise Unsupported(f"unknown address {text}")
    if match[1] in kernel.registers:  # of 32 or 64 bits, in any space: chapter "Addresses as Operands"
        kind = {4: "u32", 8: "u64"}.get(bits_dtype(kernel.registers[match[1]]).itemsize, kind)
    base = reader(kernel, match[1], kind)
    offset = np.array([int(match[2] or 0)]).astype(DTYPES[kind])
    if not offset[0]:
        return lambda grid: base(grid).astype(np.uint64, copy=False)
    return lambda grid: (base(grid) + offset).astype(np.uint64, copy=False)
