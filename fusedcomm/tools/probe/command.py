"""The arguments of ``fusedcomm probe``. Imports no torch at first: other commands have to run where this one cannot."""

import argparse
from pathlib import Path

from fusedcomm.tools.arguments import COMPARED, accepted, add_accept_to
from fusedcomm.tools.errors import UsageError


def add_to(commands: "argparse._SubParsersAction") -> None:
    """Adds ``fusedcomm probe`` to the commands."""
    probe = commands.add_parser(
        "probe",
        help="measure your cluster for a minute: which wire, if any, makes your step shorter, and by how much",
        description="Measures links, codec and a model's step on torchrun's ranks (torchrun … -m fusedcomm probe), "
        "predicts a step for each wire, sum and bucket size, recommends one, and checks the prediction.",
    )
    probe.add_argument("--script", metavar="PATH[:FUNCTION]", help="make() there returns (model, step[, optimizer])")
    probe.add_argument("--params", type=float, help="without --script: elements of the synthetic model (25e6)")
    probe.add_argument("--backward-ms", type=float, help="without --script: time of its backward pass (0)")
    probe.add_argument("--seconds", type=float, default=60.0, help="about how long the probe may take (60)")
    probe.add_argument("--wires", nargs="+", default=list(COMPARED), help=f"wires to compare ({' '.join(COMPARED)})")
    add_accept_to(probe)
    probe.add_argument("--caps", nargs="+", type=float, default=[5.0, 25.0, 100.0], help="bucket_cap_mb (5 25 100)")
    probe.add_argument(
        "--cores",
        type=float,
        help="cores of each rank of this host (counted); the smallest number of all hosts applies",
    )
    probe.add_argument("--json", type=Path, default=Path("out/probe.json"), help="all findings (out/probe.json)")
    probe.add_argument("--plot", type=Path, default=Path("out/probe.png"), help="picture (out/probe.png)")
    probe.set_defaults(run=_run, error=probe.error)


def _run(args: argparse.Namespace) -> int:
    from fusedcomm.tools.probe.launch import Options, launch
    from fusedcomm.tools.probe.run import Settings

    for option, value in (("--params", args.params), ("--backward-ms", args.backward_ms)):
        if args.script is not None and value is not None:
            raise UsageError(
                f"{option} {value:g} describes the synthetic step, and --script {args.script} has its own: use one"
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
