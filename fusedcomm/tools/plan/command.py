"""The arguments and the output of ``fusedcomm plan``. Imports torch and the extension only once its arguments are
known to be possible."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fusedcomm import files
from fusedcomm.tools import output
from fusedcomm.tools.arguments import COMPARED, accepted, add_wires_to, number
from fusedcomm.tools.errors import UsageError
from fusedcomm.tools.plan import architectures
from fusedcomm.tools.plan.hardware import DEVICES, CpuHosts, GpuHosts, Hosts, options_of

if TYPE_CHECKING:
    from fusedcomm.tools.plan.paper import Recommendation, Row, Training

DEFAULT_CAPS_MIB = (5, 25, 50, 100, 200)
DEFAULT_BACKWARD_SHARE = 2 / 3
DESCRIPTION = """Predicts how long a training step takes on a cluster that you cannot use now, and
recommends the line of code that makes it shorter. Prints the answer, then a table of all
ways, then every assumption."""
USAGE = """fusedcomm plan --ranks N (--model NAME | --params N) (--step-ms MS | --samples-per-s N --batch N)
                      [further options]"""
EXAMPLE = """fusedcomm plan --ranks 64 --gpus-per-host 8 --nic-gbps 25 --model bert-large --step-ms 300
fusedcomm plan --device cpu --ranks 4 --cores 8 --nic-gbps 1 --params 25e6 --step-ms 500"""


def add_to(commands: "argparse._SubParsersAction") -> None:
    """Adds ``fusedcomm plan`` to the commands."""
    parser = commands.add_parser(
        "plan",
        help="predict a step without access to the cluster",
        description=DESCRIPTION,
        usage=USAGE,
        example=EXAMPLE,
    )
    step = parser.add_argument_group("the model and its step")
    model = step.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--model",
        choices=architectures.NAMES,
        metavar="NAME",
        help=f"the model whose gradients are sent: {', '.join(architectures.NAMES)}",
    )
    model.add_argument(
        "--params",
        type=number(least=1, below=1e13),
        metavar="N",
        help="or: gradient elements, in parameters of equal size",
    )
    duration = step.add_mutually_exclusive_group(required=True)
    duration.add_argument(
        "--step-ms",
        type=number(above=0, below=1e12),
        metavar="MS",
        help="time of a step of one rank without synchronization",
    )
    duration.add_argument(
        "--samples-per-s", type=number(above=0), metavar="N", help="or: samples per second of one rank; needs --batch"
    )
    step.add_argument(
        "--batch", type=number(above=0), metavar="N", help="samples of one rank in a step; needs --samples-per-s"
    )
    step.add_argument(
        "--backward-share",
        type=number(above=0, most=1),
        metavar="SHARE",
        help=f"share of a step that is the backward pass ({DEFAULT_BACKWARD_SHARE:.3f})",
    )
    hosts = parser.add_argument_group(
        "the machines; defaults in brackets, for GPUs and for CPU hosts where they differ"
    )
    hosts.add_argument("--device", choices=tuple(DEVICES), help="what trains: gpu over NCCL, or cpu over gloo (gpu)")
    for option, field in _hardware_options().items():
        hosts.add_argument(
            option,
            *field.metadata["aliases"],
            type=field.metadata["parse"],
            metavar="N",
            required=field.default is dataclasses.MISSING,
            help=field.metadata["help"] + _defaults_of(field.name),
        )
    choices = parser.add_argument_group("what to compare, and what to write")
    add_wires_to(choices)
    caps = " ".join(map(str, DEFAULT_CAPS_MIB))
    choices.add_argument(
        "--caps", nargs="+", type=number(least=0), metavar="MIB", help=f"bucket_cap_mb of DDP to try ({caps})"
    )
    choices.add_argument("--json", type=Path, metavar="PATH", help="file for all results (none)")
    choices.add_argument(
        "--plot", type=Path, metavar="PATH", help="file for a picture of the steps; needs matplotlib (none)"
    )
    parser.set_defaults(run=run, parser=parser)


def _hardware_options() -> dict[str, dataclasses.Field]:
    """The fields of all devices that are options, by option."""
    return {option: field for hosts in DEVICES.values() for option, field in options_of(hosts)}


def _defaults_of(name: str) -> str:
    """The default of a field in brackets, or both devices' if they differ; empty if there is none."""
    fields = [hosts.__dataclass_fields__[name] for hosts in DEVICES.values() if name in hosts.__dataclass_fields__]
    defaults = [f"{field.default:g}" for field in fields if field.default is not dataclasses.MISSING]
    return f" ({', '.join(dict.fromkeys(defaults))})" if defaults else ""


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit status.

    Raises:
        UsageError: an argument is impossible, or a file cannot be written.
        ImportError: a package is not installed.
    """
    hosts = _hosts(args)
    _check_batch(args)
    accepted(args.wires or COMPARED, args.accept)
    output.check((("--json", args.json), ("--plot", args.plot)))
    if args.plot is not None:
        output.pyplot()  # if matplotlib is missing, fail before the work
    written = _plan(args, hosts)
    try:
        if args.json is not None:
            files.write_text(args.json, json.dumps(written, indent=1) + "\n")
        if args.plot is not None:
            _draw(args.plot, written["rows"])
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be written: {error.strerror}; name another file") from error
    output.say_written(*(path for path in (args.json, args.plot) if path is not None))
    return 0


def _hosts(args: argparse.Namespace) -> Hosts:
    """The machines. Raises UsageError if they are impossible."""
    device = args.device or "gpu"
    here = dict(options_of(DEVICES[device]))
    given = {}
    for option, field in _hardware_options().items():
        value = getattr(args, field.name)
        if value is None:
            continue
        if option not in here:
            raise UsageError(
                f"{option} {value:g} would do nothing with --device {device}: it describes another device; leave it out"
            )
        given[field.name] = value
    try:
        return DEVICES[device](**given)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _check_batch(args: argparse.Namespace) -> None:
    """Raises UsageError unless --batch and --samples-per-s are given together."""
    if args.samples_per_s is None and args.batch is not None:
        raise UsageError(f"--batch {args.batch:g} would do nothing without --samples-per-s: leave it out")
    if args.samples_per_s is not None and args.batch is None:
        raise UsageError(
            f"--samples-per-s {args.samples_per_s:g} does not say how long a step takes: add --batch, its samples"
        )


def _training(args: argparse.Namespace, hosts: Hosts) -> "Training":
    from fusedcomm.tools.plan.paper import Training, even_parameters

    if args.model is not None:
        parameters = architectures.architecture(args.model).parameters
    else:
        parameters = even_parameters(int(args.params))
    step_s = args.step_ms / 1e3 if args.step_ms is not None else args.batch / args.samples_per_s
    backward_share = DEFAULT_BACKWARD_SHARE if args.backward_share is None else args.backward_share
    busy_cores = hosts.cores if isinstance(hosts, CpuHosts) else 1.0
    return Training(parameters, step_s, backward_share, busy_cores)


def _plan(args: argparse.Namespace, hosts: GpuHosts | CpuHosts) -> dict:
    """Prints the prediction. Returns what --json writes."""
    from fusedcomm.tools.plan import paper

    training = _training(args, hosts)
    wires = args.wires or COMPARED
    may_be_recommended = accepted(wires, args.accept)
    rows = paper.plan(hosts, training, wires, args.caps or DEFAULT_CAPS_MIB)
    found = paper.recommend(rows, may_be_recommended)
    numel = sum(parameter.numel for parameter in training.parameters)
    assumptions = {
        "model": f"{args.model or 'unknown'}, {numel:,} fp32 gradients"
        + (", ready by the multiply-adds of their layers" if args.model else ", of equal size, evenly ready"),
        "compute": f"{training.step_s * 1e3:g} ms a step without synchronization, {training.backward_share:.0%} of it "
        "the backward pass",
        **hosts.assumptions(),
        **paper.assumptions_of_ways(hosts),
    }
    _print_answer(found, rows[0])
    _print_rows(rows, found, may_be_recommended)
    _print_assumptions(assumptions)
    return {
        "assumptions": assumptions,
        "hardware": {"device": args.device or "gpu", **dataclasses.asdict(hosts)},
        "rows": [dataclasses.asdict(row) for row in rows],
        "accepted": may_be_recommended,
        "recommendation": found.line,
        "faster_but_not_accepted": found.faster and dataclasses.asdict(found.faster),
    }


def _print_assumptions(assumptions: dict[str, str]) -> None:
    print("\nAssumed (--help lists the options that change it):")
    for name, text in assumptions.items():
        print(f"  {name}: {text}")


def _print_answer(found: "Recommendation", default: "Row") -> None:
    """Prints what to do, and what it gains. Nothing was measured, and the lines say so."""
    row = found.row
    print(found.line if found.line.startswith("leave") else f"Use: {found.line}")
    told = "" if row is default else f" instead of {default.step_s * 1e3:.1f} ms, {row.speedup:.2f} times as fast"
    print(f"  A step would take {row.step_s * 1e3:.1f} ms{told}: predicted from the assumptions below, not measured")
    if found.faster is not None:
        print(
            f"  {found.faster.way} would take {found.faster.step_s * 1e3:.1f} ms, but changes gradients more: try it "
            f"on your own with fusedcomm.simulate, then --accept {found.faster.wire}"
        )


def _print_rows(rows: Sequence["Row"], found: "Recommendation", accepted: Sequence[str]) -> None:
    width = max(len(row.way) for row in rows)
    print(
        f"\n{'way':<{width}} {'cap MiB':>8} {'buckets':>8} {'step ms':>9} {'speed-up':>9} {'efficiency':>11} "
        f"{'waits ms':>9} {'MB/host':>9}  {'made of':<8}"
    )
    for row in rows:
        note = "  not accepted" if row.wire is not None and row.wire not in accepted else ""
        line = (
            f"{row.way:<{width}} {row.cap_mib:>8g} {row.num_buckets:>8} {row.step_s * 1e3:>9.2f} {row.speedup:>9.2f} "
            f"{row.efficiency:>11.1%} {row.exposed_s * 1e3:>9.2f} {row.sent_nbytes / 1e6:>9.1f}  {row.bound:<8}"
        )
        print((line + ("  <- use" if row is found.row else note)).rstrip())


def _draw(path: Path, rows: Sequence[dict]) -> None:
    """Draws a point for the step of each of the rows, in ms."""
    pyplot = output.pyplot()
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    names = [f"{row['way']}, {row['cap_mib']:g} MiB" for row in rows]
    axes.plot(names, [row["step_s"] * 1e3 for row in rows], "o", label="predicted")
    axes.set_ylim(bottom=0)
    pyplot.setp(axes.get_xticklabels(), rotation=30, ha="right")
    axes.set_ylabel("step, ms")
    axes.grid(alpha=0.3)
    axes.legend()
    output.save_picture(figure, path, dpi=120)
