"""Writes the codec's table in docs/overhead.md from the JSON of bench/codec.py. The tests compare both.

python bench/_codec_report.py
"""

import json
from pathlib import Path

from _steps_report import between_marks, processor
from lib.common import REPOSITORY

DOCUMENT, RESULTS = REPOSITORY / "docs" / "overhead.md", REPOSITORY / "bench" / "results" / "cpu-codec.json"
NAME = "codec"
_WIRES = {"bf16": "bf16", "int8": "int8", "fp8": "fp8", "int4": "int4", "int4-rotated": "rotated"}
_STAGES = {
    "pack": ("pack", _WIRES),
    "… with fp32 error feedback, of the same traffic": (
        "pack",
        {f"{wire}-feedback": name for wire, name in _WIRES.items() if wire != "fp8"},
    ),
    "… rounded stochastically": ("pack", {"int8-stochastic": "int8", "int4-stochastic": "int4"}),
    "reduce: four ranks' codes to those of their mean": ("reduce", _WIRES),
    "unpack": ("unpack", _WIRES),
    "… that sums two ranks' messages": ("sum", _WIRES),
}
"""Lines of the table by label: the stage, and the names that its wires are shown by."""
_STOCK = {"torch": "eager", "torch copy_": "`copy_`", "torch.compile": "compiled"}
"""PyTorch's implementations, and the words that the table has for them."""


def table(path: Path = RESULTS) -> str:
    """The table in Markdown: rates relative to a memcpy of as many bytes, for each size that was measured."""
    document = json.loads(path.read_text())
    rates: dict[tuple[str, str], list[float]] = {}  # (case, implementation) → a rate for each size, in order
    for row in sorted(document["rows"], key=lambda row: row["numel"]):
        rates.setdefault((row["case"], row["impl"]), []).append(row["ratios"].get("memcpy", 1.0))
    # Sizes are those of pack: a reduce has a quarter of the elements, from each of four ranks.
    numels = sorted({row["numel"] for row in document["rows"] if row["case"].startswith("pack/")})
    sizes = " / ".join(str(numel * 4 >> 20) for numel in numels)
    where = f"one thread of an {processor(document['env'])}, {document['isa']}"
    lines = [f"| {sizes} MiB, of a memcpy's rate; {where} | fusedcomm | PyTorch |", "|---|---|---|"]
    for label, (stage, cases) in _STAGES.items():
        ours = [_cell(name, rates.get((f"{stage}/{wire}", "fusedcomm"))) for wire, name in cases.items()]
        theirs = [
            _cell(f"{name} {how}", rates.get((f"{stage}/{wire}", impl)))
            for wire, name in cases.items()
            for impl, how in _STOCK.items()
        ]
        lines.append(f"| {label} | {', '.join(filter(None, ours))} | {', '.join(filter(None, theirs))} |")
    return "\n".join(lines)


def _cell(name: str, of_sizes: list[float] | None) -> str:
    return "" if of_sizes is None else f"{name} {' / '.join(f'{rate:.2f}' for rate in of_sizes)}"


if __name__ == "__main__":
    DOCUMENT.write_text(between_marks(DOCUMENT.read_text(), NAME, table()))
