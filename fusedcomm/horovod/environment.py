"""The variables that fusedcomm.horovod reads, and the settings that hvd.init() takes from them.

Horovod's other variables have no effect.
"""

import dataclasses
import math
import os
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

DEFAULT_FUSION_NBYTES = 25 << 20


DEFAULTS = {
    "HOROVOD_FUSION_THRESHOLD": str(DEFAULT_FUSION_NBYTES),
    "HOROVOD_TIMELINE": "",
    "HOROVOD_TIMELINE_MARK_CYCLES": "0",
    "HOROVOD_STALL_CHECK_DISABLE": "0",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "60",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0",
    "HOROVOD_RANK": "",
    "HOROVOD_SIZE": "",
    "HOROVOD_LOCAL_RANK": "",
    "HOROVOD_LOCAL_SIZE": "",
    "HOROVOD_CROSS_RANK": "",
    "HOROVOD_CROSS_SIZE": "",
    "HOROVOD_HOSTNAME": "",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "",
    "HOROVOD_GLOO_IFACE": "",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "30",
    "HOROVOD_ELASTIC": "0",
    "HOROVOD_ELASTIC_TIMEOUT": "600",
    "FUSEDCOMM_HOROVOD_CHECK": "0",
    "FUSEDCOMM_HOROVOD_STATE": "",
    "FUSEDCOMM_HOROVOD_WORKER": "",
}
"""The variables that are read, with their defaults. The page of the documentation says what each does."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of hvd.init(). A time of 0 means never, except for `timeout_s`."""

    fusion_nbytes: int
    stall_warning_s: float
    stall_shutdown_s: float
    timeout_s: float
    timeline: str | None
    mark_cycles: bool
    elastic: bool
    check: bool
    interface: str | None
    problem: ValueError | None
    """The error of the first impossible variable, which counts as not set until all ranks have been told."""


def settings() -> Settings:
    """The settings that the variables give."""
    problems: list[ValueError] = []

    def told(read: Callable[..., T], name: str) -> T:
        try:
            return read(name)
        except ValueError as error:
            problems.append(error)
            return read(name, DEFAULTS[name])

    watches = not told(flag, "HOROVOD_STALL_CHECK_DISABLE")
    found = Settings(
        fusion_nbytes=told(whole, "HOROVOD_FUSION_THRESHOLD"),
        stall_warning_s=told(seconds, "HOROVOD_STALL_CHECK_TIME_SECONDS") if watches else 0.0,
        stall_shutdown_s=told(seconds, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS") if watches else 0.0,
        timeout_s=told(seconds, "HOROVOD_GLOO_TIMEOUT_SECONDS"),
        timeline=text("HOROVOD_TIMELINE"),
        mark_cycles=told(flag, "HOROVOD_TIMELINE_MARK_CYCLES"),
        elastic=told(flag, "HOROVOD_ELASTIC"),
        check=told(flag, "FUSEDCOMM_HOROVOD_CHECK"),
        interface=text("HOROVOD_GLOO_IFACE"),
        problem=None,
    )
    return dataclasses.replace(found, problem=next(iter(problems), None))


def _value(name: str) -> str:
    return os.environ.get(name) or DEFAULTS[name]


def text(name: str) -> str | None:
    """None if it is neither set nor has a default."""
    return _value(name) or None


def flag(name: str, value: str | None = None) -> bool:
    """True for 1, true, yes and on; False for 0, false, no, off and nothing. Raises ValueError for other texts."""
    value = (_value(name) if value is None else value).strip().lower()
    if value not in ("", "0", "false", "no", "off", "1", "true", "yes", "on"):
        raise ValueError(f"{name}={value!r} is not possible: use 1 or 0")
    return value in ("1", "true", "yes", "on")


def whole(name: str, value: str | None = None) -> int:
    """Raises ValueError for what is no whole number of at least 0."""
    value = _value(name) if value is None else value
    if not value.strip().isdecimal():
        raise ValueError(f"{name}={value!r} is not possible: use a whole number, at least 0")
    return int(value)


def seconds(name: str, value: str | None = None) -> float:
    """Raises ValueError for what is no number of at least 0."""
    value = _value(name) if value is None else value
    try:
        found = float(value)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise ValueError(f"{name}={value!r} is not possible: use seconds, at least 0")
    return found
