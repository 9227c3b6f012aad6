"""Runs a launch.

All threads of a grid are elements of arrays. Those at the lowest instruction run first, so that branches converge. A
thread that has come to an exchange or a barrier waits until all others that take part have come to it.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .exchanges import EXCHANGES
from .instructions import arithmetic_step, memory_step, mov_step
from .memory import WARP, Memory, MemoryFault, SharedMemory
from .operands import UNSIGNED, Grid, Run
from .operation import Unsupported
from .parse import Fault, Instruction, Kernel, parse

MEMORY = ("ld", "st", "atom", "red")


@dataclass
class Step:
    """An instruction, ready to run. One of `run` and `target` is set."""

    guard: str
    negated: bool
    run: Run | None = None
    target: int = -1  # of a branch
    ready: Callable[[Grid, np.ndarray], np.ndarray | None] | None = None  # of an exchange: see exchanges below
    line: int = 0


class Program:
    """A kernel whose instructions are ready to run."""

    def __init__(self, ptx: str) -> None:
        self.kernel = parse(ptx)
        self.steps = [self._step(instruction) for instruction in self.kernel.instructions]
        self.steps.append(Step("", False, target=len(self.steps)))  # a kernel may end without ret

    def _step(self, instruction: Instruction) -> Step:
        name = instruction.opcode[0]
        step = Step(instruction.guard, instruction.negated, line=instruction.line)
        try:
            if instruction.guard and self.kernel.registers.get(instruction.guard) != "pred":
                raise Unsupported(f"{instruction.guard} is not a predicate")
            if name == "bra":
                step.target = self.kernel.labels[instruction.operands[-1]]
            elif name == "ret":
                step.target = len(self.kernel.instructions)
            elif name in EXCHANGES:
                step.run, step.ready = EXCHANGES[name](self.kernel, instruction)
            elif name in MEMORY:
                step.run = memory_step(self.kernel, instruction)
            elif name == "mov":
                step.run = mov_step(self.kernel, instruction)
            else:
                step.run = arithmetic_step(self.kernel, instruction)
        except (Unsupported, ValueError, KeyError, IndexError) as error:
            reason = error if isinstance(error, Unsupported) else f"operands not understood ({error!r})"
            raise Unsupported(f"{self.kernel.name}, line {instruction.line}: {instruction.text}: {reason}") from error
        return step


program = functools.lru_cache(maxsize=256)(Program)
"""The program of a PTX text; one is made for each text."""


def launch(
    ptx: str,
    num_blocks: int,
    num_threads: int,
    arguments: Sequence[tuple[str, int | float]],
    memory: Memory,
    shared_nbytes: int = 0,
    seed: int = 0,
    max_steps: int = 10**7,
) -> None:
    """Launches the kernel of a PTX module.

    Args:
        num_threads: of a block, a multiple of 32.
        arguments: (kind, value) of each parameter: "ptr", "i32", "i64" or "f32".
        memory: global memory.
        shared_nbytes: bytes of dynamic shared memory for each block.
        seed: of what registers hold that no instruction has written.
        max_steps: a launch that executes more instructions is a fault: it does not end.

    Raises:
        Unsupported: the PTX has something that is not known, the text names the line.
        Fault: the kernel does something that is an error on a GPU, or the arguments are not its parameters.
    """
    code = program(ptx)
    kernel = code.kernel
    if num_threads % WARP or kernel.num_threads not in (0, num_threads):
        raise Fault(f"{kernel.name}: {num_threads} threads in a block instead of {kernel.num_threads or 'full warps'}")
    grid = Grid(kernel.registers, num_blocks, num_threads, memory, seed)
    grid.params = bound_params(kernel, arguments)
    grid.shared = SharedMemory(kernel.static_nbytes + shared_nbytes, num_blocks)
    for space in (memory, grid.shared):
        space.begin(num_threads)
    with np.errstate(all="ignore"):
        Schedule(code, grid, max_steps).run()


def bound_params(kernel: Kernel, arguments: Sequence[tuple[str, int | float]]) -> dict[str, np.ndarray]:
    """The bits of each parameter, [1], by name. Raises Fault unless arguments and parameters match."""
    allowed = {"ptr": ("ptr",), "f32": ("f32",), "s64": ("i64",), **dict.fromkeys(("u64", "b64"), ("ptr", "i64"))}
    allowed |= dict.fromkeys(("u32", "s32", "b32"), ("i32",))
    found, declared = [kind for kind, _ in arguments], list(kernel.params.values())
    if len(found) != len(declared) or any(a not in allowed.get(p, ()) for a, p in zip(found, declared, strict=True)):
        raise Fault(f"{kernel.name}: launched with {', '.join(found)}; its parameters: {', '.join(declared)}")
    bits = {}
    for name, (kind, value) in zip(kernel.params, arguments, strict=True):
        if kind == "f32":
            bits[name] = np.array([value], np.float32).view(np.uint32)
        else:
            nbytes = 4 if kind == "i32" else 8
            bits[name] = np.array([int(value) % (1 << 8 * nbytes)], UNSIGNED[nbytes])
    return bits


class Schedule:
    """Which threads run which instruction next."""

    def __init__(self, code: Program, grid: Grid, max_steps: int) -> None:
        self.code, self.grid, self.num_left = code, grid, max_steps
        self.end = len(code.steps) - 1
        self.at = np.zeros(grid.numel, np.int64)  # each thread's next instruction
        self.waits = np.zeros(grid.numel, bool)  # for partners in an exchange

    def run(self) -> None:
        try:
            while True:
                running = np.where(self.waits, self.end, self.at)
                at = int(running.min())
                if at == self.end:
                    break
                self._run_from(at)
            if self.waits.any():
                self._fail_stuck()
            self.grid.memory.check_reads(forget=True)
            self.grid.shared.check_reads(forget=True)
        except MemoryFault as fault:
            raise self._fault(fault) from None

    def _run_from(self, at: int) -> None:
        """Runs the threads at this instruction until they branch, part, or come to where others are."""
        active = self.at == at
        self.waits &= ~active
        everyone = bool(active.all())
        others = self.end if everyone else int(self.at[self.at > at].min(initial=self.end))
        threads = None if everyone else active
        steps, grid, numel = self.code.steps, self.grid, self.grid.numel
        self.current = at
        while at < others:
            step = steps[at]
            self.current = at
            self.num_left -= 1
            if self.num_left < 0:
                raise MemoryFault("the launch does not end", int(np.argmax(active)), -1, 0)
            mask = threads
            if step.guard:
                guard = grid.full(grid.regs[step.guard])
                guard = ~guard if step.negated else guard
                mask = guard if threads is None else guard & threads
                num_true = np.count_nonzero(mask)
                mask = None if num_true == numel else mask
                if num_true == 0:
                    at += 1
                    continue
            if step.target >= 0:
                if mask is None:
                    at = step.target
                    if at >= self.end:
                        break
                    continue
                self.at[active] = at + 1
                self.at[mask] = step.target
                return
            if step.ready is not None:
                arrived = np.ones(numel, bool) if mask is None else mask
                ready = step.ready(grid, arrived)
                if ready is not None and not np.array_equal(ready, arrived):
                    if ready.any():
                        step.run(grid, ready)
                    self.at[active] = at + 1
                    self.at[arrived & ~ready] = at
                    self.waits |= arrived & ~ready
                    return
                mask = ready
            step.run(grid, mask)
            at += 1
        self.at[active] = at

    def _fail_stuck(self) -> None:
        thread = int(np.argmax(self.waits))
        self.current = int(self.at[thread])
        size = WARP if self.code.kernel.instructions[self.current].opcode[0] in ("shfl", "redux") else 0
        size = size or self.grid.num_threads
        partners = slice(thread // size * size, (thread // size + 1) * size)
        missing = np.flatnonzero(self.at[partners] != self.current) + partners.start
        where = "whose partners do not exist"
        if len(missing):
            other = int(self.at[missing[0]])
            line = f"waits at line {self.code.steps[other].line}" if other < self.end else "has ended"
            where = f"where {self.grid.memory.place(int(missing[0]))} does not come: it {line}"
        raise MemoryFault(f"waits in an exchange or a barrier {where}", thread, -1, 0)

    def _fault(self, fault: MemoryFault) -> Fault:
        instruction = self.code.kernel.instructions[self.current]
        line = fault.line or instruction.line
        if line != instruction.line:
            instruction = next(other for other in self.code.kernel.instructions if other.line == line)
        address = f", address {fault.address:#x}" if fault.address >= 0 else ""
        block, thread = divmod(fault.thread, self.grid.num_threads)
        where = f"{self.code.kernel.name}, line {line}: {instruction.text}"
        return Fault(f"{where}: {fault}: block {block}, thread {thread}{address}")
