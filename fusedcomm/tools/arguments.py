"""Arguments that ``fusedcomm plan`` and ``fusedcomm probe`` share. Loads no torch."""

import argparse
from collections.abc import Sequence

from fusedcomm.tools.errors import UsageError

COMPARED = ("bf16", "int8", "fp8", "int4")
"""Compared unless the user names others."""

ACCEPT = ("bf16", "int8")
"""Wires that are recommended unless the user accepts others."""


def accepted(wires: Sequence[str], accept: Sequence[str] | None) -> tuple[str, ...]:
    """Those of --wires that may be recommended. Raises UsageError for --accept with another."""
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
