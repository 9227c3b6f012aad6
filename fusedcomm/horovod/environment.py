"""The variables that hvd.init() reads, and the settings that they give. The page of the documentation says what each
does. Horovod's other variables have no effect.
"""

import dataclasses
import math
import os
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of hvd.init(). A time of 0 means never, except for the timeouts. Texts may be empty."""

    fusion_nbytes: int = 25 << 20
    stall_warning_s: float = 60.0
    stall_shutdown_s: float = 0.0
    timeout_s: float = 30.0
    change_timeout_s: float = 1800.0
    timeline: str = ""
    mark_cycles: bool = False
    elastic: bool = False
    interface: str = ""


def settings() -> Settings:
    """The settings that the variables give. Raises ValueError for the first impossible one."""
    found = {}
    for name, (field, read) in _VARIABLES.items():
        if text := os.environ.get(name, "").strip():
            found[field] = read(name, text)
    if flag("HOROVOD_STALL_CHECK_DISABLE"):
        found.update(stall_warning_s=0.0, stall_shutdown_s=0.0)
    return Settings(**found)


def flag(name: str, text: str | None = None) -> bool:
    """True for 1, true, yes and on; False for 0, false, no, off and nothing. Raises ValueError for other texts."""
    value = (os.environ.get(name, "") if text is None else text).strip().lower()
    if value not in ("", "0", "false", "no", "off", "1", "true", "yes", "on"):
        raise ValueError(f"{name}={value!r} is not possible: use 1 or 0")
    return value in ("1", "true", "yes", "on")


def whole(name: str, text: str) -> int:
    """Raises ValueError for what is no whole number of at least 0."""
    if not text.isdecimal():
        raise ValueError(f"{name}={text!r} is not possible: use a whole number, at least 0")
    return int(text)


def seconds(name: str, text: str) -> float:
    """Raises ValueError for what is no number of at least 0."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise ValueError(f"{name}={text!r} is not possible: use seconds, at least 0")
    return found


_VARIABLES: dict[str, tuple[str, Callable]] = {
    "HOROVOD_FUSION_THRESHOLD": ("fusion_nbytes", whole),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": ("stall_warning_s", seconds),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": ("stall_shutdown_s", seconds),
    "HOROVOD_GLOO_TIMEOUT_SECONDS": ("timeout_s", seconds),
    "HOROVOD_ELASTIC_TIMEOUT": ("change_timeout_s", seconds),
    "HOROVOD_TIMELINE": ("timeline", lambda _, text: text),
    "HOROVOD_TIMELINE_MARK_CYCLES": ("mark_cycles", flag),
    "HOROVOD_ELASTIC": ("elastic", flag),
    "HOROVOD_GLOO_IFACE": ("interface", lambda _, text: text),
}
