"""What arithmetic.py and floats.py share: PTX types, operations, and the modifiers of an opcode."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .parse import Unsupported

DTYPES = {f"{kind}{nbits}": np.dtype(f"u{nbits // 8}") for kind in "bu" for nbits in (8, 16, 32, 64)}
DTYPES |= {f"s{nbits}": np.dtype(f"i{nbits // 8}") for nbits in (8, 16, 32, 64)}
DTYPES |= {"f32": np.dtype("f4"), "f16": np.dtype("f2"), "pred": np.dtype(bool)}


Function = Callable[..., np.ndarray]
"""Of arrays, [threads] each, or [1] for the same value in all threads."""


@dataclass(frozen=True)
class Operation:
    sources: tuple[str, ...]  # the operands' types
    result: str  # the result's type
    compute: Function  # of arrays of these types
    any_width: bool = False  # whether registers may be wider than the types


class Modifiers:
    """The parts of an opcode between its name and its types. Each must be asked for."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._left = list(names)

    def has(self, name: str) -> bool:
        if name in self._left:
            self._left.remove(name)
            return True
        return False

    def one(self, *names: str) -> str:
        """The one of `names` that is there. Raises Unsupported if there is none."""
        for name in names:
            if self.has(name):
                return name
        raise Unsupported(f"needs one of {', '.join(names)}")

    def check(self) -> None:
        if self._left:
            raise Unsupported(f"unknown modifier .{'.'.join(self._left)}")


def same(kind: str, numel: int, compute: Function) -> Operation:
    return Operation((kind,) * numel, kind, compute)


def require(kind: str, *kinds: str) -> None:
    if kind not in kinds:
        raise Unsupported(f"type .{kind} is not known here")


def nbits_of(kind: str) -> int:
    return 8 * DTYPES[kind].itemsize


INTEGERS = tuple(f"{kind}{nbits}" for kind in "us" for nbits in (16, 32, 64))
