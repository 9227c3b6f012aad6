"""The demo's report: a table, and ``demo.json``."""

import dataclasses
import json
import math
import statistics
from pathlib import Path

import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm import files
from fusedcomm.tools import output
from fusedcomm.tools.demo.training import DEFAULT_NAME, RunResult


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean and range of a value over the seeds."""

    mean: float
    low: float
    high: float

    @staticmethod
    def of(values: list[float]) -> "Spread":
        """The spread of one value or more. All three are NaN if one value is."""
        if any(math.isnan(value) for value in values):
            return Spread(math.nan, math.nan, math.nan)
        return Spread(statistics.mean(values), min(values), max(values))

    def text(self, form: str) -> str:
        """The mean, and the range if there is one; `form` formats each number. Never empty."""
        mean, low, high = (form.format(value) for value in dataclasses.astuple(self))
        return f"{mean} ({low} to {high})" if self.low < self.high else mean


@dataclasses.dataclass(frozen=True)
class Summary:
    """One way of synchronizing, over all seeds."""

    name: str
    accuracy: Spread
    final_loss: Spread
    wire_bytes_per_step: float | None
    bytes_ratio: float | None  # wire_bytes_per_step, divided by that of DDP's default; None: not measured
    ranks_identical: bool


def report(results: list[RunResult], out: Path) -> None:
    """Prints the table and writes demo.json to the folder `out`."""
    rows, num_seeds = summaries(results), len({result.seed for result in results})
    print(table(rows, num_seeds))
    document = {
        "env": {"fusedcomm": fusedcomm.__version__, "torch": torch.__version__, "ranks": dist.get_world_size()},
        "noise_band": {"seeds": num_seeds},
        "summary": [dataclasses.asdict(row) for row in rows],
        "runs": [dataclasses.asdict(result) for result in results],
    }
    files.write_text(out / "demo.json", json.dumps(document, indent=1) + "\n")
    print()
    output.say_written(out / "demo.json")


def summaries(results: list[RunResult]) -> list[Summary]:
    """One summary for each way of synchronizing, in the order of the runs. DDP's default must be among them."""
    names = dict.fromkeys(result.name for result in results)
    by_name = {name: [result for result in results if result.name == name] for name in names}
    default_nbytes = _mean_nbytes(by_name[DEFAULT_NAME])

    def summary(name: str, runs: list[RunResult]) -> Summary:
        nbytes = _mean_nbytes(runs)
        return Summary(
            name=name,
            accuracy=Spread.of([run.accuracy for run in runs]),
            final_loss=Spread.of([run.final_loss for run in runs]),
            wire_bytes_per_step=nbytes,
            bytes_ratio=nbytes / default_nbytes if nbytes and default_nbytes else None,
            ranks_identical=all(run.ranks_identical for run in runs),
        )

    return [summary(name, runs) for name, runs in by_name.items()]


def _mean_nbytes(runs: list[RunResult]) -> float | None:
    """The mean of wire_bytes_per_step; None if a run lacks it."""
    nbytes = [run.wire_bytes_per_step for run in runs if run.wire_bytes_per_step is not None]
    return statistics.mean(nbytes) if len(nbytes) == len(runs) else None


def table(rows: list[Summary], num_seeds: int) -> str:
    """The table, and under it what its columns mean. Never empty."""
    cells = [("run", "test accuracy", "train loss", "wire bytes a step", "of default")]
    for row in rows:
        nbytes = "not measured" if row.wire_bytes_per_step is None else f"{row.wire_bytes_per_step:,.0f}"
        ratio = "" if row.bytes_ratio is None else f"{row.bytes_ratio:.3f}"
        accuracy, loss = row.accuracy.text("{:.2%}"), row.final_loss.text("{:.5f}")
        cells.append((row.name, accuracy, loss, nbytes, ratio))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *others in cells:
        padded = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *padded]).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    different = [row.name for row in rows if not row.ranks_identical]
    return "\n".join(
        [
            "",
            *lines,
            "",
            f"Accuracy, loss: mean of {num_seeds} seed(s), with the range; that of {DEFAULT_NAME} is the noise band.",
            "Wire bytes: sent over TCP by one rank, as the kernel counted, with gloo's headers and barriers.",
            "Steps over loopback say nothing of a network's: `fusedcomm probe` measures them on yours.",
            f"WRONG: the ranks ended with different parameters in: {'; '.join(different)}."
            if different
            else "In every run all ranks ended with the same parameters, bit for bit.",
        ]
    )
