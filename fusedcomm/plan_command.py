"""The arguments and the output of ``fusedcomm plan``. Loads torch and the extension only when it is run."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fusedcomm import architectures

if TYPE_CHECKING:
    from fusedcomm.paper_plan import Row

PRESETS = ("horovod-2018", "ddp-bucket-size")
DESCRIPTION = """What a training step would take on a cluster that nobody has at hand, by a model whose every assumption
is printed, and which line of code would make it shorter. --preset compares the same model with published figures."""
_HARDWARE = {
    "--ranks": (int, "GPUs"),
    "--ranks-per-host": (int, "GPUs on each host"),
    "--nic-gbps": (float, "Gbit/s of a host, all its NICs together, each way"),
    "--efficiency": (float, "part of that which gradients can have"),
    "--nic-latency-us": (float, "of a hop between hosts"),
    "--local-gbps": (float, "Gbit/s of a GPU to the others on its host: PCIe 4.0 about 200, NVLink 4 about 3000"),
    "--local-latency-us": (float, "of a hop within a host"),
    "--memory-gbytes-per-s": (float, "of a GPU"),
    "--slowdown": (float, "of the backward pass, by the time that collectives run beside it"),
}


def add_to(commands: "argparse._SubParsersAction") -> None:
    parser = commands.add_parser("plan", help="predict a step on a cluster on paper", description=DESCRIPTION)
    for name, (kind, text) in _HARDWARE.items():
        aliases = ("--gpus-per-host",) if name == "--ranks-per-host" else ()
        parser.add_argument(name, *aliases, type=kind, help=text)
    parser.add_argument("--model", choices=architectures.NAMES, help="whose gradients are sent")
    parser.add_argument("--params", type=float, help="or their number, in parameters of equal size")
    parser.add_argument("--step-ms", type=float, help="of one GPU, without synchronisation")
    parser.add_argument("--samples-per-s", type=float, help="or its throughput, with --batch")
    parser.add_argument("--batch", type=float, help="samples of one GPU in a step")
    parser.add_argument("--backward-share", type=float, default=2 / 3, help="of a step (0.667)")
    parser.add_argument("--wires", nargs="+", default=["bf16", "int8", "fp8", "int4"], metavar="WIRE")
    parser.add_argument("--caps", nargs="+", type=float, default=[5, 25, 50, 100, 200], metavar="MIB")
    parser.add_argument("--preset", choices=PRESETS, help="compare with published figures; nothing else is used")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all of it there, too")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw it; needs matplotlib")
    parser.set_defaults(run=run)


@dataclasses.dataclass(frozen=True)
class _Picture:
    label: str
    """Of the values."""
    series: dict[str, dict[str, float]]
    """By name: values by what is written below them."""
    ordered: bool = False
    """What is written below is a scale: points are joined."""


def run(args: argparse.Namespace) -> int:
    """Raises UsageError for arguments that are impossible, ImportError where something is not installed."""
    from fusedcomm.cli import UsageError

    if args.plot is not None:
        _pyplot()  # before the work
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


def _plan(args: argparse.Namespace) -> tuple[dict, _Picture]:
    from fusedcomm import paper_plan

    if args.ranks is None:
        raise ValueError("how many GPUs? use --ranks, or --preset for a comparison with published figures")
    given = {name[2:].replace("-", "_") for name in _HARDWARE}
    hardware = paper_plan.Hardware(**{name: getattr(args, name) for name in given if getattr(args, name) is not None})
    parameters = _parameters(args)
    step_s = _step_s(args)
    training = paper_plan.Training(parameters, step_s, args.backward_share)
    rows = paper_plan.plan(hardware, training, args.wires, args.caps)
    recommendation = paper_plan.recommend(rows)
    numel = sum(parameter.numel for parameter in parameters)
    assumptions = {
        "model": f"{args.model or 'unknown'}, {numel:,} fp32 gradients"
        + (", ready by the multiply-adds of their layers" if args.model else ", of equal size, ready evenly"),
        "compute": f"{step_s * 1e3:g} ms a step without synchronisation, {args.backward_share:.0%} of it backward",
        **hardware.assumptions(),
    }
    _print_assumptions(assumptions)
    _print_rows(rows)
    print(f"\n{recommendation}")
    written = {
        "assumptions": assumptions,
        "hardware": dataclasses.asdict(hardware),
        "rows": [dataclasses.asdict(row) for row in rows],
        "recommendation": recommendation,
    }
    steps = {f"{row.way}, {row.cap_mib:g} MiB": row.step_s * 1e3 for row in rows}
    return written, _Picture("step, ms", {"predicted": steps})


def _parameters(args: argparse.Namespace) -> Sequence[architectures.Parameter]:
    from fusedcomm.paper_plan import even_parameters

    if (args.model is None) == (args.params is None):
        raise ValueError("which gradients? use one of --model and --params")
    if args.model is not None:
        return architectures.architecture(args.model).parameters
    if not 1 <= args.params < 1e13:
        raise ValueError(f"--params {args.params:g} is not possible: use a number of at least 1")
    return even_parameters(int(args.params))


def _step_s(args: argparse.Namespace) -> float:
    if (args.step_ms is None) == (args.samples_per_s is None):
        raise ValueError("how long does one GPU take? use one of --step-ms and --samples-per-s")
    if args.step_ms is not None:
        if not 0 < args.step_ms < 1e12:
            raise ValueError(f"--step-ms {args.step_ms:g} is not possible: use a positive number")
        return args.step_ms / 1e3
    if args.batch is None or not args.batch > 0 or not args.samples_per_s > 0:
        raise ValueError(
            f"--samples-per-s {args.samples_per_s:g} with --batch {args.batch} is not possible: both must be positive"
        )
    return args.batch / args.samples_per_s


def _horovod() -> tuple[dict, _Picture]:
    from fusedcomm import published

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
    from fusedcomm import published

    curves, assumptions = published.bucket_size(), published.bucket_assumptions()
    _print_assumptions(assumptions)
    print("\nstep in ms by DDP's bucket size in MiB; published: resnet50 best at 10 to 25 MB, BERT at more")
    for curve in curves:
        steps = "  ".join(f"{mib:g}: {step_s * 1e3:.1f}" for mib, step_s in curve.step_s_by_mib.items())
        print(f"{curve.model}, {curve.ranks} GPUs, best {curve.best_mib:g}:  {steps}")
    rows = [{**dataclasses.asdict(curve), "best_mib": curve.best_mib} for curve in curves]
    # Relative to the best, so that both models fit on one axis.
    lines = {
        f"{curve.model}, {curve.ranks} GPUs": {
            f"{mib:g}": step_s / curve.step_s_by_mib[curve.best_mib] for mib, step_s in curve.step_s_by_mib.items()
        }
        for curve in reversed(curves)  # the one with the most sizes first: they are in its order on the axis
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


def _pyplot():
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("--plot needs matplotlib, which is not installed: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _draw(path: Path, picture: _Picture) -> None:
    pyplot = _pyplot()
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
