"""The ``fusedcomm`` command. Each subcommand imports what it needs when it runs: ``doctor`` has to work on a broken
install."""

import argparse
import importlib.metadata
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from fusedcomm import version
from fusedcomm.tools.errors import UsageError
from fusedcomm.tools.plan import command as plan_command
from fusedcomm.tools.probe import command as probe_command


def main(argv: list[str] | None = None) -> int:
    """Runs the command that `argv` names and returns its exit status. None: the arguments of this process."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except UsageError as error:
        args.error(str(error))
    except ImportError as error:
        print(f"fusedcomm {args.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fusedcomm", description="Compressed gradient communication for PyTorch DDP.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions of fusedcomm, torch and Python")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="show what this machine has, and what fusedcomm does on it")
    doctor.set_defaults(run=_run_doctor, error=doctor.error)

    demo = commands.add_parser(
        "demo",
        help="train a small network under DDP and under each wire, and compare",
        description="Trains a small convolutional network on handwritten digits under DDP, under DDP's fp16 hook and "
        "under each fusedcomm wire, from the same seeds. Starts local processes over gloo, or joins those of torchrun.",
    )
    demo.add_argument("--steps", type=_positive, default=300, help="training steps in each run (300)")
    demo.add_argument("--seeds", type=_positive, default=3, help="seeds to repeat each run with (3)")
    demo.add_argument("--wires", nargs="+", metavar="WIRE", help="fusedcomm wires to run (all)")
    demo.add_argument("--ranks", type=_positive, help="processes to start (2; under torchrun: its world size)")
    demo.add_argument("--out", type=Path, default=Path("out"), help="folder for demo.json and demo.png (out)")
    demo.set_defaults(run=_run_demo, error=demo.error)

    timeline = commands.add_parser(
        "timeline",
        help="merge the traces of all ranks into one",
        description='Merges the files that ranks wrote with comm.trace("trace-{rank}.json") into one, and aligns '
        "the ranks' clocks by their collectives.",
    )
    timeline.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="one trace file for each rank")
    timeline.add_argument("-o", "--out", type=Path, required=True, help="the merged trace; open it at ui.perfetto.dev")
    timeline.set_defaults(run=_run_timeline, error=timeline.error)
    plan_command.add_to(commands)
    probe_command.add_to(commands)
    return parser


class _Version(argparse.Action):
    """Prints the versions and ends the process. Needs neither torch nor the extension."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        try:
            torch = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            torch = "not installed"
        built_for = version.built_for()
        print(f"fusedcomm {version.__version__}" + (f" (built for torch {built_for})" if built_for else ""))
        print(f"torch {torch}")
        print(f"Python {platform.python_version()}")
        parser.exit()


def _positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not possible: use at least 1")
    return value


_positive.__name__ = "whole number"  # argparse puts this name into its error message


def _run_doctor(args: argparse.Namespace) -> int:
    from fusedcomm.tools.doctor import main

    return main()


def _run_demo(args: argparse.Namespace) -> int:
    from fusedcomm.tools.demo.launch import Options, launch

    wires = None if args.wires is None else tuple(args.wires)
    return launch(Options(steps=args.steps, seeds=args.seeds, wires=wires, ranks=args.ranks, out=args.out))


def _run_timeline(args: argparse.Namespace) -> int:
    from fusedcomm.trace.document import ABOUT
    from fusedcomm.trace.merge import TimelineError, merge_files

    try:
        about = merge_files(args.traces, args.out)["otherData"][ABOUT]
    except (TimelineError, OSError) as error:
        raise UsageError(str(error)) from error
    uncertainties = about["clock_uncertainty_us"]
    unknown = [rank for rank, uncertainty in enumerate(uncertainties) if uncertainty is None]
    widest = max(uncertainty for uncertainty in uncertainties if uncertainty is not None)
    print(f"{args.out}: {about['world_size']} ranks, clocks aligned to ± {widest:.0f} µs")
    if unknown:
        print(f"The clocks of ranks {unknown} are not aligned: their traces have no collective in common with rank 0's")
    return 0
