"""Every variable that fusedcomm.horovod reads, as a table, and the settings that hvd.init() takes from them.

Horovod's other variables are accepted: rank 0 says once which of those that are set have no effect.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")

DEFAULT_FUSION_NBYTES = 25 << 20


@dataclasses.dataclass(frozen=True)
class Variable:
    """`effect`: what it does here, or, if it has none, why not."""

    name: str
    default: str
    effect: str
    is_used: bool = True


_PLACE = (
    "the process's place in the job; without them torchrun's variables say it. hvd.init() sets them where they lack"
)
_NO_SEARCH = "nothing is searched for. To use buckets of another size set HOROVOD_FUSION_THRESHOLD"

VARIABLES = [
    Variable("HOROVOD_FUSION_THRESHOLD", str(DEFAULT_FUSION_NBYTES), "most bytes of a fused bucket; 0: no fusion"),
    Variable("HOROVOD_TIMELINE", "", "rank 0 writes this file in Chrome's format; DYNAMIC: only hvd.start_timeline()"),
    Variable("HOROVOD_TIMELINE_MARK_CYCLES", "0", "1: the timeline marks each cycle"),
    Variable("HOROVOD_STALL_CHECK_DISABLE", "0", "1: no warnings about ranks that do not submit, and no shutdown"),
    Variable("HOROVOD_STALL_CHECK_TIME_SECONDS", "60", "seconds until a warning names missing ranks and tensors"),
    Variable("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0", "seconds until a stall ends the job; 0: never"),
    Variable("HOROVOD_RANK", "", _PLACE),
    Variable("HOROVOD_SIZE", "", _PLACE),
    Variable("HOROVOD_LOCAL_RANK", "", _PLACE),
    Variable("HOROVOD_LOCAL_SIZE", "", _PLACE),
    Variable("HOROVOD_CROSS_RANK", "", _PLACE),
    Variable("HOROVOD_CROSS_SIZE", "", _PLACE),
    Variable("HOROVOD_HOSTNAME", "the host's name", "ranks with the same name are on one host"),
    Variable("HOROVOD_GLOO_RENDEZVOUS_ADDR", "", "host of rank 0, where the ranks meet"),
    Variable("HOROVOD_GLOO_RENDEZVOUS_PORT", "", "a free port there"),
    Variable("HOROVOD_GLOO_IFACE", "", "network interface, as GLOO_SOCKET_IFNAME"),
    Variable("HOROVOD_GLOO_TIMEOUT_SECONDS", "30", "seconds that ranks wait for each other in hvd.init()"),
    Variable("HOROVOD_DYNAMIC_PROCESS_SETS", "0", "1: add_process_set() and remove_process_set() work"),
    Variable("HOROVOD_ELASTIC", "0", "1: `fusedcomm run --elastic` says ranks and size at each hvd.init()"),
    Variable("HOROVOD_ELASTIC_TIMEOUT", "600", "seconds that survivors wait for enough workers"),
    Variable("FUSEDCOMM_HOROVOD_CHECK", "0", "1: a tensor changed in place while it is under way is an error"),
    Variable("FUSEDCOMM_HOROVOD_STATE", "", "folder in which state.commit() also writes a file, for restarted workers"),
    Variable("FUSEDCOMM_HOROVOD_WORKER", "", "set by `fusedcomm run --elastic`: which of its workers this is"),
    Variable("FUSEDCOMM_HOROVOD_KEY", "", "set by `fusedcomm run`: the secret with which the job's ranks sign"),
    Variable("HOROVOD_CYCLE_TIME", "1", "collectives start when tensors are ready, not by a clock", False),
    Variable("HOROVOD_CACHE_CAPACITY", "1024", "every name that repeats has a number; that needs no capacity", False),
    Variable("HOROVOD_DISABLE_GROUP_FUSION", "0", "a bucket may hold several groups; results are the same", False),
    Variable("HOROVOD_HIERARCHICAL_ALLREDUCE", "0", "a wire's Config(hosts=…) has the two-level sum", False),
    Variable("HOROVOD_HIERARCHICAL_ALLGATHER", "0", "the backend chooses", False),
    Variable("HOROVOD_CONTROLLER", "", "ranks negotiate over TCP; there is no MPI", False),
    Variable("HOROVOD_CPU_OPERATIONS", "", "CPU tensors travel over gloo", False),
    Variable("HOROVOD_NUM_NCCL_STREAMS", "1", "torch's NCCL backend chooses its streams", False),
    Variable("HOROVOD_BATCH_D2D_MEMCOPIES", "1", "copies into buckets are always batched", False),
    Variable("HOROVOD_ENABLE_ASYNC_COMPLETION", "0", "completion is always asynchronous", False),
    Variable("HOROVOD_THREAD_AFFINITY", "", "the coordinator's thread sleeps unless there is work", False),
    Variable("HOROVOD_AUTOTUNE", "0", _NO_SEARCH, False),
    Variable("HOROVOD_AUTOTUNE_LOG", "", _NO_SEARCH, False),
    Variable("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "3", _NO_SEARCH, False),
    Variable("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "10", _NO_SEARCH, False),
    Variable("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "20", _NO_SEARCH, False),
    Variable("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "0.8", _NO_SEARCH, False),
    Variable("HOROVOD_ADASUM_MPI_CHUNK_SIZE", "", "there is no MPI", False),
    Variable("HOROVOD_LOG_LEVEL", "warning", "use logging.getLogger('fusedcomm')", False),
    Variable("HOROVOD_LOG_HIDE_TIME", "0", "use logging.getLogger('fusedcomm')", False),
]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What hvd.init() takes from the variables. A time of 0 means never, except for `timeout_s`."""

    fusion_nbytes: int
    stall_warning_s: float
    stall_shutdown_s: float
    timeout_s: float
    dynamic_process_sets: bool
    timeline: str | None
    mark_cycles: bool
    elastic: bool
    check: bool
    interface: str | None
    problem: ValueError | None
    """That of the first variable that is not possible, which counts as not set until all ranks have been told."""


def settings() -> Settings:
    """As the variables have them."""
    problems: list[ValueError] = []

    def told(read: Callable[..., T], name: str) -> T:
        try:
            return read(name)
        except ValueError as error:
            problems.append(error)
            return read(name, _DEFAULTS[name])

    watches = not told(flag, "HOROVOD_STALL_CHECK_DISABLE")
    found = Settings(
        fusion_nbytes=told(whole, "HOROVOD_FUSION_THRESHOLD"),
        stall_warning_s=told(seconds, "HOROVOD_STALL_CHECK_TIME_SECONDS") if watches else 0.0,
        stall_shutdown_s=told(seconds, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS") if watches else 0.0,
        timeout_s=told(seconds, "HOROVOD_GLOO_TIMEOUT_SECONDS"),
        dynamic_process_sets=told(flag, "HOROVOD_DYNAMIC_PROCESS_SETS"),
        timeline=text("HOROVOD_TIMELINE"),
        mark_cycles=told(flag, "HOROVOD_TIMELINE_MARK_CYCLES"),
        elastic=told(flag, "HOROVOD_ELASTIC"),
        check=told(flag, "FUSEDCOMM_HOROVOD_CHECK"),
        interface=text("HOROVOD_GLOO_IFACE"),
        problem=None,
    )
    return dataclasses.replace(found, problem=next(iter(problems), None))


_DEFAULTS = {variable.name: variable.default for variable in VARIABLES}


def _value(name: str) -> str:
    return os.environ.get(name) or _DEFAULTS[name]


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


def without_effect(environment: Mapping[str, str]) -> str:
    """What to say about variables that are set to other values than their defaults and have no effect; empty if there
    are none."""
    ignored = [each for each in VARIABLES if not each.is_used]
    by_reason: dict[str, list[str]] = {}
    for each in ignored:
        if environment.get(each.name, "") not in ("", each.default):
            by_reason.setdefault(each.effect, []).append(f"{each.name}={environment[each.name]}")
    return "; ".join(
        f"{', '.join(found)} {'has' if len(found) == 1 else 'have'} no effect: {reason}"
        for reason, found in by_reason.items()
    )
