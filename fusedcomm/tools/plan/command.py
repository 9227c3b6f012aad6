"""The arguments and the output of ``fusedcomm plan``. Imports torch and the extension only when it runs."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fusedcomm.tools.arguments import COMPARED, accepted, add_accept_to
from fusedcomm.tools.plan import architectures

if TYPE_CHECKING:
    from fusedcomm.tools.plan.paper import Row

PRESETS = ("horovod-2018", "ddp-bucket-size")
DEFAULT_CAPS_MIB = (5, 25, 50, 100, 200)
DEFAULT_BACKWARD_SHARE = 2 / 3
DESCRIPTION = """Predicts how long a training step takes on a cluster that need not be available, and recommends the
line of code that makes it shorter. All assumptions are printed. --preset compares the model with published figures."""
_HARDWARE = {
    "--ranks": (int, "number of GPUs"),
    "--ranks-per-host": (int, "GPUs on each host (1)"),
    "--nic-gbps": (float, "line rate of a host, all its NICs together, each way, in Gbit/s (25)"),
    "--efficiency": (float, "share of the NICs' rate that gradients can use (0.926)"),
    "--nic-latency-us": (float, "latency of a hop between hosts, in µs (9.6)"),
    "--local-gbps": (float, "Gbit/s from a GPU to others on its host: PCIe 4.0 about 200, NVLink 4 about 3000 (200)"),
    "--local-latency-us": (float, "latency of a hop within a host, in µs (5.7)"),
    "--memory-gbytes-per-s": (float, "memory rate of a GPU, in GB/s (1500)"),
    "--slowdown": (float, "how much collectives lengthen the backward pass, as a share of their time (0.4)"),
}
_OF_A_PRESET = ("preset", "json", "plot", "command", "run", "error")
"""Names of arguments that --preset can be combined with. A preset has its own values for all others."""


def add_to(commands: "argparse._SubParsersAction") -> None:
    """Adds ``fusedcomm plan`` to the commands."""
    parser = commands.add_parser("plan", help="predict a step without access to the cluster", description=DESCRIPTION)
    for name, (kind, text) in _HARDWARE.items():
        aliases = ("--gpus-per-host",) if name == "--ranks-per-host" else ()
        parser.add_argument(name, *aliases, type=kind, help=text)
    parser.add_argument("--model", choices=architectures.NAMES, help="the model whose gradients are sent")
    parser.add_argument("--params", type=float, help="or: number of gradient elements, in parameters of equal size")
    parser.add_argument("--step-ms", type=float, help="time of a step on one GPU without synchronization")
    parser.add_argument("--samples-per-s", type=float, help="or: throughput of one GPU; needs --batch")
    parser.add_argument("--batch", type=float, help="samples of one GPU in a step; needs --samples-per-s")
    parser.add_argument("--backward-share", type=float, help=f"backward share of a step ({DEFAULT_BACKWARD_SHARE:.3f})")
    parser.add_argument("--wires", nargs="+", metavar="WIRE", help=f"wires to compare ({' '.join(COMPARED)})")
    add_accept_to(parser)
    caps = " ".join(map(str, DEFAULT_CAPS_MIB))
    parser.add_argument("--caps", nargs="+", type=float, metavar="MIB", help=f"bucket_cap_mb to try ({caps})")
    parser.add_argument("--preset", choices=PRESETS, help="compare the model with published figures")
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for all results")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="file for a picture of the steps; needs matplotlib")
    parser.set_defaults(run=run, error=parser.error)


@dataclasses.dataclass(frozen=True)
class _Picture:
    """What --plot draws."""

    label: str
    """Label of the values' axis."""
    series: dict[str, dict[str, float]]
    """By name in the legend: values by the text on the other axis."""
    ordered: bool = False
    """Whether the other axis is a scale, so that points are joined."""


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit status.

    Raises:
        UsageError: an argument is impossible, or a file cannot be written.
        ImportError: a package is not installed.
    """
    from fusedcomm.tools import output
    from fusedcomm.tools.errors import UsageError

    _refuse_what_a_preset_has(args)
    output.check(args.json, args.plot)
    if args.plot is not None:
        output.pyplot()  # if matplotlib is missing, fail before the work
    try:
        if args.preset is None:
            written, picture = _plan(args)
        else:
            written, picture = _horovod() if args.preset == "horovod-2018" else _bucket_size()
    except ValueError as error:
        raise UsageError(str(error)) from error
    try:
        if args.json is not None:
            args.json.write_text(json.dumps(written, indent=1) + "\n")
        if args.plot is not None:
            _draw(args.plot, picture)
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be written: {error.strerror}; name another file") from error
    return 0


def _refuse_what_a_preset_has(args: argparse.Namespace) -> None:
    """Raises UsageError if an argument is given that --preset would ignore."""
    from fusedcomm.tools.errors import UsageError

    if args.preset is None:
        return
    for name, value in vars(args).items():
        if value is not None and name not in _OF_A_PRESET:
            option = "--" + name.replace("_", "-")
            raise UsageError(
                f"{option} would do nothing: --preset {args.preset} has its own clusters and models; leave out one"
            )


def _plan(args: argparse.Namespace) -> tuple[dict, _Picture]:
    """Prints the prediction. Returns what --json and --plot write."""
    from fusedcomm.tools.plan import paper as paper_plan

    if args.ranks is None:
        raise ValueError("how many GPUs? Use --ranks, or --preset for a comparison with published figures")
    given = {name[2:].replace("-", "_") for name in _HARDWARE}
    hardware = paper_plan.Hardware(**{name: getattr(args, name) for name in given if getattr(args, name) is not None})
    parameters = _parameters(args)
    step_s = _step_s(args)
    backward_share = DEFAULT_BACKWARD_SHARE if args.backward_share is None else args.backward_share
    training = paper_plan.Training(parameters, step_s, backward_share)
    wires = args.wires or COMPARED
    may_be_recommended = accepted(wires, args.accept)
    rows = paper_plan.plan(hardware, training, wires, args.caps or DEFAULT_CAPS_MIB)
    found = paper_plan.recommend(rows, may_be_recommended)
    numel = sum(parameter.numel for parameter in parameters)
    assumptions = {
        "model": f"{args.model or 'unknown'}, {numel:,} fp32 gradients"
        + (", ready by the multiply-adds of their layers" if args.model else ", of equal size, evenly ready"),
        "compute": f"{step_s * 1e3:g} ms a step without synchronization, {backward_share:.0%} of it the backward pass",
        **hardware.assumptions(),
        **hardware.assumptions_of_ways(),
    }
    _print_assumptions(assumptions)
    _print_rows(rows)
    print(f"\n{found.line}")
    if found.faster is not None:
        print(
            f"  {found.faster.way} would take {found.faster.step_s * 1e3:.1f} ms, but changes gradients more: try it "
            f"on your own with fusedcomm.simulate, then --accept {found.faster.wire}"
        )
    written = {
        "assumptions": assumptions,
        "hardware": dataclasses.asdict(hardware),
        "rows": [dataclasses.asdict(row) for row in rows],
        "accepted": may_be_recommended,
        "recommendation": found.line,
        "faster_but_not_accepted": found.faster and dataclasses.asdict(found.faster),
    }
    steps = {f"{row.way}, {row.cap_mib:g} MiB": row.step_s * 1e3 for row in rows}
    return written, _Picture("step, ms", {"predicted": steps})


def _parameters(args: argparse.Namespace) -> Sequence[architectures.Parameter]:
    from fusedcomm.tools.plan.paper import even_parameters

    if (args.model is None) == (args.params is None):
        raise ValueError("which gradients? Use exactly one of --model and --params")
    if args.model is not None:
        return architectures.architecture(args.model).parameters
    if not 1 <= args.params < 1e13:
        raise ValueError(f"--params {args.params:g} is not possible: use at least 1 and less than 1e13")
    return even_parameters(int(args.params))


def _step_s(args: argparse.Namespace) -> float:
    if (args.step_ms is None) == (args.samples_per_s is None):
        raise ValueError("how long does one GPU take? Use exactly one of --step-ms and --samples-per-s")
    if args.step_ms is not None:
        if args.batch is not None:
            raise ValueError(
                f"--batch {args.batch:g} would do nothing beside --step-ms {args.step_ms:g}: it belongs to "
                "--samples-per-s; leave out one of the two"
            )
        if not 0 < args.step_ms < 1e12:
            raise ValueError(f"--step-ms {args.step_ms:g} is not possible: use a positive number")
        return args.step_ms / 1e3
    if args.batch is None or not args.batch > 0 or not args.samples_per_s > 0:
        raise ValueError(
            f"--samples-per-s {args.samples_per_s:g} with --batch {args.batch} is not possible: both must be positive"
        )
    return args.batch / args.samples_per_s


def _horovod() -> tuple[dict, _Picture]:
    """Prints the comparison with Horovod's figures. Returns what --json and --plot write."""
    from fusedcomm.tools.plan import published

    rows, assumptions = published.horovod(), published.horovod_assumptions()
    _print_assumptions(assumptions)
    print(f"\n{'scaling efficiency':<20} {'GPUs':>5} {'published':>10} {'model':>7} {'off by':>7}")
    for row in rows:
        off = row.predicted / row.published - 1
        print(f"{row.model:<20} {row.ranks:>5} {row.published:>10.0%} {row.predicted:>7.1%} {off:>+7.1%}")
    series = {
        name: {f"{row.model}\n{row.ranks} GPUs": getattr(row, name) for row in rows}
        for name in ("published", "predicted")
    }
    return {"assumptions": assumptions, "rows": [dataclasses.asdict(row) for row in rows]}, _Picture(
        "scaling efficiency", series
    )


def _bucket_size() -> tuple[dict, _Picture]:
    """Prints predicted steps by DDP's bucket size. Returns what --json and --plot write."""
    from fusedcomm.tools.plan import published

    curves, assumptions = published.bucket_size(), published.bucket_assumptions()
    _print_assumptions(assumptions)
    print("\nstep in ms by DDP's bucket size in MiB; published: resnet50 best at 10 to 25 MB, BERT at more")
    for curve in curves:
        steps = "  ".join(f"{mib:g}: {step_s * 1e3:.1f}" for mib, step_s in curve.step_s_by_mib.items())
        print(f"{curve.model}, {curve.ranks} GPUs, best {curve.best_mib:g}:  {steps}")
    rows = [{**dataclasses.asdict(curve), "best_mib": curve.best_mib} for curve in curves]
    # Steps relative to the best one, so that both models fit on one axis.
    lines = {
        f"{curve.model}, {curve.ranks} GPUs": {
            f"{mib:g}": step_s / curve.step_s_by_mib[curve.best_mib] for mib, step_s in curve.step_s_by_mib.items()
        }
        for curve in reversed(curves)  # the curve with the most sizes comes first: it sets the order on the axis
    }
    picture = _Picture("step, relative to the best, by MiB of a bucket", lines, ordered=True)
    return {"assumptions": assumptions, "rows": rows}, picture


def _print_assumptions(assumptions: dict[str, str]) -> None:
    print("assumed:")
    for name, text in assumptions.items():
        print(f"  {name}: {text}")


def _print_rows(rows: Sequence["Row"]) -> None:
    width = max(len(row.way) for row in rows)
    print(
        f"\n{'way':<{width}} {'cap MiB':>8} {'buckets':>8} {'step ms':>9} {'speed-up':>9} {'efficiency':>11} "
        f"{'waits ms':>9} {'MB/host':>9}  made of"
    )
    for row in rows:
        print(
            f"{row.way:<{width}} {row.cap_mib:>8g} {row.num_buckets:>8} {row.step_s * 1e3:>9.2f} {row.speedup:>9.2f} "
            f"{row.efficiency:>11.1%} {row.exposed_s * 1e3:>9.2f} {row.sent_nbytes / 1e6:>9.1f}  {row.bound}"
        )


def _draw(path: Path, picture: _Picture) -> None:
    from fusedcomm.tools import output

    pyplot = output.pyplot()
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for name, values in picture.series.items():
        axes.plot(list(values), list(values.values()), "o-" if picture.ordered else "o", label=name)
    if not picture.ordered:
        axes.set_ylim(bottom=0)
        pyplot.setp(axes.get_xticklabels(), rotation=30, ha="right")
    axes.set_ylabel(picture.label)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
