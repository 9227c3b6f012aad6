"""``Auto``: a search for the wire, given in place of a configuration; and the argument that takes either."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import TypeAlias

from fusedcomm.autotune.search import OFF, Tuning
from fusedcomm.config import AUTO, WIRES, Config, Off, Options, Search, Wire, check
from fusedcomm.native import _C

EXACT_WIRE: Wire = "fp32"
"""The wire that is tried by default beside the wire of `Auto.base`, if `base` allows it."""


@dataclasses.dataclass(frozen=True, repr=False)
class Auto(Options):
    """A search for the fastest way to send gradients, made in the first training steps.

    These steps try each of `wires`, then the best wire with other sums and chunks where `base` leaves them open. Given
    to :func:`fusedcomm.attach` they try DDP's own all-reduce, too, and given to :class:`fusedcomm.GradReducer` other
    sizes of buckets. The ranks keep the candidate with the shortest steps, or a more exact one that comes within 3% of
    it. ``config="auto"`` is short for ``Auto()``.

    Args:
        wires: the wires to try. ``attach`` always tries DDP's own exact all-reduce, too. None: the wire of `base`,
            which is "bf16" by default, and "fp32" if `base` can be combined with it. Codes change gradients more, so
            they must be named: ``Auto(("fp32", "bf16", "int8"))`` may also choose int8.
        base: a :class:`fusedcomm.Config` whose options apply to every candidate, except `wire`, which each of `wires`
            replaces. If `base.wire` is not the default, `wires` must contain it. With hosts="auto", the default, sums
            on one level and on two are tried where the hosts allow both, unless `base` has `feedback`: then sums have
            one. None: ``Config()``.
        tuned: what an earlier ``tuning()`` returned, or the path where its ``save()`` wrote it. Nothing is tried then.
            If it does not fit the ranks, the model, the device, `wires` or the front end, rank 0 warns and the search
            is made.

    Raises:
        ValueError: `wires` is empty or names an unknown wire, `base` cannot be combined with one of `wires`, `wires`
            lacks `base.wire`, or `tuned` is of another type. The message names the value.
    """

    wires: Sequence[Wire] | None = None
    base: Config | None = None
    tuned: Tuning | str | os.PathLike | None = None

    def __post_init__(self) -> None:
        if self.base is not None:
            check.kind("base", self.base, Config)
            if self.base.weighted is not None:
                raise ValueError(
                    f"base=Config(weighted={self.base.weighted!r}) is not possible: a search also tries DDP's own "
                    "all-reduce, in which ranks weigh equally. Search without it, then name the wire that was found"
                )
        if self.tuned is not None and not isinstance(self.tuned, (str, os.PathLike, Tuning)):
            raise ValueError(
                f"tuned={self.tuned!r} is not possible: use what tuning() returned, or the path that its save() wrote"
            )
        if self.wires is not None:
            self._check_wires(self.wires)
        for wire in self.tried:
            try:
                self.config(wire)
            except ValueError as error:
                raise ValueError(f"config='auto' cannot try {wire!r} of wires={self.tried!r}: {error}") from error

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
                f"base={self.base!r} has wire={self.base.wire!r}, and wires={tuple(wires)!r} does not contain it: "
                "add it to wires, or leave one of the two out"
            )

    @property
    def common(self) -> Config:
        """`base`, or the default configuration."""
        return self.base or Config()

    @property
    def tried(self) -> tuple[Wire, ...]:
        """The wires to try, the most exact first."""
        wires = self.wires
        if wires is None:
            wires = [self.common.wire]
            if is_possible(lambda: self.config(EXACT_WIRE)):
                wires.append(EXACT_WIRE)
        return tuple(sorted(dict.fromkeys(wires), key=lambda wire: (-_C.exactness(wire), WIRES.index(wire))))

    def config(self, wire: Wire) -> Config:
        """The configuration in which `wire` is tried first. Raises ValueError if it is not possible."""
        return dataclasses.replace(self.common, wire=wire)


def is_possible(make: Callable[[], Config]) -> bool:
    """Whether `make` returns a configuration, and does not raise ValueError."""
    try:
        make()
    except ValueError:
        return False
    return True


ConfigLike: TypeAlias = Config | Auto | Wire | Search | Off
"""What the argument `config` of a front end may be; see :func:`chosen`."""


def chosen(config: ConfigLike | None, *, no_search: str = "", no_off: str = "") -> Config | Auto | Off:
    """The argument `config` of every front end, checked: how gradients are sent. It is one of

    - a wire's name, "int8" for example: short for ``Config("int8")``;
    - a :class:`fusedcomm.Config`, which also has all other options;
    - a :class:`fusedcomm.Auto`: the first steps search for the fastest way. "auto" is short for ``Auto()``, which
      chooses DDP's own all-reduce, "fp32" or "bf16" (``Auto(("fp32", "bf16", "int8"))`` may also choose int8);
    - "off": DDP or FSDP2 stays as it comes, and the handle says so; for comparisons, where only this word changes;
    - None: ``Config()``.

    A front end that has no search, or no sums of its own to leave in place, refuses these.

    Args:
        no_search, no_off: why the front end cannot search or be off; empty if it can.

    Raises:
        TypeError: `config` is of another type.
        ValueError: `config` is no wire's name, or it is refused.
    """
    if config is None:
        return Config()
    if not isinstance(config, (str, Config, Auto)):
        raise TypeError(
            f"config={config!r} is not possible: use a wire's name ({', '.join(map(repr, WIRES))}), a "
            "fusedcomm.Config(…) or a fusedcomm.Auto(…)"
        )
    if no_search and (isinstance(config, Auto) or config == AUTO):
        raise ValueError(no_search)
    if no_off and config == OFF.wire:
        raise ValueError(no_off)
    if not isinstance(config, str):
        return config
    check.choice("config", config, (*WIRES, *([] if no_search else [AUTO]), *([] if no_off else [OFF.wire])))
    return Auto() if config == AUTO else OFF.wire if config == OFF.wire else Config(config)
