"""The variables that hvd.init() reads, and the settings that they give. The page of the documentation says what each
does. Horovod's other variables have no effect.
"""

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any


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


def _variable(name: str, default: Any, read: Callable[[str, str], Any] = lambda _, text: text) -> Any:
    """A setting, and the variable that it is read from."""
    return dataclasses.field(default=default, metadata={"variable": (name, read)})


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of hvd.init(). A time of 0 means never, except for the timeouts. Texts may be empty."""

    fusion_nbytes: int = _variable("HOROVOD_FUSION_THRESHOLD", 25 << 20, whole)
    stall_warning_s: float = _variable("HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0, seconds)
    stall_shutdown_s: float = _variable("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0, seconds)
    timeout_s: float = _variable("HOROVOD_GLOO_TIMEOUT_SECONDS", 30.0, seconds)
    change_timeout_s: float = _variable("HOROVOD_ELASTIC_TIMEOUT", 1800.0, seconds)
    timeline: str = _variable("HOROVOD_TIMELINE", "")
    mark_cycles: bool = _variable("HOROVOD_TIMELINE_MARK_CYCLES", False, flag)
    elastic: bool = _variable("HOROVOD_ELASTIC", False, flag)
    interface: str = _variable("HOROVOD_GLOO_IFACE", "")


def settings() -> Settings:
    """The settings that the variables give. Raises ValueError for the first impossible one."""
    found = {}
    for field in dataclasses.fields(Settings):
        name, read = field.metadata["variable"]
        if text := os.environ.get(name, "").strip():
            found[field.name] = read(name, text)
    if flag("HOROVOD_STALL_CHECK_DISABLE"):
        found.update(stall_warning_s=0.0, stall_shutdown_s=0.0)
    return Settings(**found)
