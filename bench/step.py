"""How long is a training step with gradient clipping, and which part of it comes after backward()?

A list of tensors like a transformer's parameters, fp32, on two local ranks over gloo. Each parameter's gradient comes
from a dot product, so the backward pass is real autograd, and cheap. A step has these parts, each timed on its own:

    forward     zero_grad() and the loss
    backward    until backward() returns: the gradients are means then
    after       with --amp unscaling; clipping the gradients' norm; optimizer

The ways take turns, one step each. The time of a step is the slowest rank's. All ways but "ddp" have DDP's
gradient_as_bucket_view=True and the bucket size --cap-mib, where they have DDP. "ddp" is DDP as it comes. Before
anything is timed, each way's means, norm and clipped gradients are checked: those of fp32 ways must have DDP's bits,
those of bf16 ways must be as near to the exact mean, element by element, as rounding allows.

Peak memory is the greatest resident memory of a rank in its steps after the first three, each way in processes of its
own, in which malloc gives freed memory back at once. (In the timed processes it keeps freed memory.) The peak of the
first three steps stands beside it: in them DDP rebuilds its buckets, and fusedcomm measures its errors, which it does
again in every 1,000th step.

Needs 6 GiB of memory for all ranks; a quarter of an hour, a minute with --quick.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import _step_rank
from _step_ways import DDP, STOCK, ways
from lib.common import Report, Row, run_command, with_ratios

from fusedcomm.tools import local_ranks

RANKS = 2
QUICK = {"layers": 3, "width": 64, "vocabulary": 300, "rounds": 3}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24, help="layers of 16 tensors each (24)")
    parser.add_argument("--width", type=int, default=576, help="a layer has 12 x its square elements and some (576)")
    parser.add_argument("--vocabulary", type=int, default=10_000, help="rows of the embedding (10000)")
    parser.add_argument("--optimizer", choices=("adamw", "momentum"), default="adamw", help="(adamw)")
    parser.add_argument("--fused", action="store_true", help="the fused optimizer; without, the one that torch chooses")
    parser.add_argument("--amp", action="store_true", help="scale the loss with a GradScaler")
    parser.add_argument("--cap-mib", type=float, default=50, help="bucket size of all ways but ddp, in MiB (50)")
    parser.add_argument("--ways", nargs="+", choices=[way.name for way in ways()], help="ways to compare (all)")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each way (15)")
    parser.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    parser.add_argument("--quick", action="store_true", help="a small model and 3 rounds, where not given otherwise")
    parser.add_argument("--json", metavar="PATH", help="file for the results")
    if parser.parse_args().quick:
        parser.set_defaults(**QUICK)
    arguments = parser.parse_args()
    for name in ("layers", "width", "vocabulary", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if arguments.cap_mib <= 0:
        parser.error("--cap-mib must be greater than 0")
    return arguments


def run_ranks(function: object, *given: object) -> object:
    """What rank 0 has written, after `function` has run on all ranks. Raises SystemExit if a rank failed."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        status = local_ranks.run("step.py", RANKS, function, *given, str(results))
        if status:
            raise SystemExit(status)
        return json.loads(results.read_text())


def add_memory(rows: list[Row], peaks: dict[str, list[int]]) -> None:
    """Adds the peaks to the rows' figures, and how far each is below DDP's, in sizes of the gradients."""
    for row in rows:
        row.figures["first_peak_nbytes"], row.figures["peak_nbytes"] = peaks[row.impl]
        if DDP in peaks:
            row.figures["below_ddp_of_gradients"] = (peaks[DDP][1] - peaks[row.impl][1]) / (4 * row.numel)


def print_steps(rows: list[Row]) -> None:
    """Prints medians in ms, each with its ratio to STOCK's in brackets: below 1 is faster."""
    stock = next((medians_s(row) for row in rows if row.impl == STOCK), {})
    print(f"\n{rows[0].case}, {rows[0].numel:,} elements, ms{f' (ratio to {STOCK})' if stock else ''}")
    headings = "".join(f" {name:>16}" for name in medians_s(rows[0]))
    print(f"{'':<24}{headings} {'peak MiB':>9} {'below ddp':>9} {'first steps':>11}")
    for row in rows:
        cells = []
        for name, seconds in medians_s(row).items():
            ratio = f"({seconds / stock[name]:.3f})" if stock else ""
            cells.append(f" {seconds * 1e3:8.1f} {ratio:>7}")
        for name, form, unit in (("peak_nbytes", "9.0f", 2**20), ("below_ddp_of_gradients", "9.2f", 1)):
            cells.append(f" {row.figures[name] / unit:{form}}" if name in row.figures else "")
        if "first_peak_nbytes" in row.figures:
            cells.append(f" {row.figures['first_peak_nbytes'] / 2**20:11.0f}")
        print(f"{row.impl:<24}{''.join(cells)}")


def medians_s(row: Row) -> dict[str, float]:
    parts = {name: row.figures[f"{name}_s"] for name in ("forward", "backward", "after")}
    return {**parts, "step": row.median_s}


def main() -> None:
    arguments = parse()
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    report = Report(arguments.json, settings=settings, load_before=os.getloadavg())
    report.env.update(threads=1, ranks=RANKS)
    chosen = _step_rank.chosen(arguments)
    rows = [Row(**row) for row in run_ranks(_step_rank.measure_times, arguments)]
    if not arguments.no_memory:
        add_memory(rows, {way.name: run_ranks(_step_rank.measure_memory, arguments, way.name) for way in chosen})
    report.extra["load_after"] = os.getloadavg()
    report.add(with_ratios(rows, [STOCK]))
    print_steps(report.rows)
    report.finish()


if __name__ == "__main__":
    run_command(main)
