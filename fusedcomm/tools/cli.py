"""The ``fusedcomm`` command. Each subcommand imports what it needs when it runs: ``doctor`` has to work on a broken
install, and a wrong argument is answered before torch is loaded."""

import argparse
import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence

from fusedcomm import version
from fusedcomm.tools.arguments import Parser
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
        args = _parser().parse_args(argv)
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
    print("interrupted", file=sys.stderr, flush=True)
    if "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
        os._exit(INTERRUPTED)
    return INTERRUPTED


def _parser() -> Parser:
    parser = Parser(
        prog="fusedcomm",
        description="Compressed gradient communication for PyTorch's DistributedDataParallel.",
        example="fusedcomm doctor\nfusedcomm probe --help",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions of fusedcomm, torch and Python")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_doctor_to(commands)
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


def _run_doctor(args: argparse.Namespace) -> int:
    from fusedcomm.tools.doctor import main

    return main()
