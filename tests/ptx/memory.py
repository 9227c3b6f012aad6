"""Global and shared memory: loads, stores, atomic operations and their faults. PTX ISA, chapter "Memory Consistency
Model" and sections ld, st, atom and red.

Memory is a list of regions. Each byte of a region that is tracked has a word, uint64: the thread that wrote it last,
and the time. A time counts barriers of the block. Two accesses of a byte by different threads, of which one writes,
need a barrier of their block between them.
Reads are recorded, and compared with later writes at the next barrier of all blocks, or at the end of the launch.

A race is missed: of a read if its bytes are written again, after a barrier, before reads are compared. Atomic
operations race with all other accesses of their bytes in a launch.
"""

import bisect
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

SHARED_BASE = 0x400
"""Where shared memory starts. Not zero, so that a null pointer is a fault."""

WARP = 32
LEAST_ADDRESS = 4096
"""No tensor lies below it."""

THREAD_BITS = np.uint64(32)
THREAD_MASK = np.uint64(0xFFFFFFFF)
ATOMIC = THREAD_MASK
"""Stands for the thread in the words of bytes that an atomic operation wrote."""


class MemoryFault(Exception):
    """A fault that names no kernel yet: the reason, and the thread and the address of one that met it."""

    def __init__(self, reason: str, thread: int, address: int, line: int) -> None:
        super().__init__(reason)
        self.thread, self.address, self.line = thread, address, line


@dataclass
class By:
    """The threads of one access, each array [number of threads]."""

    threads: np.ndarray  # int64: numbers in the grid
    blocks: np.ndarray  # int64: of the threads
    words: np.ndarray  # uint64: thread + 1, and its time in the high half
    line: int  # of the instruction in the PTX

    def __getitem__(self, chosen) -> "By":
        return By(self.threads[chosen], self.blocks[chosen], self.words[chosen], self.line)


class Region:
    """Bytes from `start` to `end`, both addresses. `data` starts at a multiple of 64 and reaches beyond both."""

    def __init__(self, start: int, end: int, data: np.ndarray, base: int, tracked: bool) -> None:
        self.start, self.end, self.base = start, end, base
        self.data, self.tracked = data, tracked
        self.words: np.ndarray | None = None  # uint64 [len(data)], from the first write on
        self.reads: list[tuple[np.ndarray, int, By]] = []  # (offsets, bytes of each, threads)

    def view(self, nbytes: int) -> np.ndarray:
        return self.data.view(f"V{nbytes}" if nbytes > 8 else f"u{nbytes}")

    def words_at(self, offsets: np.ndarray, nbytes: int) -> np.ndarray:
        """uint64 [number of offsets, nbytes]"""
        found = self.words.view(f"V{8 * nbytes}")[offsets // nbytes]
        return found.view(np.uint64).reshape(-1, nbytes)


def tensor_region(start: int, end: int, tracked: bool) -> Region:
    """A region of this process's own memory. Only bytes from `start` to `end` may be accessed."""
    base = start // 64 * 64
    nbytes = -(-end // 64) * 64 - base
    return Region(start, end, np.frombuffer((ctypes.c_uint8 * nbytes).from_address(base), np.uint8), base, tracked)


class Memory:
    """What global and shared memory have in common."""

    name = "global"
    needs_writer = False
    same_value_allowed = False

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = sorted(regions, key=lambda region: region.start)
        self._starts = [region.start for region in self._regions]
        self._latest = self._regions[0] if self._regions else None
        self.num_threads = 0  # of a block

    def begin(self, num_threads: int) -> None:
        """Begins a launch, with so many threads in a block. Launches are ordered, so what earlier ones wrote is
        forgotten."""
        self.num_threads = num_threads
        for region in self._regions:
            region.reads.clear()
            if region.tracked:
                region.words = np.zeros(len(region.data), np.uint64) if self.needs_writer else None

    def load(self, address: np.ndarray, by: By, nbytes: int, count: int) -> np.ndarray:
        """[count, threads]: `count` neighboring unsigned integers of `nbytes` bytes from each address."""
        total = nbytes * count
        result = np.empty((count, len(address)), f"u{nbytes}")
        for region, chosen, offsets in self._located(address, by, total):
            whose = by[chosen]
            if region.tracked:
                self._check(region, offsets, total, whose, "reads what thread {} wrote, without a barrier between them")
                region.reads.append((offsets, total, whose))
            result[:, chosen] = region.view(total)[offsets // total].view(f"u{nbytes}").reshape(-1, count).T
        return result

    def store(self, address: np.ndarray, by: By, values: Sequence[np.ndarray]) -> None:
        """Stores values[i], [threads], of equal unsigned type, at consecutive places from each address."""
        nbytes, count = values[0].itemsize, len(values)
        total = nbytes * count
        packed = np.stack(values, axis=1) if count > 1 else np.ascontiguousarray(values[0])
        packed = packed.view(self._regions[0].view(total).dtype if self._regions else f"u{nbytes}").reshape(-1)
        for region, chosen, offsets in self._located(address, by, total):
            whose = by[chosen]
            if region.tracked:
                self._record_write(region, offsets, total, whose, packed[chosen])
            region.view(total)[offsets // total] = packed[chosen]

    def add(self, address: np.ndarray, by: By, values: np.ndarray) -> np.ndarray:
        """Adds each value to the number at its address, one thread after another. Returns the numbers before."""
        nbytes = values.itemsize
        result = np.empty_like(values)
        for region, chosen, offsets in self._located(address, by, nbytes):
            if region.tracked:
                whose = by[chosen]
                self._record_write(region, offsets, nbytes, replace(whose, words=whose.words | ATOMIC), None)
            numbers = region.view(nbytes).view(values.dtype)
            places, operands, before = offsets // nbytes, values[chosen], result[chosen]
            for i, place in enumerate(places):
                before[i] = numbers[place]
                numbers[place] += operands[i]
            result[chosen] = before
        return result

    def check_reads(self, forget: bool) -> None:
        """Compares the reads with the writes since. `forget`: all blocks have met in a barrier."""
        for region in self._regions:
            if region.words is not None:
                for offsets, nbytes, by in region.reads:
                    self._check(
                        region, offsets, nbytes, by, "reads what thread {} writes later, without a barrier between them"
                    )
            if forget:
                region.reads.clear()

    # ---- places

    def _located(self, address: np.ndarray, by: By, nbytes: int):
        """(region, index of its threads, offsets in its data) of every region that is accessed."""
        if int(np.bitwise_or.reduce(address)) % nbytes:
            bad = int(np.argmax(address % np.uint64(nbytes) != 0))
            raise self._fault(f"misaligned access of {nbytes} bytes", address, by, bad)
        low, high = int(address.min()), int(address.max()) + nbytes
        region = self._latest
        if region is None or not (region.start <= low and high <= region.end):
            region = self._regions[max(0, bisect.bisect_right(self._starts, low) - 1)] if self._regions else None
        if region is not None and region.start <= low and high <= region.end:
            self._latest = region
            return [(region, Ellipsis, (address - np.uint64(region.base)).astype(np.int64))]
        index = np.searchsorted(np.array(self._starts, np.uint64), address, "right") - 1
        found = []
        for number in np.unique(index):
            chosen = np.flatnonzero(index == number)
            region = self._regions[number] if number >= 0 else None
            outside = np.ones(len(chosen), bool) if region is None else address[chosen] > region.end - nbytes
            if outside.any():
                bad = chosen[np.argmax(outside)]
                null = int(address[bad]) < LEAST_ADDRESS and self.name == "global"
                reason = "null pointer" if null else f"access of {nbytes} bytes outside of what was given"
                raise self._fault(reason, address, by, bad)
            found.append((region, chosen, (address[chosen] - np.uint64(region.base)).astype(np.int64)))
        return found

    def _fault(self, reason: str, address: np.ndarray, by: By, index: int) -> MemoryFault:
        return MemoryFault(f"{self.name} memory: {reason}", int(by.threads[index]), int(address[index]), by.line)

    # ---- races

    def _record_write(self, region: Region, offsets: np.ndarray, nbytes: int, by: By, packed) -> None:
        """packed: what is written, [threads], or None for an atomic operation."""
        if region.words is None:
            region.words = np.zeros(len(region.data), np.uint64)
        reason = "writes what thread {} wrote, without a barrier between them"
        self._check(region, offsets, nbytes, by, reason, writes=True)
        words = region.words.view(f"V{8 * nbytes}")
        words[offsets // nbytes] = np.repeat(by.words, nbytes).view(words.dtype)
        found = region.words_at(offsets, nbytes)
        other = found != by.words[:, None]  # another thread of the same instruction wrote the byte, too
        if packed is not None and other.any():
            if self.same_value_allowed:
                writer = np.zeros(len(region.data) // nbytes, np.int64)
                writer[offsets // nbytes] = np.arange(len(offsets))
                other &= (packed != packed[writer[offsets // nbytes]])[:, None]
            if other.any():
                self._race(region, offsets, by, found, other, reason)

    def _check(self, region: Region, offsets: np.ndarray, nbytes: int, by: By, reason: str, writes: bool = False):
        """Raises MemoryFault if another thread wrote one of the bytes at the same time, as far as barriers tell."""
        if region.words is None:
            return
        found = region.words_at(offsets, nbytes)
        if self.needs_writer and not writes and not found.all():
            index = int(np.argmin(found.all(axis=1)))
            raise self._fault("reads what no thread wrote", self._addresses(region, offsets, by), by, index)
        other = ((found ^ by.words[:, None]) & THREAD_MASK != 0) & (found != 0)
        if other.any():
            threads, bytes_ = np.nonzero(other)
            unordered = ~self._ordered(found[threads, bytes_], by[threads])
            if unordered.any():
                other[threads, bytes_] = unordered
                self._race(region, offsets, by, found, other, reason)

    def _ordered(self, found: np.ndarray, by: By) -> np.ndarray:
        """Whether a barrier lies between the writes that left the words `found` and an access of each thread."""
        writers = (found & THREAD_MASK).astype(np.int64) - 1
        written, now = found >> THREAD_BITS, by.words >> THREAD_BITS
        return (writers // self.num_threads == by.blocks) & (written != now)

    def _race(self, region, offsets, by, found, other, reason) -> None:
        index, byte = (int(i) for i in np.argwhere(other)[0])
        word = int(found[index, byte] & THREAD_MASK)
        whose = "of an atomic operation" if word == int(ATOMIC) else self.place(word - 1)
        addresses = self._addresses(region, offsets, by) + np.uint64(byte)
        raise self._fault(reason.format(whose), addresses, by, index)

    def _addresses(self, region: Region, offsets: np.ndarray, by: By) -> np.ndarray:
        return offsets.astype(np.uint64) + np.uint64(region.base)

    def place(self, thread: int) -> str:
        return f"(block {thread // self.num_threads}, thread {thread % self.num_threads})"


class TensorMemory(Memory):
    """Global memory that consists of the given bytes: (address, number of bytes) of each tensor, which may overlap.

    They are bytes of this process, and must stay allocated. Bounds are checked to the byte.
    """

    def __init__(self, tensors: Sequence[tuple[int, int]]) -> None:
        merged: list[list[int]] = []
        for start, nbytes in sorted(tensors):
            if merged and start < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], start + nbytes)
            elif nbytes:
                merged.append([start, start + nbytes])
        super().__init__([tensor_region(start, end, tracked=True) for start, end in merged])


class HostMemory(Memory):
    """Global memory that is all of this process's memory. Only null pointers and misaligned accesses are faults."""

    def __init__(self) -> None:
        class Everything:
            __array_interface__ = {
                "data": (LEAST_ADDRESS, False),
                "shape": ((1 << 47) - LEAST_ADDRESS,),
                "typestr": "|u1",
                "version": 3,
            }

        super().__init__([Region(LEAST_ADDRESS, 1 << 47, np.asarray(Everything()), LEAST_ADDRESS, tracked=False)])


class SharedMemory(Memory):
    """The shared memory of all blocks, `nbytes` each. What no thread has written is garbage, and reading it a fault."""

    name = "shared"
    needs_writer = True
    same_value_allowed = True  # by one instruction: Triton lets every lane of a warp store the warp's result

    def __init__(self, nbytes: int, num_blocks: int) -> None:
        self.nbytes, self.stride = nbytes, -(-max(nbytes, 1) // 64) * 64
        data = np.full(num_blocks * self.stride, 0xA7, np.uint8)
        super().__init__([Region(0, len(data), data, 0, tracked=True)])

    def _located(self, address: np.ndarray, by: By, nbytes: int):
        offsets = address.astype(np.int64) - SHARED_BASE
        if (offsets % nbytes).any():
            bad = int(np.argmax(offsets % nbytes != 0))
            raise self._fault(f"misaligned access of {nbytes} bytes", address, by, bad)
        outside = (offsets < 0) | (offsets + nbytes > self.nbytes)
        if outside.any():
            raise self._fault(
                f"access of {nbytes} bytes outside of {self.nbytes} bytes", address, by, int(np.argmax(outside))
            )
        return [(self._regions[0], Ellipsis, offsets + by.blocks * self.stride)]

    def _addresses(self, region: Region, offsets: np.ndarray, by: By) -> np.ndarray:
        return (offsets - by.blocks * self.stride + SHARED_BASE).astype(np.uint64)
