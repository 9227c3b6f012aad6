"""Arguments that ``fusedcomm plan`` and ``fusedcomm probe`` share. Loads no torch."""

import argparse
from collections.abc import Sequence

from fusedcomm.tools.errors import UsageError

COMPARED = ("bf16", "int8", "fp8", "int4")
"""Wires that both commands compare unless --wires names others."""

ACCEPT = ("bf16", "int8")
"""Wires that may be recommended unless --accept names others."""


def refuse_off(wires: Sequence[str] | None) -> None:
    """Raises UsageError if --wires names "off"."""
    if "off" in (wires or ()):
        raise UsageError("--wires off: DDP's own all-reduce is always compared; leave it out of --wires")


def accepted(wires: Sequence[str], accept: Sequence[str] | None) -> tuple[str, ...]:
    """The wires that may be recommended: `accept`, or those of ACCEPT that `wires` contains.

    Args:
        wires: the wires that --wires names.
        accept: the wires that --accept names; None: the option is not given.

    Raises:
        UsageError: `accept` names a wire that `wires` lacks, or `wires` has "off".
    """
    refuse_off(wires)
    if accept is None:
        return tuple(wire for wire in ACCEPT if wire in wires)
    missing = [wire for wire in accept if wire not in wires]
    if missing:
        raise UsageError(f"--accept {missing[0]}: it is not among --wires {' '.join(wires)}; add it to --wires")
    return tuple(accept)


def add_accept_to(parser: argparse.ArgumentParser) -> None:
    """Adds the option --accept to `parser`."""
    parser.add_argument(
        "--accept", nargs="+", metavar="WIRE", help=f"wires that may be recommended ({' '.join(ACCEPT)})"
    )
