"""Writes the tables in bench/results/probe.md from the JSON of bench/probe_check.py. The tests compare both.

python bench/_probe_report.py
"""

import json

from _steps_report import RESULTS, between_marks, blocks_of, processor, shell_block

DOCUMENT = RESULTS / "probe.md"
_LINES = (
    "| link | compute, ms | DDP, ms | errors of up to | median | without factors | factors: cores; collectives "
    "| recommended | of the wires accepted by default |",
    "|---" * 9 + "|",
)
_ERRORS = ("max_error", "median_error", "max_error_unfitted")


def table(name: str) -> str:
    """The table of bench/results/<name>.json in Markdown, below the command that measured it."""
    document = json.loads((RESULTS / f"{name}.json").read_text())
    measured_s = {(row["case"], row["impl"]): row["median_s"] for row in document["rows"]}
    lines = [_command(name, document), "", f"{processor(document['env'])}, commit {document['env']['commit']}:", ""]
    lines += _LINES
    for case, found in document["cases"].items():
        speed = found["probe"]["speed"]
        factors = [f"{speed['cores']:.2f}", ", ".join(f"{factor:.2f}" for factor in speed["collectives"].values())]
        cells = [
            case.split("/")[0],
            f"{found['compute_alone_s'] * 1e3:.0f}",
            f"{measured_s[case, 'off 25'] * 1e3:.0f}",
            *(f"{found[key]:.1%}" if key in found else "" for key in _ERRORS),
            "; ".join(filter(None, factors)),
            _choice(found),
            _choice(found["by_default"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _choice(found: dict) -> str:
    """The recommended choice, and by how much the fastest one was faster."""
    names = {name: name.rpartition(" ")[0] for name in (found["recommended"], found["best"])}
    recommended = names[found["recommended"]].replace("off", "leave it off")
    if found["recommended"] == found["best"]:
        return f"{recommended}: the fastest"
    return f"{recommended}: {found['regret']:.1%} slower than {names[found['best']]}"


def _command(name: str, document: dict) -> str:
    settings = document["settings"]
    links = dict.fromkeys(case.split("/")[0] for case in document["cases"])
    words = ["sudo .venv/bin/python bench/probe_check.py"]
    if settings["ranks_per_host"] > 1:
        words.append(f"--ranks-per-host {settings['ranks_per_host']}")
    words.append(f"--link {' '.join(links)}")
    if settings["model"] != "transformer":
        words.append(f"--model {settings['model']}")
    words += [
        f"--mix {' '.join(f'{mix:g}' for mix in settings['mix'])}",
        f"--rounds {settings['rounds']}",
        f"--json bench/results/{name}.json",
    ]
    return shell_block(words)


def main() -> None:
    text = DOCUMENT.read_text()
    for name in blocks_of(text):
        text = between_marks(text, name, table(name))
    DOCUMENT.write_text(text)


if __name__ == "__main__":
    main()
