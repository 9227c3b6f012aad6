"""The options that may differ from rank to rank, and the values chosen for those that are left open."""

import dataclasses
import os

from fusedcomm import env
from fusedcomm.config import check
from fusedcomm.native import _C

MAX_CODEC_THREADS = 4
"""Most threads of a codec stage by default."""
MOST_CODEC_THREADS = 256
"""Most threads of a codec stage that a user can ask for."""

LEAST_STALL_AFTER_S, MOST_STALL_AFTER_S = 0.1, 1e9
"""Seconds that a user can ask for. On most networks a bucket takes longer than the least, so that a shorter time would
report every bucket. The most are 31 years, and fit into the engine's clock."""


@dataclasses.dataclass(frozen=True)
class LocalOptions:
    """Options that may differ from rank to rank, because no byte depends on them.

    Args:
        isa: cpu only: the instruction set of the codec. None: FUSEDCOMM_ISA, else the best that this machine has.
        codec_threads: cpu only: threads that share a codec stage. None: FUSEDCOMM_CODEC_THREADS, else half of this
            rank's share of the host's cores, from 1 to 4.
        stall_after: seconds. If a bucket is in flight and nothing has moved for this long, the ranks are asked what
            they have in flight. Each rank that waits then warns once and names the slow or missing rank, the step, the
            bucket and the stage. Training goes on. From 0.1 to 1e9. None: 60, or a third of the group's timeout if that
            is less. A failure is explained in the same way, in the error's text.

    Raises:
        ValueError: a number is out of range.
    """

    isa: str | None = None
    codec_threads: int | None = None
    stall_after: float | None = None

    def __post_init__(self) -> None:
        # `isa` depends on the machine, and is checked when the rank attaches.
        if self.codec_threads is not None:
            _check_codec_threads("codec_threads", self.codec_threads)
        if self.stall_after is not None:
            possible = "a number of seconds from 0.1 to 1e9"
            check.number("stall_after", self.stall_after, LEAST_STALL_AFTER_S, MOST_STALL_AFTER_S, possible)


def local_options(local: LocalOptions | None) -> LocalOptions:
    """`local` as a front end is called with it, or the defaults. Raises ValueError if it is not a LocalOptions."""
    if local is None:
        return LocalOptions()
    check.kind("local", local, LocalOptions)
    return local


def choose_isa(isa: str | None) -> str:
    """The argument, else FUSEDCOMM_ISA, else "auto". Raises ValueError for a set that this machine cannot run."""
    option, chosen = (env.ISA, env.isa()) if isa is None else ("isa", isa)
    check.choice(option, chosen, ("auto", *_C.available_isas()))
    return chosen


def choose_codec_threads(codec_threads: int | None, world_size: int) -> int:
    """The argument, else FUSEDCOMM_CODEC_THREADS, else half of this rank's share of the cores, from 1 to 4.

    Raises ValueError if the variable's number is out of range.
    """
    if codec_threads is not None:
        return codec_threads
    from_env = env.codec_threads()
    if from_env is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        local_ranks = env.local_world_size() or world_size
        return max(1, min(MAX_CODEC_THREADS, cores // (2 * local_ranks)))
    _check_codec_threads(env.CODEC_THREADS, from_env)
    return from_env


def _check_codec_threads(option: str, value: object) -> None:
    check.whole(option, value, 1, MOST_CODEC_THREADS, f"a whole number from 1 to {MOST_CODEC_THREADS}")
