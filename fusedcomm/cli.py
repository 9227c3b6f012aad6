"""The ``fusedcomm`` command. Each subcommand loads what it needs itself: ``doctor`` has to run on a broken install."""

import argparse
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except UsageError as error:
        parser.error(str(error))
    except ImportError as error:
        print(f"fusedcomm {args.command}: {error}", file=sys.stderr)
        return 1


class UsageError(Exception):
    """The arguments ask for something impossible; the text says what and what to change."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fusedcomm", description="Compressed gradient communication for PyTorch DDP.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="what this machine has, and what fusedcomm will do on it")
    doctor.set_defaults(run=_run_doctor)

    demo = commands.add_parser(
        "demo",
        help="train a small network under DDP and under each wire, and compare",
        description="Trains a small convolutional network on handwritten digits under DDP, its fp16 hook and each "
        "fusedcomm wire, from the same seeds, on local processes over gloo; or as a rank of torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--steps", type=_positive, default=300, help="training steps of each run")
    demo.add_argument("--seeds", type=_positive, default=3, help="each run is repeated so often, from other seeds")
    demo.add_argument("--wires", nargs="+", metavar="WIRE", help="fusedcomm wires to run (default: all)")
    demo.add_argument("--ranks", type=_positive, help="processes to start (default: 2; under torchrun: its own)")
    demo.add_argument("--out", type=Path, default=Path("out"), help="folder for demo.json and demo.png")
    demo.set_defaults(run=_run_demo)

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
    probe.add_argument("--accept", nargs="+", help="those of them that may be recommended (bf16 int8)")
    probe.add_argument("--caps", nargs="+", type=float, default=[5.0, 25.0, 100.0], help="bucket_cap_mb (5 25 100)")
    probe.add_argument("--cores", type=float, help="that each rank has for itself (measured)")
    probe.add_argument("--json", type=Path, default=Path("out/probe.json"), help="(out/probe.json)")
    probe.add_argument("--plot", type=Path, default=Path("out/probe.png"), help="(out/probe.png)")
    probe.set_defaults(run=_run_probe)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not possible: use at least 1")
    return value


_positive.__name__ = "whole number"  # how argparse names it in an error


def _run_doctor(args: argparse.Namespace) -> int:
    from fusedcomm.doctor import main

    return main()


def _run_demo(args: argparse.Namespace) -> int:
    from fusedcomm.demo.launch import Options, launch

    wires = None if args.wires is None else tuple(args.wires)
    return launch(Options(steps=args.steps, seeds=args.seeds, wires=wires, ranks=args.ranks, out=args.out))


def _run_probe(args: argparse.Namespace) -> int:
    from fusedcomm.probe.launch import Options, launch
    from fusedcomm.probe.run import Settings

    accept = args.accept or [wire for wire in Settings.accept if wire in args.wires]
    settings = Settings(
        script=args.script,
        params=int(args.params),
        backward_s=args.backward_ms / 1e3,
        seconds=args.seconds,
        wires=tuple(args.wires),
        accept=tuple(accept),
        caps_mb=tuple(args.caps),
        cores=args.cores,
    )
    return launch(Options(settings, args.json, args.plot))
