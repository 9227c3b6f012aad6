"""Runs a training function again and again, each time with the ranks that there are, until it returns."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

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

    Only the ranks of `fusedcomm run --elastic` meet again: elsewhere, as under torchrun, a lost rank's error is raised.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        is_reset = False
        while True:
            try:
                if is_reset:
                    _meet_again(state)
                state.sync()
                result = func(state, *args, **kwargs)
            except HorovodInternalError as error:
                if not membership.is_elastic():
                    raise
                seen = str(error).removeprefix("fusedcomm: ").rstrip(".")
                LOGGER.warning("fusedcomm.horovod: %s. Going on from the last commit", seen)
                state_of_job.shutdown()
                state.restore()
            except HostsUpdatedInterrupt:
                _wait_for_others()
                state_of_job.shutdown()
            else:
                _wait_for_others()
                return result
            is_reset = True
            membership.change()

    return wrapper


def _wait_for_others() -> None:
    """A rank that leaves before the others have done their last operation would look lost to them."""
    if membership.is_elastic():
        with contextlib.suppress(HorovodInternalError):  # one is lost, which the next view says
            barrier()


def _meet_again(state: State) -> None:
    """Raises HorovodInternalError if another rank was lost meanwhile."""
    try:
        state_of_job.init_again()
    except (TimeoutError, dist.DistError, OSError, RuntimeError) as error:
        raise HorovodInternalError(f"cannot meet the other ranks: {error}") from error
    state.on_reset()
