"""Checks that many options share. Each raises ValueError with the option, its value and the possible values."""

import math
import sys
from collections.abc import Sequence


def choice(option: str, value: object, choices: Sequence[str]) -> None:
    """Requires one of `choices`."""
    if value not in choices:
        raise ValueError(f"{option}={value!r} is not known: use one of {', '.join(map(repr, choices))}")


def whole(option: str, value: object, least: int, most: int, possible: str) -> None:
    """Requires a whole number from `least` to `most`; `possible` says so in words."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{option}={value!r} is not possible: use {possible}")


def flag(option: str, value: object) -> None:
    """Requires a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{option}={value!r} is not possible: use True or False")


def positive(option: str, value: object, possible: str) -> None:
    """Requires a number greater than 0 that a float can hold; `possible` says so in words."""
    number(option, value, math.ulp(0.0), sys.float_info.max, possible)


def number(option: str, value: object, least: float, most: float, possible: str) -> None:
    """Requires a number from `least` to `most`; `possible` says so in words."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ValueError(f"{option}={value!r} is not possible: use {possible}")


def kind(option: str, value: object, wanted: type) -> None:
    """Requires an object of fusedcomm's class `wanted`."""
    if not isinstance(value, wanted):
        raise ValueError(f"{option}={value!r} is not possible: use a fusedcomm.{wanted.__name__}(…)")
