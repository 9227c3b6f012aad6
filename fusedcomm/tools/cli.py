"""The ``fusedcomm`` command. Each subcommand imports what it needs when it runs: ``doctor`` has to work on a broken
install, and a wrong argument is answered before torch is loaded."""

import argparse
import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from fusedcomm import version
from fusedcomm.tools.arguments import WIRES, Parser, whole, wire
from fusedcomm.tools.demo import MAX_RANKS
from fusedcomm.tools.errors import UsageError
from fusedcomm.tools.probe import command as probe_command
from fusedcomm.tools.run import add_to as add_run_to

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as shells count."""
PIPE_CLOSED = 141
"""Exit status if the reader of the output has left, as ``head`` does: 128 + SIGPIPE."""


def main(argv: list[str] | None = None) -> int:
    """Runs the command that `argv` names and returns its exit status. None: the arguments of this process."""
    try:
        args, unknown = _parser().parse_known_args(argv)
        args.parser.refuse_unknown(unknown)
        try:
            status = args.run(args)
            sys.stdout.flush()
            return status
        except UsageError as error:
            args.parser.error(str(error))
        except ImportError as error:
            print(f"fusedcomm {args.command}: {error}", file=sys.stderr)
            return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the exit would fail on it again
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return _interrupted()


def _interrupted() -> int:
    """Says that the command was interrupted, and returns its exit status. A rank ends here, because its threads may
    wait for other ranks."""
    # A progress bar leaves the cursor behind it.
    print("\ninterrupted" if sys.stderr.isatty() else "interrupted", file=sys.stderr, flush=True)
    if "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
        os._exit(INTERRUPTED)
    return INTERRUPTED


def _parser() -> Parser:
    parser = Parser(
        prog="fusedcomm",
        description="Compressed gradient communication for PyTorch's DistributedDataParallel.",
        example="fusedcomm doctor\nfusedcomm probe --help",
    )
    parser.set_defaults(parser=parser)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions of fusedcomm, torch and Python")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_doctor_to(commands)
    _add_demo_to(commands)
    probe_command.add_to(commands)
    add_run_to(commands)
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


def _add_doctor_to(commands: "argparse._SubParsersAction") -> None:
    doctor = commands.add_parser(
        "doctor",
        help="show what this machine has, and what fusedcomm does on it",
        description="Shows what this machine has (torch, compiler, devices, network), what fusedcomm does on it, and "
        "what to change.\nTakes no options. Exits with 1 if fusedcomm cannot be used.",
        example="fusedcomm doctor",
    )
    doctor.set_defaults(run=_run_doctor, parser=doctor)


def _add_demo_to(commands: "argparse._SubParsersAction") -> None:
    demo = commands.add_parser(
        "demo",
        help="train a small network under DDP and under each wire, and compare",
        description="Trains a small convolutional network on handwritten digits under DDP, under DDP's fp16 hook and\n"
        "under DDP with each fusedcomm wire. Compares accuracy and bytes from the same seeds. Starts processes on\n"
        "this machine over gloo.",
        example="fusedcomm demo --steps 40 --seeds 1 --wires bf16 int8    (under a minute)",
    )
    demo.add_argument("--steps", type=whole(1), metavar="N", default=300, help="training steps in each run (300)")
    demo.add_argument("--seeds", type=whole(1), metavar="N", default=3, help="seeds to repeat each run with (3)")
    demo.add_argument("--wires", nargs="+", type=wire, metavar="WIRE", help="fusedcomm wires to run (all)")
    demo.add_argument(
        "--ranks",
        type=whole(2, MAX_RANKS),
        metavar="N",
        default=2,
        help=f"processes to start, 2 to {MAX_RANKS} (2)",
    )
    demo.add_argument("--out", type=Path, metavar="FOLDER", default=Path("out"), help="folder for demo.json (out)")
    demo.set_defaults(run=_run_demo, parser=demo)


def _run_doctor(args: argparse.Namespace) -> int:
    from fusedcomm.tools.doctor import main

    return main()


def _run_demo(args: argparse.Namespace) -> int:
    from fusedcomm.tools import output

    output.check((("--out", args.out / "demo.json"),))
    from fusedcomm.tools.demo.launch import launch

    return launch(args.steps, args.seeds, tuple(dict.fromkeys(args.wires or WIRES)), args.ranks, args.out)
