"""``Auto``: a search for the wire, in the place of a configuration."""

import dataclasses
import os
from collections.abc import Callable, Sequence

from fusedcomm.autotune.search import OFF, Tuning
from fusedcomm.config import WIRES, Config, Options, check
from fusedcomm.native import _C

EXACT_WIRE = "fp32"
"""By default tried beside the wire of `Auto.base`, where that allows it."""


@dataclasses.dataclass(frozen=True, repr=False)
class Auto(Options):
    """The first steps try DDP's own all-reduce, `wires` and, of the best of them, other sums and chunks where `base`
    leaves those open; the ranks keep what makes their steps shortest, or the more exact if it is within 3%
    (docs/autotune.md). ``wire="auto"`` is short for ``Auto()``.

    Args:
        wires: what may travel beside DDP's own exact all-reduce, which is always tried. None: "fp32", unless `base` is
            not for it, and the wire of `base`.
        base: a :class:`fusedcomm.Config` that holds for all that is tried, but for its `wire`, which each of `wires`
            replaces; unless it is the default, it has to be one of them. Where `base` has no `hosts` and no `feedback`,
            sums on two levels are tried where they can be had. None: ``Config()``.
        tuned: what ``tuning()`` has returned before, or the path where its ``save()`` has put it. Nothing is tried
            then; unless it is of another number of ranks, model or device, or of wires that are not allowed, which a
            warning says.

    Raises:
        ValueError: `wires` are none, `base` is not for one of them, or has a wire that is not among them; names both.
    """

    wires: Sequence[str] | None = None
    base: Config | None = None
    tuned: Tuning | str | os.PathLike | None = None

    def __post_init__(self) -> None:
        if self.base is not None:
            check.kind("base", self.base, Config)
        if self.tuned is not None and not isinstance(self.tuned, (str, os.PathLike, Tuning)):
            raise ValueError(
                f"tuned={self.tuned!r} is not possible: use what tuning() returned, or the path of its save()"
            )
        if self.wires is not None:
            self._check_wires(self.wires)
        for wire in self.tried:
            try:
                self.config(wire)
            except ValueError as error:
                raise ValueError(f"wire='auto' cannot try {wire!r} of wires={self.tried!r}: {error}") from error

    def _check_wires(self, wires: object) -> None:
        if isinstance(wires, str):
            raise ValueError(f"wires={wires!r} is one string: pass a tuple, wires=({wires!r},)")
        if not isinstance(wires, Sequence):
            raise ValueError(f"wires={wires!r} is not possible: pass a tuple of {', '.join(map(repr, WIRES))}")
        if not wires:
            raise ValueError(f"wires={wires!r} leaves nothing to try: name some of {', '.join(map(repr, WIRES))}")
        for wire in wires:
            if wire not in WIRES:
                hint = "; DDP's own all-reduce is always tried" if wire == OFF.wire else ""
                raise ValueError(
                    f"wires={tuple(wires)!r}: {wire!r} is not known: use {', '.join(map(repr, WIRES))}{hint}"
                )
        if self.common.wire not in (*wires, Config().wire):
            raise ValueError(
                f"base={self.base!r} has wire={self.base.wire!r}, and wires={tuple(wires)!r} does not: name it in "
                "wires, too, or leave one of them out"
            )

    @property
    def common(self) -> Config:
        """`base`, in full."""
        return self.base or Config()

    @property
    def tried(self) -> tuple[str, ...]:
        """The wires, the most exact first."""
        wires = self.wires
        if wires is None:
            wires = [self.common.wire]
            if is_possible(lambda: self.config(EXACT_WIRE)):
                wires.append(EXACT_WIRE)
        return tuple(sorted(dict.fromkeys(wires), key=lambda wire: (-_C.exactness(wire), WIRES.index(wire))))

    def config(self, wire: str) -> Config:
        """How it is tried first. ValueError if it is not possible."""
        return dataclasses.replace(self.common, wire=wire)


def is_possible(make: Callable[[], Config]) -> bool:
    try:
        make()
    except ValueError:
        return False
    return True
