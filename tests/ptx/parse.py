"""PTX text → instructions. PTX ISA, chapters "Syntax", "State Spaces, Types, and Variables" and "Directives"."""

import re
from dataclasses import dataclass

NEWEST_VERSION = (9, 5)
"""The newest version of the ISA that the instructions in this package were checked against."""


class Unsupported(Exception):
    """The PTX has something that this package does not know, or whose result the ISA leaves open."""


class Fault(Exception):
    """The kernel does something that is an error on a GPU."""


@dataclass(frozen=True)
class Instruction:
    line: int  # in the PTX, from 1
    guard: str  # the predicate register, or empty
    negated: bool  # whether the guard is @!
    opcode: tuple[str, ...]  # split at its dots
    operands: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Kernel:
    name: str
    target: int  # compute capability, 90 for example
    params: dict[str, str]  # type by name in order: "u64", "f32", …; "ptr" if declared as a pointer
    num_threads: int  # that a block must have, or 0 if any number is allowed
    registers: dict[str, str]  # type by name
    symbols: dict[str, int]  # shared memory: offset in bytes by name of the variable
    static_nbytes: int  # shared memory in bytes, without the dynamic one, which follows
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]  # index of the instruction that follows the label


ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)")
PARAM = re.compile(r"\.param\s+\.(\w+)\s+(\.ptr\b)?[^,]*?([\w$]+)\s*(?:,|$)")
SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.[bsuf](\d+)\s+([\w$]+)(?:\[(\d*)\])?\s*;")
REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
LABEL = re.compile(r"\s*([\w$]+)\s*:(?!:)")


def parse(ptx: str) -> Kernel:
    """The only kernel of a module.

    Raises Unsupported if there is none or more than one, if the ISA's version is newer than NEWEST_VERSION, or for a
    declaration that is not known.
    """
    text = re.sub(r"//[^\n]*", "", ptx)
    text = re.sub(r"/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), text, flags=re.DOTALL)
    text = re.sub(r"^\s*\.(loc|file)\b[^\n]*$", "", text, flags=re.MULTILINE)
    entries = list(ENTRY.finditer(text))
    if len(entries) != 1:
        raise Unsupported(f"{len(entries)} kernels in a module instead of one")
    entry, name = entries[0], entries[0][1]
    version = tuple(map(int, re.search(r"\.version\s+(\d+)\.(\d+)", text).groups()))
    if version > NEWEST_VERSION:
        newest = ".".join(map(str, NEWEST_VERSION))
        raise Unsupported(f"{name}, line {_line(text, '.version')}: ISA {'.'.join(map(str, version))}; known: {newest}")
    begin = text.index("{", entry.end())
    header, end = text[entry.end() : begin], _closing_brace(text, begin)
    symbols, static_nbytes = _shared(text[: entry.start()] + text[begin:end])
    instructions, labels, registers = _body(name, text, begin + 1, end)
    threads = re.search(r"\.reqntid\s+(\d+)", header)
    return Kernel(
        name,
        int(re.search(r"\.target\s+sm_(\d+)", text)[1]),
        {param: "ptr" if pointer else kind for kind, pointer, param in PARAM.findall(entry[2])},
        int(threads[1]) if threads else 0,
        registers,
        symbols,
        static_nbytes,
        instructions,
        labels,
    )


def _line(text: str, what: str) -> int:
    return text.count("\n", 0, text.index(what)) + 1


def _closing_brace(text: str, begin: int) -> int:
    depth = 0
    for brace in re.compile(r"[{}]").finditer(text, begin):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    raise Unsupported("the kernel has no closing brace")


def _shared(text: str) -> tuple[dict[str, int], int]:
    """(offset by variable, bytes of the static ones). A variable of unknown size is the dynamic memory, after these."""
    symbols, dynamic, end = {}, [], 0
    for align, nbits, name, numel in SHARED.findall(text):
        if numel == "" and f"{name}[" in text:
            dynamic.append(name)
            continue
        nbytes = int(nbits) // 8
        end += -end % int(align or nbytes)
        symbols[name], end = end, end + nbytes * int(numel or 1)
    end += -end % 16
    return {**symbols, **dict.fromkeys(dynamic, end)}, end


def _body(kernel: str, text: str, begin: int, end: int):
    """(instructions, labels, registers) of the text between the kernel's braces."""
    instructions, labels, registers = [], {}, {}
    line = text.count("\n", 0, begin) + 1
    for raw in text[begin:end].split(";"):
        statement = raw.lstrip("{} \t\n")
        while label := LABEL.match(statement):
            labels[label[1]] = len(instructions)
            statement = statement[label.end() :].lstrip("{} \t\n")
        first_line = line + raw[: len(raw) - len(statement)].count("\n")
        line += raw.count("\n")
        statement = statement.rstrip()
        if statement.startswith(".reg"):
            kind, names = REGISTERS.match(statement).groups()
            registers.update(dict.fromkeys(_names(names), kind))
        elif statement.startswith("."):
            if not statement.startswith((".pragma", ".shared")):
                raise Unsupported(f"{kernel}, line {first_line}: {statement}")
        elif statement:
            instructions.append(_instruction(statement, first_line))
    return tuple(instructions), labels, registers


def _names(declared: str) -> list[str]:
    """The registers of a declaration: "%r<3>" stands for %r0, %r1 and %r2."""
    names = []
    for name in re.split(r"\s*,\s*", declared):
        prefix, _, count = name.rstrip(">").partition("<")
        names += [f"{prefix}{index}" for index in range(int(count))] if count else [name]
    return names


def _instruction(statement: str, line: int) -> Instruction:
    text = " ".join(statement.split())
    guard, negated = "", False
    if match := re.match(r"@(!?)([\w%$]+)\s*", text):
        guard, negated = match[2], bool(match[1])
        text = text[match.end() :]
    opcode, _, operands = text.partition(" ")
    return Instruction(line, guard, negated, tuple(opcode.split(".")), tuple(OPERAND.findall(operands)), text)
