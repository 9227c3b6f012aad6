"""Runs a training function again and again, each time with the ranks that there are, until it returns."""

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import fusedcomm.horovod.elastic.files as files
import fusedcomm.horovod.membership as membership
import fusedcomm.horovod.state as state_of_job
from fusedcomm.horovod.elastic.state import State
from fusedcomm.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from fusedcomm.horovod.ops import barrier
from fusedcomm.log import LOGGER


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a training function whose first argument is a State:

    1. The state of the rank that has committed most is given to all ranks.
    2. The function is called.
    3. If it raises HorovodInternalError, a rank was lost: the committed state is restored from memory. If it raises
       HostsUpdatedInterrupt, the state stays as it is.
    4. The ranks meet again, as many as there are, and state.on_reset() is called. Then from 1.

    Under torchrun a lost rank's error is raised: torchrun restarts every rank, and they go on from the commit's file if
    FUSEDCOMM_HOROVOD_STATE names a folder.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        state.read_file()
        skip_sync, is_reset = False, False
        while True:
            try:
                if is_reset:
                    _meet_again(state)
                if not skip_sync:
                    state.sync()
                result = func(state, *args, **kwargs)
            except HorovodInternalError as error:
                if is_restarted_as_a_whole():
                    raise
                seen = str(error).removeprefix("fusedcomm: ").rstrip(".")
                LOGGER.warning("fusedcomm.horovod: %s. Going on from the last commit", seen)
                state_of_job.shutdown()
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                _wait_for_others()
                state_of_job.shutdown()
                skip_sync = interrupt.skip_sync
            else:
                files.remove()
                _wait_for_others()
                return result
            is_reset = True
            membership.change()

    return wrapper


def is_restarted_as_a_whole() -> bool:
    """Whether torchrun has started this process: it ends all processes when one is lost, and starts them again, so
    there is nobody to meet."""
    return "TORCHELASTIC_RUN_ID" in os.environ and not membership.is_elastic()


def _wait_for_others() -> None:
    """A rank that leaves before the others have done their last operation would look lost to them."""
    if membership.is_elastic():
        with contextlib.suppress(HorovodInternalError):  # one is lost, which the next view says
            barrier()


def _meet_again(state: State) -> None:
    """Raises HorovodInternalError if another rank of an elastic job was lost meanwhile; what hvd.init() raises if the
    job is not elastic, so that its launcher restarts it."""
    try:
        state_of_job.init()
    except (TimeoutError, dist.DistError, OSError, RuntimeError) as error:
        if not membership.is_elastic():
            raise
        raise HorovodInternalError(f"cannot meet the other ranks: {error}") from error
    state.on_reset()
