"""Tables of what fusedcomm costs on one machine, from the JSON of bench/codec.py, bench/hook_overhead.py and the demo.

python bench/_overhead_report.py           # writes bench/results/overhead.md
"""

import json
from pathlib import Path

from _steps_report import RESULTS, between_marks, processor

DOCUMENT, CODEC = RESULTS / "overhead.md", RESULTS / "cpu-codec.json"
HOOK_RESULTS = {"one rank": "cpu-hook-overhead.json", "two ranks": "cpu-hook-overhead-2-ranks.json"}
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


def codec_table(path: Path = CODEC) -> str:
    """Rates relative to a memcpy of as many bytes, for each size that was measured."""
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


def hook_table() -> str:
    """Microseconds until the hook returns, and until the bucket's result is complete."""
    documents = {ranks: json.loads((RESULTS / name).read_text()) for ranks, name in HOOK_RESULTS.items()}
    found = {
        (ranks, row["case"], row["impl"]): row["median_s"] * 1e6
        for ranks, document in documents.items()
        for row in document["rows"]
    }
    columns = [
        (ranks, f"{what}/{numel}", f"{ranks}, {numel:,} elements, {what}")
        for ranks in documents
        for numel in (1024, 65536)
        for what in ("call", "result")
    ]
    impls = dict.fromkeys(impl for _, _, impl in found if impl != "no-op")
    first, *_ = documents.values()
    lines = [
        f"| µs; {processor(first['env'])}, torch {first['env']['torch']} | " + " | ".join(c[2] for c in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for impl in impls:
        lines.append(
            f"| {impl} | " + " | ".join(f"{found[ranks, case, impl]:.1f}" for ranks, case, _ in columns) + " |"
        )
    return "\n".join(lines)


def demo_table() -> str:
    document = json.loads((RESULTS / "demo.json").read_text())
    env, seeds = document["env"], document["noise_band"]["seeds"]
    lines = [
        f"| {seeds} seeds, {env['ranks']} ranks, {env['cores']} cores, torch {env['torch']} "
        "| bytes, of DDP's | test accuracy, mean (range) | step, median ms |",
        "|---|---|---|---|",
    ]
    for row in document["summary"]:
        if row["wire"] == "fp8_e5m2":  # no longer a wire of fusedcomm's
            continue
        accuracy = row["accuracy"]
        spread = f"{accuracy['mean']:.2%} ({accuracy['low']:.2%} to {accuracy['high']:.2%})"
        lines.append(f"| {row['name']} | {row['bytes_ratio']:.3f} | {spread} | {row['step_ms_p50']:.1f} |")
    return "\n".join(lines)


TABLES = {"codec": codec_table, "hook": hook_table, "demo": demo_table}


if __name__ == "__main__":
    text = DOCUMENT.read_text()
    for name, table in TABLES.items():
        text = between_marks(text, name, table())
    DOCUMENT.write_text(text)
