"""The arguments of ``fusedcomm probe``. Loads nothing: the other commands have to run where this one cannot."""

import argparse
from collections.abc import Sequence
from pathlib import Path

COMPARED = ("bf16", "int8", "fp8", "int4")
"""Compared unless the user names others."""

ACCEPT = ("bf16", "int8")
"""Wires that are recommended unless the user accepts others."""


def accepted(wires: Sequence[str], accept: Sequence[str] | None) -> tuple[str, ...]:
    """Those of --wires that may be recommended. Raises UsageError for --accept with another."""
    from fusedcomm.tools.cli import UsageError

    if accept is None:
        return tuple(wire for wire in ACCEPT if wire in wires)
    missing = [wire for wire in accept if wire not in wires]
    if missing:
        raise UsageError(f"--accept {missing[0]}: it is not among --wires {' '.join(wires)}: add it there")
    return tuple(accept)


def add_accept_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--accept", nargs="+", metavar="WIRE", help=f"those of them that may be recommended ({' '.join(ACCEPT)})"
    )


def add_to(commands: "argparse._SubParsersAction") -> None:
    probe = commands.add_parser(
        "probe",
        help="a minute on your cluster: which wire, if any, makes your step shorter, and by how much",
        description="Measures links, codec and a model's step on torchrun's ranks (torchrun … -m fusedcomm probe), "
        "predicts a step for each wire, sum and bucket size, recommends one, and checks the prediction.",
    )
    probe.add_argument("--script", metavar="PATH[:FUNCTION]", help="its make() returns (model, step[, optimizer])")
    probe.add_argument("--params", type=float, help="without a script: numel of the model (25e6)")
    probe.add_argument("--backward-ms", type=float, help="… and what its backward computes (0)")
    probe.add_argument("--seconds", type=float, default=60.0, help="about as long as it may take (60)")
    probe.add_argument("--wires", nargs="+", default=list(COMPARED), help=f"what to compare ({' '.join(COMPARED)})")
    add_accept_to(probe)
    probe.add_argument("--caps", nargs="+", type=float, default=[5.0, 25.0, 100.0], help="bucket_cap_mb (5 25 100)")
    probe.add_argument(
        "--cores",
        type=float,
        help="cores of a rank of this host (counted); the fewest of all hosts count",
    )
    probe.add_argument("--json", type=Path, default=Path("out/probe.json"), help="all of it (out/probe.json)")
    probe.add_argument("--plot", type=Path, default=Path("out/probe.png"), help="steps by link (out/probe.png)")
    probe.set_defaults(run=_run, error=probe.error)


def _run(args: argparse.Namespace) -> int:
    from fusedcomm.tools.cli import UsageError
    from fusedcomm.tools.probe.launch import Options, launch
    from fusedcomm.tools.probe.run import Settings

    for option, value in (("--params", args.params), ("--backward-ms", args.backward_ms)):
        if args.script is not None and value is not None:
            raise UsageError(
                f"{option} {value:g} is of the step without a script, and --script {args.script} has one: leave out one"
            )
    step = {"params": args.params, "backward_s": args.backward_ms and args.backward_ms / 1e3}
    settings = Settings(
        script=args.script,
        **{name: value for name, value in step.items() if value is not None},
        seconds=args.seconds,
        wires=tuple(args.wires),
        accept=accepted(args.wires, args.accept),
        caps_mb=tuple(args.caps),
        cores=args.cores,
    )
    return launch(Options(settings, args.json, args.plot))
