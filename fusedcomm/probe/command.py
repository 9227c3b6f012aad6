"""The arguments of ``fusedcomm probe``. Loads nothing: the other commands have to run where this one cannot."""

import argparse
from pathlib import Path

ACCEPT = ("bf16", "int8")


def add_to(commands: "argparse._SubParsersAction") -> None:
    probe = commands.add_parser(
        "probe",
        help="a minute on your cluster: which wire, if any, makes your step shorter, and by how much",
        description="Measures links, codec and a model's step on torchrun's ranks (torchrun … -m fusedcomm probe), "
        "predicts a step for each wire, sum and bucket size, recommends one, and checks the prediction.",
    )
    probe.add_argument("--script", metavar="PATH[:FUNCTION]", help="its make() returns (model, step[, optimizer])")
    probe.add_argument("--params", type=float, default=25e6, help="without a script: numel of the model (25e6)")
    probe.add_argument("--backward-ms", type=float, default=0.0, help="… and what its backward computes (0)")
    probe.add_argument("--seconds", type=float, default=60.0, help="about as long as it may take (60)")
    probe.add_argument("--wires", nargs="+", default=["bf16", "int8", "fp8", "int4"], help="(bf16 int8 fp8 int4)")
    probe.add_argument("--accept", nargs="+", help=f"those of them that may be recommended ({' '.join(ACCEPT)})")
    probe.add_argument("--caps", nargs="+", type=float, default=[5.0, 25.0, 100.0], help="bucket_cap_mb (5 25 100)")
    probe.add_argument("--cores", type=float, help="that each rank has for itself (counted)")
    probe.add_argument("--json", type=Path, default=Path("out/probe.json"), help="(out/probe.json)")
    probe.add_argument("--plot", type=Path, default=Path("out/probe.png"), help="(out/probe.png)")
    probe.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from fusedcomm.probe.launch import Options, launch
    from fusedcomm.probe.run import Settings

    settings = Settings(
        script=args.script,
        params=int(args.params),
        backward_s=args.backward_ms / 1e3,
        seconds=args.seconds,
        wires=tuple(args.wires),
        accept=tuple(args.accept or [wire for wire in ACCEPT if wire in args.wires]),
        caps_mb=tuple(args.caps),
        cores=args.cores,
    )
    return launch(Options(settings, args.json, args.plot))
