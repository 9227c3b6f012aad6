"""Which ranks have come to a merge, and who stands in for one that is late."""

import datetime
import functools
import itertools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from fusedcomm.config import check
from fusedcomm.local_steps import shards
from fusedcomm.local_steps.arguments import Schedule
from fusedcomm.local_steps.messages import Pending

if TYPE_CHECKING:
    from fusedcomm.local_steps.local_steps import LocalSteps

MISSED = -1
"""The step in which a message began that this rank has missed."""
_LOOKS, _MOST_S = 10, 1.0
"""Looks for the others within the timeout, and the most seconds between two: each asks the store's host."""
_KEPT = 64
"""Messages whose count of ranks stays in the store."""

Method = TypeVar("Method", bound=Callable[..., Any])


def alone(method: Method) -> Method:
    """A method of LocalSteps that does not run at the same time as another one, and without autograd."""

    @functools.wraps(method)
    def run(self: "LocalSteps", *args: Any, **kwargs: Any) -> Any:
        with self.lock, torch.no_grad():
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]


def check_quorum(
    quorum: int | None, timeout: float | None, num_ranks: int, schedule: Schedule, members: object, model: nn.Module
) -> None:
    """Raises ValueError or TypeError for a quorum that cannot be."""
    if quorum is None and timeout is None:
        return
    if quorum is None or timeout is None:
        raise ValueError(
            f"quorum={quorum!r} and timeout={timeout!r} belong together: how many ranks must have come to a merge, and "
            "how many seconds later the others are not waited for"
        )
    check.whole("quorum", quorum, 1, max(num_ranks - 1, 1), "a number of ranks, from 1 to all but one")
    check.positive("timeout", timeout, "a number of seconds greater than 0")
    if members is not None or schedule.state == "average":
        raise ValueError(
            "quorum=… stands in for a rank that is late in sums of differences only: leave out state='average' and "
            "members=, or the quorum"
        )
    if shards.has_mates(model):
        raise ValueError(
            "quorum=… may leave one rank of a host out of a merge, and DDP and FSDP2 need merges of all of them: give "
            "LocalSteps the plain module, or leave out the quorum"
        )


class StandIn:
    """A thread that sends a message without weight for this rank, when enough others wait for it.

    What the rank has done stays its own, and is in its next message.

    Args:
        store: a store that only this object's ranks use for this.
        quorum, timeout_s: `timeout_s` seconds after `quorum` ranks have sent a message, this rank sends its own.
    """

    def __init__(self, of: "LocalSteps", store: dist.Store, quorum: int, timeout_s: float) -> None:
        self._of, self._store, self._quorum = of, store, quorum
        self._timeout_s, self._look_s = timeout_s, min(timeout_s / _LOOKS, _MOST_S)
        self._ended = threading.Event()
        self.failure: Exception | None = None
        store.set_timeout(datetime.timedelta(seconds=60))
        threading.Thread(target=self._run, name="fc-local-steps", daemon=True).start()

    def come(self, message: int) -> None:
        """This rank sends the message of that number."""
        if self._store.add(str(message), 1) == 1 and message >= _KEPT:
            self._store.delete_key(str(message - _KEPT))

    def end(self) -> None:
        """Ends the thread."""
        self._ended.set()

    def fold(self, under_way: list[Pending]) -> None:
        """Makes one of the merges that this rank has missed one after another, so that their memory is bounded. Not of
        blends, which are not sums, and of messages with different blocks."""
        missed = [each for each in under_way if each.began == MISSED and each.settled is not None]
        for first, second in itertools.pairwise(missed):
            if first.fragment is second.fragment and first.group == second.group and not self._of.schedule.alpha:
                assert first.settled is not None and second.settled is not None
                second.settled = (second.settled[0], first.settled[1] + second.settled[1])
                under_way.remove(first)

    def _run(self) -> None:
        message, since = -1, None
        while not self._ended.wait(self._look_s):
            if self._of.num_messages != message:
                message, since = self._of.num_messages, None
            try:
                has_quorum = self._store.add(str(message), 0) >= self._quorum
            except RuntimeError:
                return  # the store has gone, and the job with it
            if has_quorum:
                since = since or time.monotonic()
                if time.monotonic() - since >= self._timeout_s:
                    try:
                        self._of.stand_in(message)
                    except Exception as error:  # raised on the main thread, by its next step
                        self.failure = error
                        return
