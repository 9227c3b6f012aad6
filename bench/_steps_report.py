"""Tables of training steps over links, from the JSON of bench/ddp_step.py. bench/_pictures.py draws them.

    python bench/_steps_report.py           # writes bench/results/steps.md and README.md's table
    python bench/_steps_report.py bench/results/ddp-step-*.json --print

In a document a table is between `<!-- NAME -->` and `<!-- end -->`. NAME is "speed-ups", "headline", or the name of a
result's file without "ddp-step-" and ".json". The tests compare the documents with the results.
"""

import argparse
import json
import re
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path

from _hosts import parse_link
from lib.common import REPOSITORY
from lib.namespaces import line_s
from lib.ways import COMPUTE, DEFAULT, TUNED

RESULTS, README = REPOSITORY / "bench" / "results", REPOSITORY / "README.md"
DOCUMENT = RESULTS / "steps.md"
PREFIX = "ddp-step-"
SPEED_UPS, HEADLINE = "speed-ups", "headline"
TYPICAL = ("2-hosts-resnet", "resnet/1gbit")
"""The file and the case whose steps README.md draws: a model that computes for nearly half of a step."""
HEADLINE_CASES = {
    TYPICAL: "residual network, 2 hosts, 1 Gbit/s",
    ("4-hosts-1gbit", "transformer/1gbit"): "bytes only, 4 hosts, 1 Gbit/s",
    ("2-hosts-fast", "transformer/10gbit"): "bytes only, 2 hosts, 10 Gbit/s",
    ("2-hosts-hidden", "waiting/10gbit"): "hidden, 2 hosts, 10 Gbit/s",
}
SHOWN_WAYS = {
    "fusedcomm bf16": "bf16",
    "fusedcomm int8": "int8",
    "fusedcomm int4": "int4",
    "fusedcomm auto": '"auto"',
}
STOCK_HOOKS = ("c++ fp16 hook", "python fp16 hook", "python bf16 hook")
STOCK = "torch's best 16-bit hook"
NOT_RUN = "–"
SPACE = "\0"
"""In place of a space at which a line must not be broken."""


class Result:
    """One case, a model on hosts over a link, with a row for each way."""

    def __init__(self, name: str, document: dict, case: str) -> None:
        self.name, self.case = name, case
        self.settings, self.env = document["settings"], document["env"]
        self.found = document["cases"][case]
        self.rows = {row["impl"]: row for row in document["rows"] if row["case"] == case}
        self.missing = [entry for entry in document["not_measured"] if entry["case"] == case]

    @property
    def title(self) -> str:
        model, link = self.case.split("/")
        hosts, per_host = self.settings["hosts"], self.settings["ranks_per_host"]
        where = f"{hosts} hosts" if hosts else f"{per_host} ranks"
        where += f" × {per_host} ranks" if hosts and per_host > 1 else ""
        computes = ", computing" if self.settings.get("compute_ms") else ""
        return f"{where}, {link.replace('bit', 'bit/s')}, {model} of {self.numel / 1e6:.0f} M{computes}"

    @property
    def numel(self) -> int:
        return next(iter(self.rows.values()))["numel"]

    @property
    def num_steps(self) -> int:
        return self.settings["rounds"] * self.settings["steps"]

    @property
    def baseline_s(self) -> float:
        """Seconds of a step of DDP without a hook: the shorter of DDP's default and tuned DDP."""
        return min(self.rows[name]["median_s"] for name in (DEFAULT, TUNED) if name in self.rows)

    @property
    def compute_s(self) -> float:
        return self.rows[COMPUTE]["median_s"]

    @property
    def share(self) -> str:
        """The part of DDP's step that is communication."""
        return f"{1 - self.compute_s / self.baseline_s:.0%}"

    def bucket_size(self, way: str) -> str:
        """MiB of the best bucket size that each run found. Empty if every run found DDP's own (25 after a first bucket
        of 1), or did not search."""
        runs = self.found.get("runs", [self.found])
        caps = dict.fromkeys(run.get("bucket_cap_mb", {}).get(way) for run in runs)
        return "" if list(caps) == [None] else "/".join("own" if cap is None else f"{cap:g}" for cap in caps)

    def sync_speed_up(self, way: str) -> str:
        """Like `speed_up`, but of a backward pass that only synchronizes; empty if that was not measured."""
        sync_s = {name: row["figures"]["sync_s"] for name, row in self.rows.items() if "sync_s" in row["figures"]}
        baselines_s = [sync_s[name] for name in (DEFAULT, TUNED) if name in sync_s]
        return f"{min(baselines_s) / sync_s[way]:.2f}" if baselines_s and way in sync_s else ""

    def bytes_ratio(self, way: str) -> str:
        """How many times as many bytes DDP's default sends. Empty if it was not run or bytes were not counted."""
        nbytes = [self.rows[name]["figures"].get("wire_nbytes") for name in (DEFAULT, way) if name in self.rows]
        return f"{nbytes[0] / nbytes[-1]:.2f}" if DEFAULT in self.rows and all(nbytes) else ""

    def of_ideal(self, way: str) -> str:
        """The longer of computing and the bytes' time on the line, headers included, as a part of the step. Empty if
        the link has no limit or bytes were not counted."""
        bits_s = parse_link(self.case.split("/")[1]) if self.settings["hosts"] else None
        nbytes = self.rows[way]["figures"].get("wire_nbytes")
        if not bits_s or not nbytes:
            return ""
        return f"{max(self.compute_s, line_s(nbytes, bits_s)) / self.rows[way]['median_s']:.2f}"

    def speed_ups_of_runs(self, way: str) -> list[float]:
        """The speed-up in each run; empty if there was only one run, or if the ways did not run equally often."""
        names = [name for name in (DEFAULT, TUNED, way) if name in self.rows]
        of_runs_s = [self.rows[name]["figures"].get("medians_s", []) for name in names]
        if len(names) < 2 or len({len(medians_s) for medians_s in of_runs_s}) > 1:
            return []
        return [min(seconds[:-1]) / seconds[-1] for seconds in zip(*of_runs_s, strict=True)]

    def speed_up(self, way: str) -> float | None:
        """None if the way, or DDP without a hook, was not run."""
        has_baseline = DEFAULT in self.rows or TUNED in self.rows
        return self.baseline_s / self.rows[way]["median_s"] if way in self.rows and has_baseline else None


def processor(env: dict) -> str:
    """Name of the processor that a result was measured on."""
    return env["cpu"].replace("(R)", "").replace(" Processor", "")


def load_document(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def markdown(heading: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [heading, ["---"] * len(heading), *body])


def load(paths: Sequence[Path]) -> list[Result]:
    results = []
    for path in sorted(paths):
        document = json.loads(path.read_text())
        results += [Result(path.stem.removeprefix(PREFIX), document, case) for case in document["cases"]]
    return results


def speed_up_table(results: Sequence[Result]) -> str:
    """A line for each case: how many times as fast as DDP without a hook. The other ways are in the cases' tables."""
    lines = [
        _line("", ["computing, ms", "communication", "DDP, ms", STOCK, *SHOWN_WAYS.values()]),
        "|---" * (5 + len(SHOWN_WAYS)) + "|",
    ]
    for result in results:
        cells = [f"{result.compute_s * 1e3:.0f}", result.share, f"{result.baseline_s * 1e3:.0f}", _stock(result)]
        lines.append(_line(result.title, [*cells, *(_speed_up(result, way) for way in SHOWN_WAYS)]))
    return "\n".join(lines)


def headline_table(results: Sequence[Result]) -> str:
    """A column for each of HEADLINE_CASES. Of torch's 16-bit hooks only the best is shown."""
    by_key = {(result.name, result.case): result for result in results}
    shown = {label: by_key[key] for key, label in HEADLINE_CASES.items() if key in by_key}
    lines = [_line("step, times as fast as DDP", list(shown)), "|---" * (len(shown) + 1) + "|"]
    lines.append(_line(STOCK, [_stock(result) for result in shown.values()]))
    for way, label in SHOWN_WAYS.items():
        speed_ups = [_speed_up(result, way) for result in shown.values()]
        if set(speed_ups) != {NOT_RUN}:
            lines.append(_line(label, speed_ups))
    lines.append(_line("communication, of DDP's step", [result.share for result in shown.values()]))
    return "\n".join(lines)


def _line(label: str, cells: Sequence[str]) -> str:
    return " | ".join([f"| {label}" if label else "|", *cells]) + " |"


def best_hook(result: Result) -> str:
    """The fastest of torch's 16-bit hooks that were run. Every case has one."""
    return min((way for way in STOCK_HOOKS if way in result.rows), key=lambda way: result.rows[way]["median_s"])


def _stock(result: Result) -> str:
    return _speed_up(result, best_hook(result))


def _speed_up(result: Result, way: str) -> str:
    return f"{speed_up:.2f}" if (speed_up := result.speed_up(way)) else NOT_RUN


def command(results: Sequence[Result]) -> str:
    """The command that measured `results`, all cases of one file."""
    settings = results[0].settings
    words = ["sudo .venv/bin/python bench/ddp_step.py", f"--hosts {settings['hosts']}"]
    if settings["ranks_per_host"] > 1:
        words.append(f"--ranks-per-host {settings['ranks_per_host']}")
    words.append(f"--link {' '.join(dict.fromkeys(result.case.split('/')[1] for result in results))}")
    words.append(f"--model {' '.join(settings['model'])}")
    words += [f"--{name} {settings[name]:.4g}" for name in ("params", "size")]
    if settings["compute_ms"] is not None:
        words.append(f"--compute-ms {settings['compute_ms']:g}")
    words.append("--caps " + " ".join(f"{cap:g}" for cap in settings["caps"]))
    words += [f"--{name} {settings[name]}" for name in ("rounds", "steps")]
    if settings.get("repeat", 1) > 1:
        words.append(f"--repeat {settings['repeat']}")
    words += ["--ways", *(shlex.quote(way).replace(" ", SPACE) for way in settings["ways"])]
    words.append(f"--json bench/results/{PREFIX}{results[0].name}.json")
    return shell_block(words)


def shell_block(words: Sequence[str]) -> str:
    """A command to copy, in a Markdown code block, broken into lines."""
    lines = textwrap.wrap(" ".join(words), 112, break_long_words=False, break_on_hyphens=False)
    return "```\n" + " \\\n    ".join(lines).replace(SPACE, " ") + "\n```"


def _with_range(speed_up: float | None, of_runs: Sequence[float]) -> str:
    if speed_up is None:
        return NOT_RUN
    return f"{speed_up:.2f}" + (f" ({min(of_runs):.2f}–{max(of_runs):.2f})" if of_runs else "")


def case_table(result: Result) -> str:
    sizes = f"{result.numel:,} parameters, batch {result.found['batch']}, {result.num_steps} steps of each way"
    repeat = result.settings.get("repeat", 1)
    if repeat > 1:
        sizes += f" in each of {repeat} runs, of which medians and, of × DDP, the least and the greatest"
    lines = [
        f"{result.title}: {sizes}. {processor(result.env)}, torch {result.env['torch']}, commit {result.env['commit']}",
        "",
        "| way | bucket MiB | p50 ms | p75 | p90 | p95 | × DDP | × sync alone | × bytes | of ideal | cores busy "
        "| exposed ms | overlap | MB/host | error |",
        "|---" * 15 + "|",
    ]
    for way, row in result.rows.items():
        figures = row["figures"]
        cells = [result.bucket_size(way)]
        cells += [f"{row['percentiles_s'][name] * 1e3:.1f}" for name in ("p50", "p75", "p90", "p95")]
        cells += [
            _with_range(result.speed_up(way), result.speed_ups_of_runs(way)),
            result.sync_speed_up(way),
            result.bytes_ratio(way),
            result.of_ideal(way),
            _cell(figures, "cores_busy", ".0%"),
        ]
        cells += [_cell(figures, "exposed_s", ".1f", 1e3), _cell(figures, "overlap", ".0%")]
        cells += [_cell(figures, "wire_nbytes", ".2f", 1e-6), _cell(figures, "error", ".0e")]
        lines.append(_line(way, cells))
    for run in result.found.get("runs", [result.found]):
        lines += [
            f"\n{way}: {'; '.join(map(str.strip, said.splitlines()))}" for way, said in run.get("chosen", {}).items()
        ]
    lines += [f"\n{entry['impl']}: not measured: {entry['reason']}" for entry in result.missing]
    return "\n".join(lines)


OF_ALL = {SPEED_UPS: speed_up_table, HEADLINE: headline_table}


def _cell(figures: dict, name: str, form: str, factor: float = 1) -> str:
    return format(figures[name] * factor, form) if name in figures else ""


def blocks_of(text: str) -> dict[str, str]:
    """The text between each pair of marks, by name."""
    return dict(re.findall(r"<!-- ([\w-]+) -->\n(.*?)\n?<!-- end -->", text, re.DOTALL))


def tables(results: Sequence[Result], names: Sequence[str]) -> dict[str, str]:
    """The tables of these names. Raises ValueError for a name without a result."""
    found = {}
    for name in names:
        if name in OF_ALL:
            found[name] = OF_ALL[name](results)
            continue
        of_name = [result for result in results if result.name == name]
        if not of_name:
            raise ValueError(f"there is no bench/results/{PREFIX}{name}.json for the table {name!r}")
        found[name] = "\n\n".join([command(of_name), *map(case_table, of_name)])
    return found


def between_marks(text: str, name: str, table: str) -> str:
    """`text` with `table` between the marks of `name`."""
    mark = f"<!-- {name} -->\n"
    begin = text.index(mark) + len(mark)
    return text[:begin] + table + "\n" + text[text.index("<!-- end -->", begin) :]


def write_tables(document: Path, results: Sequence[Result]) -> None:
    text = document.read_text()
    for name, table in tables(results, list(blocks_of(text))).items():
        text = between_marks(text, name, table)
    document.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="*", type=Path, help=f"JSON of ddp_step.py (bench/results/{PREFIX}*.json)")
    parser.add_argument("--print", action="store_true", help="print the tables and write nothing")
    arguments = parser.parse_args()
    results = load(arguments.results or sorted(RESULTS.glob(f"{PREFIX}*.json")))
    if arguments.print:
        print("\n\n".join([speed_up_table(results), *map(case_table, results)]))
        return
    write_tables(DOCUMENT, results)
    README.write_text(between_marks(README.read_text(), HEADLINE, headline_table(results)))


if __name__ == "__main__":
    main()
