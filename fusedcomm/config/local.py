"""What may differ from rank to rank, and what is chosen where it is left open."""

import dataclasses
import os

from fusedcomm import env
from fusedcomm.config import check
from fusedcomm.native import _C

MAX_CODEC_THREADS = 4
"""By default."""
MOST_CODEC_THREADS = 256
"""That can be asked for."""

STALL_AFTER_S = 60.0
"""By default a bucket that has been under way for so long without moving is a stall."""


@dataclasses.dataclass(frozen=True)
class LocalOptions:
    """What may differ from rank to rank, since no byte depends on it.

    Args:
        isa: cpu only: instruction set of the codec; None: the environment, else the best this machine has.
        codec_threads: cpu only: threads that share a codec stage; None: the environment, else by the host's cores.
        sm_limit: cuda only: most multiprocessors that one kernel of ours uses. None: an eighth of the GPU's, and all of
            them for the last bucket of a backward pass, beside which nothing is left to compute.
        stall_after: seconds. If a bucket is under way and nothing has moved for so long, the ranks are asked what they
            have under way, and each that waits warns once, naming the slow or missing rank, the step, the bucket and
            the stage; training goes on. So it is if one moves, but has been the oldest under way for so long, as on a
            link that crawls, and again when one takes twice as long. None: 60, or a third of the group's timeout if
            that is less. A failure is explained in the same way, in the error's text.
    """

    isa: str | None = None
    codec_threads: int | None = None
    sm_limit: int | None = None
    stall_after: float | None = None

    def __post_init__(self) -> None:
        # What this rank alone has wrong is refused when it attaches, so that the other ranks are told.
        for name in ("isa", "codec_threads"):
            value = getattr(self, name)
            if value is not None and self.sm_limit is not None:
                raise ValueError(
                    f"{name}={value!r} is for gradients on cpu and sm_limit={self.sm_limit!r} for gradients on cuda: "
                    "leave one of them out"
                )


def local_options(local: LocalOptions | None) -> LocalOptions:
    """What a front end was given as `local`; ValueError for something else."""
    if local is None:
        return LocalOptions()
    check.kind("local", local, LocalOptions)
    return local


def choose_isa(isa: str | None) -> str:
    """The argument, else the environment. Raises ValueError for what this machine cannot run."""
    chosen = env.isa() if isa is None else isa
    check.choice("isa", chosen, ("auto", *_C.available_isas()))
    return chosen


def choose_codec_threads(codec_threads: int | None, world_size: int) -> int:
    """The argument, else the environment, else half of this rank's share of the cores, from 1 to 4."""
    if codec_threads is None:
        codec_threads = env.codec_threads()
    if codec_threads is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        local_ranks = env.local_world_size() or world_size
        return max(1, min(MAX_CODEC_THREADS, cores // (2 * local_ranks)))
    possible = f"a whole number from 1 to {MOST_CODEC_THREADS}"
    check.whole("codec_threads", codec_threads, 1, MOST_CODEC_THREADS, possible)
    return codec_threads


def choose_stall_after(stall_after: float | None, timeout_s: float) -> float:
    """The argument, else STALL_AFTER_S, or less, so that a report comes before a group's timeout of `timeout_s`."""
    if stall_after is None:
        return min(STALL_AFTER_S, timeout_s / 3)
    check.positive("stall_after", stall_after, "a number of seconds greater than 0")
    return float(stall_after)
