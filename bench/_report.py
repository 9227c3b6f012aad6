"""Tables of what the wires do to training, what fusedcomm costs on one machine, and FSDP2's steps, from the JSON of
bench/accuracy.py, codec.py, hook_overhead.py and fsdp.py; _features_report.py has those of other features.

python bench/_report.py     # writes the tables in bench/results/{accuracy,overhead}.md, docs/benchmarks.md, README.md
"""

import statistics
from pathlib import Path

import _features_report
from _steps_report import README, RESULTS, between_marks, markdown, processor
from _steps_report import load_document as load

ACCURACY, OVERHEAD = RESULTS / "accuracy.md", RESULTS / "overhead.md"
BENCHMARKS = RESULTS.parents[1] / "docs" / "benchmarks.md"
WIRES = "wires"
"""The table of accuracy.json that is in README.md."""
RANKS = (2, 512, 4096)
"""The numbers of ranks in the table of errors, as far as they were measured."""
_WIRES = {
    "fp32": ("4", "to check: DDP's own gradients"),
    "bf16": ("2", "the default"),
    "int8": ("1.03", "slow links"),
    "int4": ("0.56", "very slow links, after comparing"),
}
"""Bytes an element, scales included, and when to use the wire."""
_HOOK_RESULTS = {"one rank": "cpu-hook-overhead.json", "two ranks": "cpu-hook-overhead-2-ranks.json"}
_CODES = {"bf16": "bf16", "int8": "int8", "fp8": "fp8", "int4": "int4"}
_STAGES = {
    "pack": ("pack", _CODES),
    "… with fp32 error feedback, of the same traffic": (
        "pack",
        {f"{wire}-feedback": name for wire, name in _CODES.items() if wire != "fp8"},
    ),
    "reduce: four ranks' codes to those of their mean": ("reduce", _CODES),
    "unpack": ("unpack", _CODES),
    "… that sums two ranks' messages": ("sum", _CODES),
}
"""Lines of the codec's table by label: the stage, and the names that its wires are shown by."""
_STOCK = {"torch": "eager", "torch copy_": "`copy_`", "torch.compile": "compiled"}
"""PyTorch's implementations, and the words that the table has for them."""


# ---- accuracy.json


def wires_table(document: dict) -> str:
    """The wires of README.md: bytes, the error of a mean of four ranks, and the final loss of the transformer."""
    rows = {row["way"]: row for row in document["training_summary"] if row["model"] == "characters"}
    heading = ["wire", "bytes an element", "error of the mean", "loss less fp32's", "when"]
    body = []
    for wire, (nbytes, when) in _WIRES.items():
        differences = rows[wire]["loss_difference"]
        trained = f"{statistics.mean(differences):+.4f} ({min(differences):+.4f} to {max(differences):+.4f})"
        error = f"{rows[wire]['vnmse_median'] ** 0.5:.1%}" if wire != "fp32" else "none"
        body.append([f"`{wire}`", nbytes, error, trained if wire != "fp32" else "", when])
    return markdown(heading, body)


def error_table(document: dict) -> str:
    rows = document["error_by_ranks"]
    kinds = list(dict.fromkeys(row["gradients"] for row in rows))
    found = {(row["way"], row["gradients"], row["ranks"]): row["vnmse"] for row in rows}
    ranks = [ranks for ranks in RANKS if any(row["ranks"] == ranks for row in rows)]
    body = [
        [way, *(" / ".join(f"{found[way, kind, of]:.1e}" for of in ranks) for kind in kinds)]
        for way in dict.fromkeys(row["way"] for row in rows)
    ]
    return markdown([f"vNMSE, {' / '.join(map(str, ranks))} ranks", *kinds], body)


def training_table(document: dict) -> str:
    heading = ["model", "wire", "final loss, mean (range)", "less fp32's, each seed", "accuracy"]
    body = []
    for row in document["training_summary"]:
        digits = 5 if row["model"] == "digits" else 4
        losses, differences = row["loss"], row["loss_difference"]
        mean = f"{statistics.mean(losses):.{digits}f} ({min(losses):.{digits}f} to {max(losses):.{digits}f})"
        less = ", ".join(f"{value:+.{digits}f}" for value in differences) if row["way"] != "fp32" else ""
        accuracy = f"{statistics.mean(row['accuracy']):.2%}" if "accuracy" in row else ""
        errors = [f"{row[f'{name}_median']:.1e} ({row[f'{name}_max']:.1e})" for name in ("vnmse", "norm_error")]
        body.append([row["model"], row["way"], mean, less, accuracy, *errors])
    return markdown([*heading, "vNMSE, median (greatest)", "error of the norm, median (greatest)"], body)


def machine(document: dict) -> str:
    """A line for each machine that the figures are of. int4's have been measured again, with its present levels."""
    machines = {"": document["env"], "int4: ": document.get("env_int4")}
    return "\n".join(
        f"- {what}{processor(env)}, {env['num_cpus']} cores, torch {env['torch']}, commit {env['commit']}"
        for what, env in machines.items()
        if env is not None
    )


# ---- one machine


def codec_table(document: dict) -> str:
    """Rates relative to a memcpy of as many bytes, for each size that was measured."""
    rates: dict[tuple[str, str], list[float]] = {}  # (case, implementation) → a rate for each size, in order
    for row in sorted(document["rows"], key=lambda row: row["numel"]):
        rates.setdefault((row["case"], row["impl"]), []).append(row["ratios"].get("memcpy", 1.0))
    # Sizes are those of pack: a reduce has a quarter of the elements, from each of four ranks.
    numels = sorted({row["numel"] for row in document["rows"] if row["case"].startswith("pack/")})
    sizes = " / ".join(str(numel * 4 >> 20) for numel in numels)
    where = f"one thread of an {processor(document['env'])}, {document['isa']}"
    body = []
    for label, (stage, cases) in _STAGES.items():
        ours = [_rates(name, rates.get((f"{stage}/{wire}", "fusedcomm"))) for wire, name in cases.items()]
        theirs = [
            _rates(f"{name} {how}", rates.get((f"{stage}/{wire}", impl)))
            for wire, name in cases.items()
            for impl, how in _STOCK.items()
        ]
        body.append([label, ", ".join(filter(None, ours)), ", ".join(filter(None, theirs))])
    return markdown([f"{sizes} MiB, of a memcpy's rate; {where}", "fusedcomm", "PyTorch"], body)


def _rates(name: str, of_sizes: list[float] | None) -> str:
    return "" if of_sizes is None else f"{name} {' / '.join(f'{rate:.2f}' for rate in of_sizes)}"


def hook_table() -> str:
    """Microseconds until the hook returns, and until the bucket's result is complete."""
    documents = {ranks: load(name) for ranks, name in _HOOK_RESULTS.items()}
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
    env = next(iter(documents.values()))["env"]
    heading = [f"µs; {processor(env)}, torch {env['torch']}", *(column[2] for column in columns)]
    body = [[impl, *(f"{found[ranks, case, impl]:.1f}" for ranks, case, _ in columns)] for impl in impls]
    return markdown(heading, body)


# ---- FSDP2


def fsdp_table() -> str:
    """A step's ms, and in brackets the gradients' part of it, with how many times as fast it is as with PLAIN."""
    from _fsdp_rank import WAYS

    columns: dict[str, dict[str, dict]] = {}  # title → way → figures
    for path in sorted(RESULTS.glob("fsdp-*.json")):
        document = load(path.name)
        env, numel = document["env"], document["rows"][0]["numel"]
        for row in document["rows"]:
            title = f"{env['hosts']} hosts, {row['case'].replace('mbit', ' Mbit/s').replace('gbit', ' Gbit/s')}"
            columns.setdefault(title, {})[row["impl"]] = row
    what = f"ms; {numel / 1e6:.1f} million parameters, {processor(env)}, torch {env['torch']}"
    ways = [way for way in WAYS if all(way in rows for rows in columns.values())]
    return markdown([what, *columns], [[way, *(_fsdp_cell(rows, way) for rows in columns.values())] for way in ways])


def _fsdp_cell(rows: dict[str, dict], way: str) -> str:
    from _fsdp_rank import PLAIN, WAYS

    row, plain = rows[way], rows[PLAIN]["figures"]["gradients_s"]
    step, gradients_s = f"{row['median_s'] * 1e3:.0f}", row["figures"]["gradients_s"]
    if not WAYS[way].reduces:
        return step
    # Below a hundredth of a step the difference of two medians is noise.
    times = f", {plain / gradients_s:.2f}×" if gradients_s > 0.01 * row["median_s"] and way != PLAIN else ""
    return f"{step} ({gradients_s * 1e3:.0f}{times})"


def tables() -> dict[Path, dict[str, str]]:
    """The tables of each document by their names. README.md has another one, of _steps_report.py."""
    accuracy = load("accuracy.json")
    of_accuracy = {"errors": error_table, "training": training_table, "machine": machine}
    return {
        ACCURACY: {name: table(accuracy) for name, table in of_accuracy.items()},
        README: {WIRES: wires_table(accuracy)},
        OVERHEAD: {"codec": codec_table(load("cpu-codec.json")), "hook": hook_table()},
        BENCHMARKS: {
            "fsdp": fsdp_table(),
            **{name: table() for name, table in _features_report.TABLES.items()},
        },
    }


if __name__ == "__main__":
    for document, of_document in tables().items():
        text = document.read_text()
        for name, table in of_document.items():
            text = between_marks(text, name, table)
        document.write_text(text)
