"""``Auto``: a search for the wire, given in place of a configuration; and the argument that takes either."""

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

from fusedcomm.config import AUTO, OFF, WIRES, WITH_SCALES, Config, Off, Options, Search, Wire, check, combinations

UNNAMED_CODES: Wire = "int8"
"""The codes that need no Config of their own to be tried."""
MAX_CANDIDATES = 5
"""More would take more than tuner.MAX_STEPS steps."""


@dataclasses.dataclass(frozen=True, repr=False)
class Auto(Options):
    """A search for the fastest way to send gradients, made in the first training steps.

    These steps try each candidate in turns: first DDP's own all-reduce, or with :class:`fusedcomm.GradReducer`, which
    has none, "fp32". Then the fastest is kept; of candidates within 3% of it the first. ``config="auto"`` is short for
    ``Auto()``.

    Args:
        candidates: what is tried beside that: wires' names, and a :class:`fusedcomm.Config` where other options are
            wanted. Codes other than int8 change gradients more, so they must be named in one: ``Auto(("bf16",
            Config("int4", feedback=Feedback())))``. At most five. A later one is kept only if it is faster than those
            before it by more than 3%.

    Raises:
        ValueError: a candidate is not known, is given twice or is not possible in a search. The message names it.
    """

    candidates: Sequence[Wire | Config] = ("bf16", UNNAMED_CODES)

    def __post_init__(self) -> None:
        given = self.candidates
        if isinstance(given, str):
            raise ValueError(f"candidates={given!r} is one string: pass a tuple, candidates=({given!r},)")
        if not isinstance(given, Sequence) or not given:
            raise ValueError(f"candidates={given!r} leaves nothing to try: pass a tuple, ('bf16', 'int8') for example")
        if len(given) > MAX_CANDIDATES:
            raise ValueError(f"candidates={given!r}: use at most {MAX_CANDIDATES}; `fusedcomm probe` compares more")
        for candidate in given:
            self._check(candidate)
        names = [name_of(config) for config in self.configs]
        if len(set(names)) < len(names):
            raise ValueError(f"candidates={given!r} has one of them twice: leave it out")

    def _check(self, candidate: object) -> None:
        if isinstance(candidate, Config):
            combinations.refuse("Auto", {"weighted": candidate.weighted})
            return
        if candidate not in WIRES:
            hint = "; DDP's own all-reduce is always tried" if candidate == OFF else ""
            raise ValueError(
                f"candidates={self.candidates!r}: {candidate!r} is not known: use {', '.join(map(repr, WIRES))}, or a "
                f"fusedcomm.Config(…){hint}"
            )
        if candidate in WITH_SCALES and candidate != UNNAMED_CODES:
            raise ValueError(
                f"candidates={self.candidates!r}: {candidate!r} changes gradients more than {UNNAMED_CODES}, so it is "
                f"tried only if a Config names it: fusedcomm.Config({candidate!r}) in its place"
            )

    @property
    def configs(self) -> tuple[Config, ...]:
        """The candidates as configurations."""
        return tuple(each if isinstance(each, Config) else Config(each) for each in self.candidates)


def name_of(config: Config) -> str:
    """A candidate's name for people: its wire if all else is default."""
    return config.wire if repr(config) == repr(Config(config.wire)) else repr(config)


ConfigLike: TypeAlias = Config | Auto | Wire | Search | Off
"""What the argument `config` of a front end may be; see :func:`chosen`."""


def chosen(config: ConfigLike | None, front_end: str = "") -> Config | Auto | Off:
    """The argument `config` of every front end, checked: how gradients are sent. It is one of

    - a wire's name, "int8" for example: short for ``Config("int8")``;
    - a :class:`fusedcomm.Config`, which also has all other options;
    - a :class:`fusedcomm.Auto`: the first steps search for the fastest way. "auto" is short for ``Auto()``, which
      chooses DDP's own all-reduce, "bf16" or "int8";
    - "off": DDP or FSDP2 stays as it comes, and the handle says so; for comparisons, where only this word changes;
    - None: ``Config()``.

    A front end that has no search, or no sums of its own to leave in place, refuses these.

    Args:
        front_end: its name in combinations.py; empty if it takes all of them.

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
    combinations.refuse(front_end, {"config": AUTO if isinstance(config, Auto) else config})
    if not isinstance(config, str):
        return config
    words = [word for word in (AUTO, OFF) if not combinations.found(front_end, {"config": word})]
    check.choice("config", config, (*WIRES, *words))
    return Auto() if config == AUTO else OFF if config == OFF else Config(config)
