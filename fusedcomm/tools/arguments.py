"""The arguments of the commands, as far as several share them: the parser, the types, and the options of several
commands. Loads no torch, so that a wrong argument is answered at once."""

import argparse
import difflib
import math
import re
from collections.abc import Callable, Sequence
from typing import get_args

from fusedcomm.literals import Wire
from fusedcomm.tools.errors import UsageError

WIRES = get_args(Wire)
"""fusedcomm.WIRES, which needs torch."""

COMPARED = ("bf16", "int8", "fp8", "int4")
"""Wires that a probe compares unless --wires names others."""

ACCEPT = ("bf16", "int8")
"""Wires that may be recommended unless --accept names others."""

_REWORDED = (
    (r"^argument (\S+): ", r"\1 "),
    (r"invalid choice: (.+?) \(choose from (.+)\)", r"\1 is not possible: use one of \2"),
    (r"expected (?:one|at least one) argument", "has no value: write one after it"),
    (r"ignored explicit argument (.+)", r"takes no value, and \1 is one: leave it out"),
    (r"^the following arguments are required: (.+)", r"\1 is missing: add it"),
    (r"^one of the arguments (\S+) (\S+) is required", r"\1 or \2 is missing: add one of them"),
    (r"not allowed with argument (\S+)", r"cannot be combined with \1: leave out one"),
)
"""Patterns of argparse's own messages, and our wording. Each of ours says what to change."""


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations. An error is one line, and a second one says where all options are listed.

    Args:
        example: lines that a user can type, for the end of the help.
    """

    def __init__(self, *args: object, example: str = "", **kwargs: object) -> None:
        epilog = f"{'examples' if chr(10) in example else 'example'}:\n{example}" if example else None
        super().__init__(
            *args,
            **kwargs,
            epilog=epilog and epilog.replace("\n", "\n  "),
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> None:
        """Prints what is wrong, and ends the process with status 2."""
        for pattern, ours in _REWORDED:
            message = re.sub(pattern, ours, message)
        self.exit(2, f"{self.prog}: {message}\nAll options, with an example: {self.prog} --help\n")

    def refuse_unknown(self, unknown: Sequence[str]) -> None:
        """Ends the process with status 2 if there are `unknown` arguments; names the option that was probably meant."""
        if not unknown:
            return
        name = unknown[0].partition("=")[0]
        if not name.startswith("-"):
            self.error(f"{name} belongs to no option: leave it out, or write its option before it")
        close = difflib.get_close_matches(name, self._option_string_actions, n=1)
        self.error(f"{name} is no option of {self.prog}: " + (f"use {close[0]}" if close else "leave it out"))


def number(
    *, least: float | None = None, above: float | None = None, below: float = math.inf
) -> Callable[[str], float]:
    """An argparse type: a finite number within these limits."""
    return _number(float, "a number", least, above, math.inf, below)


def whole(least: int, most: float = math.inf) -> Callable[[str], int]:
    """An argparse type: a whole number within these limits."""
    return _number(int, "a whole number", least, None, most, math.inf)


def _number(
    kind: type, noun: str, least: float | None, above: float | None, most: float, below: float
) -> Callable[[str], float]:
    if least is not None and most < math.inf:
        limits = f"from {least:g} to {most:g}"
    else:
        limits = " and ".join(
            f"{words} {limit:g}"
            for words, limit in (("of at least", least), ("above", above), ("of at most", most), ("below", below))
            if limit is not None and limit != math.inf
        )
    wanted = f"use {noun} {limits}"

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {noun}: {wanted}") from None
        # Written so that NaN does not pass.
        fits = (least is None or value >= least) and (above is None or value > above)
        if not (fits and value <= most and value < below and value < math.inf):
            raise argparse.ArgumentTypeError(f"{text} is not possible: {wanted}")
        return value

    return parse


def wire(text: str) -> str:
    """An argparse type: the name of a wire."""
    if text == "off":
        raise argparse.ArgumentTypeError("off is DDP's own all-reduce, which is always compared: leave it out")
    if text not in WIRES:
        raise argparse.ArgumentTypeError(f"{text!r} is no wire: use some of {' '.join(WIRES)}")
    return text


def accepted(wires: Sequence[str], accept: Sequence[str] | None) -> tuple[str, ...]:
    """The wires that may be recommended: `accept`, or those of ACCEPT that `wires` contains.

    Args:
        wires: the wires that --wires names.
        accept: the wires that --accept names; None: the option is not given.

    Raises:
        UsageError: `accept` names a wire that `wires` lacks.
    """
    if accept is None:
        return tuple(wire for wire in ACCEPT if wire in wires)
    missing = [wire for wire in accept if wire not in wires]
    if missing:
        raise UsageError(f"--accept {missing[0]}: it is not among --wires {' '.join(wires)}; add it to --wires")
    return tuple(accept)


def add_wires_to(parser: argparse.ArgumentParser) -> None:
    """Adds the options --wires and --accept to `parser`."""
    parser.add_argument(
        "--wires",
        nargs="+",
        type=wire,
        metavar="WIRE",
        help=f"wires to compare, of {' '.join(WIRES)} ({' '.join(COMPARED)})",
    )
    parser.add_argument(
        "--accept",
        nargs="+",
        type=wire,
        metavar="WIRE",
        help=f"wires that may be recommended; int8, fp8 and int4 change gradients ({' '.join(ACCEPT)})",
    )
