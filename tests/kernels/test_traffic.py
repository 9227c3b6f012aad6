"""What the compiled kernels move and execute, counted while their PTX is executed: no kernel moves more than 1.1 times
the bytes that it must, and docs/kernels.md has the figures.

Run as a program, this writes the table into docs/kernels.md.
"""

import base64
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / "helpers")]

import ptx_kernels
import pytest
import torch

triton = pytest.importorskip("triton")

import reference  # noqa: E402
from launchers import NONE, Feedback, make_bucket, pack, reduce, scale_in_place, unpack  # noqa: E402
from test_kernel_code import resources  # noqa: E402
from test_kernels import bucket_layout, signed  # noqa: E402

from fusedcomm.kernels.variants import TILE  # noqa: E402
from fusedcomm.native import _C  # noqa: E402

DOCUMENT = Path(__file__).parents[2] / "docs" / "kernels.md"
BEGIN, END = "<!-- counted: begin -->\n", "<!-- counted: end -->\n"
NUMEL = 8 * TILE
NUM_RANKS = 4
PROGRAMS = 4
CAPABILITY = 90
MOST = 1.1
MOST_OF_SEVERAL = 1.17
"""Of unpack of several messages in wires with scales. A warp's scales fill half of a sector of 32 bytes; the other half
is counted again when the next warp reads it, from the cache. So are a tile's words of the tables, for each warp."""

WIRES = ("fp32", "bf16", "fp16", "int8", "int8-rotated", "fp8", "fp8-rotated", "int4", "int4-rotated")

BANDWIDTH, RATE = 3.35e12, 132 * 128 * 1.755e9
"""Bytes/s of memory, and instructions/s of all threads, from NVIDIA's data sheet of the H100 SXM5. A multiprocessor
starts 4 instructions of 32 threads in each cycle, at the boost clock."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What one launch did. `needed`: the bytes of its inputs and outputs, each once."""

    kernel: str
    wire: str
    numel: int
    needed: int
    moved: int
    instructions: int
    bank_conflicts: int
    registers: int  # of a thread
    spilled: int  # bytes of a thread's stack

    def ratio(self) -> float:
        return self.moved / self.needed

    def us(self) -> tuple[float, str]:
        """(microseconds for 2^20 elements, "memory" or "instructions": what takes them), by the roofline model: the
        longer of moving the bytes and starting the instructions."""
        times = {"memory": self.moved / BANDWIDTH, "instructions": self.instructions / RATE}
        slowest = max(times, key=times.get)
        return times[slowest] * 2**20 / self.numel * 1e6, slowest


# ---- one launch of each kernel


def layout_of(wire: str, num_parts: int = 1) -> "_C.BucketLayout":
    """NUMEL elements in each part, in blocks of the wire's default size."""
    return bucket_layout(wire, 32 if wire[:4] == "int4" else 128, num_parts, 0, num_parts * NUMEL)


def run_pack(wire: str, keeps: bool = False) -> int:
    """Returns the bytes that it must move. keeps: with a residual in bf16."""
    flat = signed(NUMEL)
    layout = layout_of(wire)
    feedback, residual_nbytes = NONE, 0
    if keeps:
        residual = torch.zeros(_C.residual_nbytes("bf16", layout.padded_numel), dtype=torch.uint8)
        feedback, residual_nbytes = Feedback("bf16", residual), 2 * len(residual)
    out = torch.empty(layout.chunk_nbytes, dtype=torch.uint8)
    pack(make_bucket(layout, flat, [(0, NUMEL)], []), 0, 0.5, out, PROGRAMS, feedback)
    return 4 * NUMEL + len(out) + residual_nbytes


def run_reduce(wire: str) -> int:
    layout = layout_of(wire, NUM_RANKS)
    parts = reference.pack(layout, 0, signed(NUM_RANKS * NUMEL), torch.empty(0), 1.0)
    out = torch.empty(layout.part.nbytes, dtype=torch.uint8)
    reduce(layout, parts, 0.25, out, PROGRAMS)
    return len(parts) + len(out)


def run_unpack(wire: str, num_messages: int = 1) -> int:
    flat = signed(NUMEL)
    layout = layout_of(wire)
    messages = reference.pack(layout, 0, flat, flat[:0], 1.0).repeat(num_messages)
    unpack(make_bucket(layout, flat, [(0, NUMEL)], []), 0, messages, 0.5, PROGRAMS, num_messages=num_messages)
    return 4 * NUMEL + len(messages)


def run_scale(wire: str) -> int:
    layout = layout_of(wire)
    scale_in_place(make_bucket(layout, signed(NUMEL), [(0, NUMEL)], []), 0.5, PROGRAMS)
    return 8 * NUMEL


SEVERAL = f"unpack of {NUM_RANKS} messages"
SUMMED = f"reduce of {NUM_RANKS} ranks"
KERNELS: dict[str, tuple[Callable[[str], int], tuple[str, ...]]] = {
    "pack": (run_pack, WIRES),
    "pack with a bf16 residual": (lambda wire: run_pack(wire, keeps=True), WIRES[1:]),
    SUMMED: (run_reduce, tuple(wire for wire in WIRES if "rotated" not in wire)),
    "unpack": (run_unpack, WIRES),
    SEVERAL: (lambda wire: run_unpack(wire, NUM_RANKS), WIRES),
    "scale": (run_scale, ("fp32",)),
}
"""By name: a function that launches it once in a wire, and its wires."""


def measure(compiler: ptx_kernels.TritonCompiler, kernel: str, wire: str) -> Row:
    codes = []

    def keep(*key: object) -> dict:
        codes.append(compiler(*key))
        return codes[-1]

    run, _ = KERNELS[kernel]
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        ptx_kernels.replace_kernels(patch, keep, CAPABILITY, counts)
        needed = run(wire)
    (of_launch,), (code,) = counts, codes
    memory, used = of_launch.global_memory, resources(base64.b64decode(code["cubin"]))
    return Row(
        kernel,
        wire,
        NUMEL,
        needed,
        32 * (memory.sectors_read + memory.sectors_written),
        of_launch.instructions,
        of_launch.shared_memory.bank_conflicts,
        used["REG"],
        used["STACK"],
    )


# ---- the table


def line(row: Row) -> str:
    cells = [row.kernel, row.wire, f"{row.needed / row.numel:.2f}", f"{row.ratio():.2f}"]
    cells += [f"{row.instructions / row.numel:.1f}", str(row.registers)]
    us, bound = row.us()
    cells.append(f"{us:.2f}" + " *" * (bound == "instructions"))
    return "| " + " | ".join(cells) + " |\n"


COLUMNS = ("kernel", "wire", "bytes needed", "moved / needed", "instructions", "registers", "H100")
CASES = [(kernel, wire) for kernel, (_, wires) in KERNELS.items() for wire in wires]


def write(rows: list[Row], version: str) -> None:
    """Writes the table between the marks in docs/kernels.md."""
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    told = f"Triton {version}, sm_{CAPABILITY}, {NUMEL:,} fp32 gradients in one run, {PROGRAMS} programs.\n\n"
    header = "| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|\n"
    DOCUMENT.write_text(before + BEGIN + told + header + "".join(map(line, rows)) + END + rest.partition(END)[2])


@pytest.mark.sampled(by=lambda kernel, wire: {"kernel": kernel})
@pytest.mark.parametrize(("kernel", "wire"), CASES)
def test_moves_little_more_than_it_must(compilers, kernel, wire):
    row = measure(compilers("newest"), kernel, wire)
    several = kernel == SEVERAL and _C.has_scales(wire.partition("-")[0])
    assert 1.0 <= row.ratio() < (MOST_OF_SEVERAL if several else MOST)
    assert row.spilled == 0 and row.bank_conflicts < 0.005 * row.numel
    if f"Triton {triton.__version__}, sm_{CAPABILITY}, " in DOCUMENT.read_text():
        assert line(row) in DOCUMENT.read_text(), f"run {Path(__file__).name} as a program, which writes the document"


if __name__ == "__main__":
    made = ptx_kernels.TritonCompiler()
    write([measure(made, *case) for case in CASES], triton.__version__)
    made.close()
