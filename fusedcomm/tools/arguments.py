"""The arguments of the commands, as far as several share them: the parser, the types, and the options of several
commands. Loads no torch, so that a wrong argument is answered at once."""

import argparse
import math
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


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations. Below an error a line says where all options are listed.

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
        self.exit(2, f"{self.prog}: {message}\nAll options, with an example: {self.prog} --help\n")


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
