"""The argument ``config`` of every front end."""

from typing import TypeAlias

from fusedcomm.config import AUTO, OFF, WIRES, Config, Off, Search, Wire, check, combinations

ConfigLike: TypeAlias = Config | Wire | Search | Off
"""What the argument `config` of a front end may be; see :func:`chosen`."""


def chosen(config: ConfigLike | None, front_end: str = "") -> Config | Search | Off:
    """The argument `config` of every front end, checked: how gradients are sent. It is one of

    - a wire's name, "int8" for example: short for ``Config("int8")``;
    - a :class:`fusedcomm.Config`, which also has all other options;
    - "auto": the first training steps try DDP's own all-reduce, "bf16" and "int8" in turns, and the fastest is kept; of
      those within 3% of it the first. :class:`fusedcomm.GradReducer` tries "fp32" in place of DDP's own;
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
    if not isinstance(config, (str, Config)):
        raise TypeError(
            f"config={config!r} is not possible: use a wire's name ({', '.join(map(repr, WIRES))}) or a "
            "fusedcomm.Config(…)"
        )
    combinations.refuse(front_end, {"config": config})
    if isinstance(config, Config):
        return config
    words = [word for word in (AUTO, OFF) if not combinations.found(front_end, {"config": word})]
    check.choice("config", config, (*WIRES, *words))
    return config if config in words else Config(config)
