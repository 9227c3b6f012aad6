"""What the demo writes at its end: a table, ``demo.json`` and ``demo.png``."""

import dataclasses
import json
import os
import platform
from pathlib import Path

import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm import files
from fusedcomm.tools import output
from fusedcomm.tools.demo.picture import picture
from fusedcomm.tools.demo.results import DEFAULT_NAME, RunResult, Spread, Summary, summaries, timings
from fusedcomm.tools.demo.training import SLICE_STEPS


def report(results: list[RunResult], out: Path) -> None:
    """Prints the table and writes both files to the folder `out`."""
    rows = summaries(results)
    print(table(rows, num_seeds(results)))
    files.write_text(out / "demo.json", json.dumps(as_json(results, rows), indent=1) + "\n")
    picture(results, rows, out / "demo.png")
    print()
    output.say_written(out / "demo.json", out / "demo.png")


def num_seeds(results: list[RunResult]) -> int:
    """Seeds with which each way was run."""
    return len({result.spec.seed for result in results})


# ---- the table


def table(rows: list[Summary], seeds: int) -> str:
    """The table with its footnotes. Never empty."""
    cells = [("", "test", "train", "wire bytes", "of", "step, ms", "", "exposed, ms")]
    cells.append(("run", "accuracy", "loss", "a step", "default", "p50", "p95", "p50"))
    cells += [table_row(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *others in cells:
        padded = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *padded]).rstrip())
    lines.insert(2, "-" * max(map(len, lines)))
    return "\n" + "\n".join(lines + [""] + footnotes(rows, seeds))


def table_row(row: Summary) -> tuple[str, ...]:
    """The cells of a row, as many as the table has columns."""
    return (
        row.name,
        spread(row.accuracy, "{:.2%}"),
        spread(row.final_loss, "{:.5f}"),
        "not measured" if row.wire_bytes_per_step is None else f"{row.wire_bytes_per_step:,.0f}",
        "" if row.bytes_ratio is None else f"{row.bytes_ratio:.3f}",
        f"{row.step_ms_p50:.2f}",
        f"{row.step_ms_p95:.2f}",
        f"{row.exposed_ms_p50:.2f}",
    )


def spread(values: Spread, form: str) -> str:
    """The mean, and the range if there is one; `form` formats each number. Never empty."""
    text = form.format(values.mean)
    if values.low < values.high:
        text += f" ({form.format(values.low)} to {form.format(values.high)})"
    return text


def footnotes(rows: list[Summary], seeds: int) -> list[str]:
    """The lines under the table: what its columns mean, and whether all ranks ended alike. Never empty."""
    lines = []
    if seeds > 1:
        lines.append(
            f"Accuracy, loss: mean of {seeds} seeds (lowest to highest). {DEFAULT_NAME}'s range is the noise band."
        )
    else:
        lines.append("Accuracy, loss: of one seed. More seeds (--seeds) show how much of a difference is noise.")
    lines.append("Wire bytes: sent over TCP by one rank, as the kernel counted, including gloo's headers and barriers.")
    lines.append(
        "Exposed: time from the last gradient of the backward pass to the return of backward(). Steps of all ranks."
    )
    lines.append(
        f"The runs took turns in slices of {SLICE_STEPS} steps, so other load on this machine slowed all of them alike."
    )
    different = [row.name for row in rows if not row.ranks_identical]
    if different:
        lines.append(f"WRONG: the ranks ended with different parameters in: {'; '.join(different)}.")
    else:
        lines.append("In every run all ranks ended with the same parameters, bit for bit.")
    return lines


# ---- the JSON


def as_json(results: list[RunResult], rows: list[Summary]) -> dict:
    """The document. Times are in ms; bytes are those of a step."""
    default = next(row for row in rows if row.name == DEFAULT_NAME)
    return {
        "env": environment(results),
        "noise_band": {
            "seeds": num_seeds(results),
            "accuracy": [default.accuracy.low, default.accuracy.high],
            "final_loss": [default.final_loss.low, default.final_loss.high],
        },
        "summary": [dataclasses.asdict(row) for row in rows],
        "runs": [run_as_json(result) for result in results],
    }


def run_as_json(result: RunResult) -> dict:
    """One run of the document."""
    spec = result.spec
    return {
        "name": spec.name if spec.seed == 0 else f"{spec.name}, seed {spec.seed}",
        "wire": spec.wire,
        "seed": spec.seed,
        "accuracy": result.accuracy,
        "final_loss": result.final_loss,
        "wire_bytes_per_step": result.wire_bytes_per_step,
        **timings([result]),
        "ranks_identical": result.ranks_identical,
        "loss_curve": result.loss_curve,
    }


def environment(results: list[RunResult]) -> dict:
    """What the results depend on."""
    return {
        "fusedcomm": fusedcomm.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ranks": dist.get_world_size(),
        "backend": dist.get_backend(),
        "steps": len(results[0].loss_curve),
    }
