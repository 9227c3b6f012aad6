"""The machine code of a compiled kernel: its instructions, and the shortest way of a warp past some of them.

Nothing is executed: what is counted holds for the code, with loops taken as seldom as the way allows.
"""

import heapq
import re
from collections.abc import Callable
from dataclasses import dataclass, field

Pick = Callable[["Instruction"], bool]


@dataclass(frozen=True)
class Instruction:
    address: int
    predicate: str  # empty if it has none
    op: str
    operands: str

    def registers(self) -> set[int]:
        return {int(number) for number in re.findall(r"\bR(\d+)\b", self.operands)}


@dataclass
class Code:
    instructions: list[Instruction]
    next: dict[int, list[int]] = field(default_factory=dict)  # by index: the instructions that may follow

    def way(self, *stops: Pick, avoid: Pick, after: Instruction | None = None) -> list[Instruction]:
        """The shortest way from the kernel's first instruction, or from the one that comes after `after`, past an
        instruction that fits each of `stops` in this order and past none that fits `avoid`. Empty if there is none."""
        start = (0 if after is None else self.instructions.index(after) + 1, 0)
        waiting, came_from = [(0, start)], {start: None}
        while waiting:
            cost, (index, passed) = heapq.heappop(waiting)
            if passed < len(stops) and stops[passed](self.instructions[index]):
                state = (index, passed + 1)
                if state not in came_from:
                    came_from[state] = (index, passed)
                    heapq.heappush(waiting, (cost, state))
                continue
            if passed == len(stops):
                way, state = [], (index, passed)
                while state:
                    way.append(state[0])
                    state = came_from[state]
                return [self.instructions[i] for i in dict.fromkeys(reversed(way))]
            for follower in self.next[index]:
                if (follower, passed) not in came_from and not avoid(self.instructions[follower]):
                    came_from[follower, passed] = (index, passed)
                    heapq.heappush(waiting, (cost + 1, (follower, passed)))
        return []


def parse(text: str) -> Code:
    """Reads what `cuobjdump -sass` prints."""
    lines = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(?:@(!?U?P\w+) )?([A-Z0-9_.]+)\s*([^;]*);", text)
    code = Code([Instruction(int(address, 16), *rest) for address, *rest in lines])
    places = {instruction.address: index for index, instruction in enumerate(code.instructions)}
    for index, instruction in enumerate(code.instructions):
        target = re.search(r"0x([0-9a-f]+)\s*$", instruction.operands)
        jumps = instruction.op.startswith("BRA") and target
        # A jump with another condition in its operands may go on, too.
        goes_on = instruction.predicate or re.match(r"\s*!?U?P\d", instruction.operands)
        ends = instruction.op.startswith(("EXIT", "BRA", "RET")) and not goes_on
        code.next[index] = [places[int(target[1], 16)]] if jumps else []
        if not ends and index + 1 < len(code.instructions):
            code.next[index].append(index + 1)
    return code


def load_rounds(way: list[Instruction]) -> int:
    """How often a warp that takes this way waits for loads from global memory, if it waits for all at once."""
    rounds, pending = 0, set()
    for instruction in way:
        if pending & instruction.registers():
            rounds, pending = rounds + 1, set()
        if instruction.op.startswith("LDG"):
            first = int(instruction.operands[1:].partition(",")[0])
            width = 4 if ".128" in instruction.op else 2 if ".64" in instruction.op else 1
            pending |= set(range(first, first + width))
    return rounds
