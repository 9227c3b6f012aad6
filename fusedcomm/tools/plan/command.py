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
from fusedcomm.tools.arguments import WIRES, number, whole, wire
from fusedcomm.tools.errors import UsageError

if TYPE_CHECKING:
    from fusedcomm.tools.plan.paper import Machines, Row, Step

MODELS = {"resnet50": 25_557_032, "gpt2": 124_439_808, "bert-large": 335_141_888, "llama-7b": 6_738_415_616}
"""Parameters of models that --params takes by name."""
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
MOST_PARAMS = 1e13
DEFAULT_BACKWARD_SHARE = 2 / 3
DEFAULT_LOCAL_GBPS = 200.0
DESCRIPTION = """Computes what each wire and sum would send in a step on machines that you cannot use now: bytes
between hosts and inside, their time on the line, and whether it hides behind the backward pass."""
EXAMPLE = """fusedcomm plan --params 350M --hosts 8 --ranks-per-host 8 --nic-gbps 25 --step-ms 300
fusedcomm plan --params resnet50 --hosts 4 --nic-gbps 1 --step-ms 500 --wires bf16 int8"""


def add_to(commands: "argparse._SubParsersAction") -> None:
    """Adds ``fusedcomm plan`` to the commands."""
    parser = commands.add_parser(
        "plan",
        help="compute bytes and their time on the line, without access to the cluster",
        description=DESCRIPTION,
        example=EXAMPLE,
    )
    parser.add_argument(
        "--params",
        type=params,
        metavar="N",
        required=True,
        help=f"parameters: a count, 350M or 1.5B for example, or one of {', '.join(MODELS)}",
    )
    parser.add_argument("--hosts", type=whole(1), metavar="N", required=True, help="hosts, all alike")
    parser.add_argument("--ranks-per-host", type=whole(1), metavar="N", default=1, help="ranks on each host (1)")
    parser.add_argument(
        "--nic-gbps",
        type=number(above=0),
        metavar="N",
        required=True,
        help="line rate of a host to others, each way, in Gbit/s",
    )
    parser.add_argument(
        "--local-gbps",
        type=number(above=0),
        metavar="N",
        default=DEFAULT_LOCAL_GBPS,
        help=f"rate of a rank to others on its host, each way, in Gbit/s ({DEFAULT_LOCAL_GBPS:g})",
    )
    parser.add_argument(
        "--step-ms",
        type=number(above=0, below=1e12),
        metavar="MS",
        required=True,
        help="time of a step of one rank without synchronization",
    )
    parser.add_argument(
        "--backward-share",
        type=number(above=0, most=1),
        metavar="SHARE",
        default=DEFAULT_BACKWARD_SHARE,
        help=f"share of a step that is the backward pass ({DEFAULT_BACKWARD_SHARE:.3f})",
    )
    parser.add_argument(
        "--wires", nargs="+", type=wire, metavar="WIRE", default=list(WIRES), help=f"wires to show ({' '.join(WIRES)})"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for all rows (none)")
    parser.set_defaults(run=run, parser=parser)


def params(text: str) -> int:
    """An argparse type: a count of parameters, as a number with or without a unit, or a model's name."""
    if text in MODELS:
        return MODELS[text]
    unit = UNITS.get(text[-1:].upper(), 1)
    try:
        count = float(text if unit == 1 else text[:-1]) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not possible: use a count, 350M or 1.5B for example, or one of {', '.join(MODELS)}"
        ) from None
    if not 1 <= count < MOST_PARAMS:  # written so that NaN does not pass
        raise argparse.ArgumentTypeError(f"{text} is not possible: use a count from 1 to below {MOST_PARAMS:g}")
    return round(count)


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit status.

    Raises:
        UsageError: an argument is impossible, or the file cannot be written.
    """
    if args.hosts * args.ranks_per_host < 2:
        raise UsageError(
            f"--hosts {args.hosts} has one rank, which sends nothing: add --ranks-per-host, or use 2 hosts"
        )
    output.check((("--json", args.json),))

    from fusedcomm.tools.plan import paper

    machines = paper.Machines(args.hosts, args.ranks_per_host, args.nic_gbps, args.local_gbps)
    step = paper.Step(args.params, args.step_ms / 1e3, args.backward_share)
    rows = paper.plan(machines, step, list(dict.fromkeys(args.wires)))
    print(paper.answer(rows, step))
    _print_rows(rows)
    print(f"\n{_assumptions(machines, step)}")
    if args.json is not None:
        said = {
            "machines": dataclasses.asdict(machines),
            "step": dataclasses.asdict(step),
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        try:
            files.write_text(args.json, json.dumps(said, indent=1) + "\n")
        except OSError as error:
            raise UsageError(f"{error.filename} cannot be written: {error.strerror}; name another file") from error
        output.say_written(args.json)
    return 0


def _assumptions(machines: "Machines", step: "Step") -> str:
    """The assumptions behind the rows. Never empty."""
    from fusedcomm.tools.plan.paper import LINE_SHARE

    return (
        f"Computed, not measured: {step.numel:,} fp32 gradients in {step.num_buckets} equal buckets, all in the wire, "
        f"ready evenly over a backward pass of {step.seconds * step.backward_share * 1e3:g} ms; {machines.hosts} hosts "
        f"× {machines.ranks_per_host} ranks, equally fast; {LINE_SHARE:g} of {machines.nic_gbps:g} Gbit/s between "
        f"hosts and of {machines.local_gbps:g} inside. Latency, encoding and slower ranks come on top: `fusedcomm "
        "probe` measures them."
    )


def _print_rows(rows: Sequence["Row"]) -> None:
    width = max(len(row.way) for row in rows)
    head = f"{'MB between hosts':>17} {'MB inside':>10} {'ms on the line':>15} {'ms added':>10}"
    print(f"\n{'way':<{width}} {head}   (a host's bytes to others, a rank's inside)")
    for row in rows:
        print(
            f"{row.way:<{width}} {row.between_nbytes / 1e6:>17.1f} {row.inside_nbytes / 1e6:>10.1f} "
            f"{row.line_s * 1e3:>15.1f} {row.added_s * 1e3:>10.1f}" + ("   hides" if row.hides else "")
        )
