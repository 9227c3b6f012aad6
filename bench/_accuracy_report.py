"""Tables of what the wires do to gradients and training, from the JSON of bench/accuracy.py. bench/_pictures.py draws
them.

python bench/_accuracy_report.py           # writes bench/results/accuracy.md, and the table of wires in README.md
"""

import json
import statistics
from collections.abc import Callable, Sequence

from _steps_report import README, RESULTS, between_marks, processor

DOCUMENT = RESULTS / "accuracy.md"
WIRES = "wires"
"""The table in README.md. The others are in DOCUMENT."""
RANKS = (2, 512, 4096)
"""The numbers of ranks that the first table shows."""
_WIRES = {
    "fp32": ("4", "to check: DDP's own gradients"),
    "bf16": ("2", "the default; fp16 is as large, more exact, and overflows sooner"),
    "int8": ("1.03", "slow links: first choice among the codes"),
    "fp8": ("1.03", "seldom: int8 is more exact, except on the heaviest tails"),
    "int4": ("0.56", "very slow links, after a run of your own to compare"),
}
"""Bytes an element, scales included, and when to use the wire."""


def load() -> dict:
    return json.loads((RESULTS / "accuracy.json").read_text())


def wires_table(document: dict) -> str:
    """The wires of README.md: bytes, the error of a mean of four ranks, and the final loss of the transformer."""
    rows = {row["way"]: row for row in document["training_summary"] if row["model"] == "characters"}
    heading = ["wire", "bytes an element", "error of the mean", "final loss less fp32's (three seeds)", "when"]
    body = []
    for wire, (nbytes, when) in _WIRES.items():
        differences = rows[wire]["loss_difference"]
        trained = f"{statistics.mean(differences):+.4f} ({min(differences):+.4f} to {max(differences):+.4f})"
        error = f"{rows[wire]['vnmse_median'] ** 0.5:.1%}" if wire != "fp32" else "none"
        body.append([f"`{wire}`", nbytes, error, trained if wire != "fp32" else "", when])
    return _markdown(heading, body)


def error_table(document: dict) -> str:
    rows = document["error_by_ranks"]
    kinds = list(dict.fromkeys(row["gradients"] for row in rows))
    found = {(row["way"], row["gradients"], row["ranks"]): row["vnmse"] for row in rows}
    body = [
        [way, *(" / ".join(f"{found[way, kind, ranks]:.1e}" for ranks in RANKS) for kind in kinds)]
        for way in dict.fromkeys(row["way"] for row in rows)
    ]
    return _markdown([f"vNMSE, {' / '.join(map(str, RANKS))} ranks", *kinds], body)


def targets_table(document: dict) -> str:
    body = [
        [row["gradients"], row["what"], f"{row['figure']:.3g}", row["wanted"], "yes" if row["reached"] else "**no**"]
        for row in document["targets"]
    ]
    return _markdown(["gradients", "target", "measured", "wanted", "reached"], body)


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
    return _markdown([*heading, "vNMSE, median (greatest)", "error of the norm, median (greatest)"], body)


TABLES: dict[str, Callable[[dict], str]] = {
    "errors": error_table,
    "targets": targets_table,
    "training": training_table,
}


def machine(document: dict) -> str:
    """A line for each machine that the figures are of. int4's have been measured again, with its present levels."""
    machines = {"": document["env"], "int4: ": document.get("env_int4")}
    return "\n".join(
        f"- {what}{processor(env)}, {env['num_cpus']} cores, torch {env['torch']}, commit {env['commit']}"
        for what, env in machines.items()
        if env is not None
    )


def write(document: dict) -> None:
    text = DOCUMENT.read_text()
    for name, table in {**TABLES, "machine": machine}.items():
        text = between_marks(text, name, table(document))
    DOCUMENT.write_text(text)
    README.write_text(between_marks(README.read_text(), WIRES, wires_table(document)))


def _markdown(heading: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [heading, ["---"] * len(heading), *body])


if __name__ == "__main__":
    write(load())
