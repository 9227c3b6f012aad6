"""The merges of LocalSteps: messages begin, arrive, and change the merged state and the parameters."""

from collections.abc import Callable

import torch

from fusedcomm.local_steps.arguments import Schedule
from fusedcomm.local_steps.merged_state import MergedState
from fusedcomm.local_steps.messages import Message, Messages, Spread
from fusedcomm.local_steps.windows import Window


class Merges:
    """Begins merges and ends them, one at a time. The methods are for the thread of the optimizer's steps.

    Args:
        window: where `every` is a time.
        check: raises RuntimeError if the parameters cannot be merged any more.

    Attributes:
        steps: the optimizer's steps.
        num_begun: messages that were sent, those before a loaded state included: the next message's number.
        finished_at: steps when finish() ended last: all ranks had equal parameters then, and those are the merged
            state.
        snapshot: the steps at the last snapshot.
        under_way: the message under way; None if there is none.
        spread: how far the ranks were apart at the last merge; None before the first.
    """

    def __init__(
        self,
        schedule: Schedule,
        state: MergedState,
        messages: Messages,
        window: Window | None,
        check: Callable[[], None],
    ) -> None:
        self.schedule, self.state, self.messages, self.window = schedule, state, messages, window
        self._check = check
        self.steps = self.num_begun = self.finished_at = self.snapshot = 0
        self.under_way: Message | None = None
        self.spread: Spread | None = None

    def after_step(self) -> None:
        """The optimizer has made a step: ends the merge that is due, and begins one that has its turn."""
        self.steps += 1
        self._end_due()
        if self._is_turn:
            self.drain()  # a window was shorter than the delay; the message has arrived
            self._begin()
            self._end_due()

    def drain(self) -> None:
        """Ends the merge under way, if there is one."""
        if self.under_way is not None:
            self._end(self.under_way)

    def finish(self) -> None:
        """Ends all merges: then the parameters are the merged state, equal on every rank."""
        self.drain()
        all_finish = False
        while not all_finish:  # a message tells every rank alike, so all leave after the same one
            all_finish = self._end(self._begin(is_finishing=True))
        self.state.anchor.copy_(self.state.read())  # parameters in 16 bits have rounded it
        self.finished_at = self.steps

    @property
    def _is_turn(self) -> bool:
        """Whether a snapshot is taken after this step."""
        if self.window is not None:
            return self.window.is_over()
        return self.schedule.step_of(self.num_begun) <= self.steps

    def _end_due(self) -> None:
        if self.under_way is not None and self.under_way.due <= self.steps:
            self._end(self.under_way)

    def _begin(self, *, is_finishing: bool = False) -> Message:
        """Takes a snapshot, and hands its message to the engine."""
        self._check()
        own = self.state.read().sub_(self.state.anchor)
        message = Message(
            began=self.steps,
            due=self.steps + self.schedule.delay,
            own=own,
            mean=own,
            checksum=self.state.checksum(),
            number=self.num_begun,
            weight=self._take_weight(),
            is_finishing=is_finishing,
        )
        self.messages.send(message)
        self.num_begun += 1
        self.under_way = message
        return message

    def _take_weight(self) -> float:
        """This rank's weight in a merge whose snapshot is taken: in windows of time its steps since the last one, in a
        unit that all ranks share."""
        own, self.snapshot = self.steps - self.snapshot, self.steps
        return 1.0 if self.schedule.seconds is None else own / self.schedule.seconds

    def _end(self, message: Message) -> bool:
        """Waits for a message, and merges. Returns whether all ranks were in finish() when they sent theirs.

        The parameters y of the snapshot have become z, and m̄ is the ranks' mean: they are z + (m̄ − y) then.
        """
        state = self.state
        self._check()
        self.messages.wait(message)
        self.spread = self.messages.read(message)
        self.under_way = None
        state.anchor.add_(message.mean)
        if message.began == self.steps:
            state.write(state.anchor)  # z is y
        else:
            # `mean` and `own` count from the merged state before. New memory takes as long as the sums.
            moved = torch.sub(message.mean, message.own, out=message.own)
            state.write(state.read().add_(moved))
        return message.all_finish
