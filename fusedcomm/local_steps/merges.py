"""The merges of LocalSteps: messages begin, arrive, and change the merged state and the parameters."""

from collections.abc import Callable

import torch

from fusedcomm.local_steps.messages import Message, Messages
from fusedcomm.local_steps.progress import Progress


class Merges:
    """Begins merges and ends them, one at a time. The methods are for the thread of the optimizer's steps.

    Args:
        check: raises RuntimeError if the parameters cannot be merged any more.
    """

    def __init__(self, progress: Progress, messages: Messages, check: Callable[[], None]) -> None:
        self.progress, self.messages, self._check = progress, messages, check

    def after_step(self) -> None:
        """The optimizer has made a step: ends the merge that is due, and begins one that has its turn."""
        self._end_due()
        if self.progress.is_turn:
            self._take_turn()

    def drain(self) -> None:
        """Ends the merge under way, if there is one."""
        if self.progress.under_way is not None:
            self._end(self.progress.under_way)

    def finish(self) -> None:
        """Ends all merges: then the parameters are the merged state, equal on every rank."""
        self.drain()
        all_finish = False
        while not all_finish:  # a message tells every rank alike, so all leave after the same one
            all_finish = self._end(self._begin(is_finishing=True))
        state = self.progress.state
        state.anchor.copy_(state.read())  # parameters in 16 bits have rounded it
        self.progress.finished_at = self.progress.steps

    def _take_turn(self) -> None:
        self.drain()  # a window was shorter than the delay; the message has arrived
        self._begin()
        self._end_due()

    def _end_due(self) -> None:
        under_way = self.progress.under_way
        if under_way is not None and under_way.due <= self.progress.steps:
            self._end(under_way)

    def _begin(self, *, is_finishing: bool = False) -> Message:
        """Takes a snapshot, and hands its message to the engine."""
        progress = self.progress
        self._check()
        own = progress.state.read().sub_(progress.state.anchor)
        message = Message(
            began=progress.steps,
            due=progress.steps + progress.schedule.delay,
            own=own,
            mean=own,
            checksum=progress.state.checksum(),
            number=progress.merges,
            weight=progress.take_weight(),
            is_finishing=is_finishing,
        )
        self.messages.send(message)
        progress.merges += 1
        progress.under_way = message
        return message

    def _end(self, message: Message) -> bool:
        """Waits for a message, and merges. Returns whether all ranks were in finish() when they sent theirs.

        The parameters y of the snapshot have become z, and m̄ is the ranks' mean: they are z + (m̄ − y) then.
        """
        progress, state = self.progress, self.progress.state
        self._check()
        self.messages.wait(message)
        progress.spread = self.messages.read(message)
        progress.under_way = None
        state.anchor.add_(message.mean)
        if message.began == progress.steps:
            state.write(state.anchor)  # z is y
        else:
            # `mean` and `own` count from the merged state before. New memory takes as long as the sums.
            moved = torch.sub(message.mean, message.own, out=message.own)
            state.write(state.read().add_(moved))
        return message.all_finish
