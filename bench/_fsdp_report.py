"""The table of FSDP2's steps, from the JSON of bench/fsdp.py.

python bench/_fsdp_report.py           # writes the table in docs/fsdp.md
"""

import json
from pathlib import Path

from _fsdp_rank import PLAIN, WAYS
from _steps_report import RESULTS, between_marks, processor

DOCUMENT = RESULTS.parents[1] / "docs" / "fsdp.md"
PREFIX, NAME = "fsdp-", "fsdp"
_LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}


def table(paths: list[Path] | None = None) -> str:
    """A step's ms, and in brackets the gradients' part of it, with how many times as fast it is as with PLAIN."""
    documents = [json.loads(path.read_text()) for path in paths or sorted(RESULTS.glob(f"{PREFIX}*.json"))]
    columns: dict[str, dict[str, dict]] = {}  # title → way → figures
    for document in documents:
        cases = dict.fromkeys(row["case"] for row in document["rows"])
        for case in sorted(cases, key=list(_LINKS).index):
            title = f"{document['env']['hosts']} hosts, {_LINKS[case]}"
            columns[title] = {row["impl"]: row for row in document["rows"] if row["case"] == case}
    env, numel = documents[0]["env"], documents[0]["rows"][0]["numel"]
    what = f"ms; {numel / 1e6:.1f} million parameters, {processor(env)}, torch {env['torch']}"
    lines = [f"| {what} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for way in WAYS:
        lines.append(f"| {way} | {' | '.join(_cell(rows, way) for rows in columns.values())} |")
    return "\n".join(lines)


def rows_of(hosts: int, link: str) -> dict[str, dict]:
    """way → figures, of the committed results."""
    document = json.loads((RESULTS / f"{PREFIX}{hosts}-hosts-{link}.json").read_text())
    return {row["impl"]: row for row in document["rows"]}


def _cell(rows: dict[str, dict], way: str) -> str:
    row, plain = rows[way], rows[PLAIN]["figures"]["gradients_s"]
    step, gradients_s = f"{row['median_s'] * 1e3:.0f}", row["figures"]["gradients_s"]
    if not WAYS[way].reduces:
        return step
    # Below a hundredth of a step the difference of two medians is noise.
    times = f", {plain / gradients_s:.2f}×" if gradients_s > 0.01 * row["median_s"] and way != PLAIN else ""
    return f"{step} ({gradients_s * 1e3:.0f}{times})"


if __name__ == "__main__":
    DOCUMENT.write_text(between_marks(DOCUMENT.read_text(), NAME, table()))
