"""The merges of LocalSteps: messages of fragments begin, arrive, and change the merged state and the parameters."""

from collections.abc import Callable

import torch

from fusedcomm.local_steps import rules
from fusedcomm.local_steps.fragments import Fragment
from fusedcomm.local_steps.messages import Message, Messages
from fusedcomm.local_steps.progress import Progress


class Merges:
    """Begins merges and ends them. The methods are for the thread of the optimizer's steps.

    Args:
        check: raises RuntimeError if a fragment cannot be merged any more.
        before, arrive: called with a message's number before it is sent, and with a message to wait for it: where ranks
            come and go, what else is to be done.
    """

    def __init__(
        self,
        progress: Progress,
        messages: Messages,
        check: Callable[[Fragment], None],
        before: Callable[[int], None],
        arrive: Callable[[Message], None],
    ) -> None:
        self.progress, self.messages = progress, messages
        self._check, self._before, self._await = check, before, arrive

    def after_step(self) -> None:
        """The optimizer has made a step: ends what is due, and begins what has its turn."""
        self._end_due()
        if self.progress.is_turn:
            self._take_turn()

    @torch.no_grad()
    def take_first_turn(self) -> None:
        """Takes part in what the others are doing, on a rank that has joined and has done nothing yet."""
        if self.progress.rest:
            self._merge_rest(0.0)
        else:
            self._take_turn(weight=0.0)

    def drain(self) -> None:
        """Ends all merges under way."""
        while self.progress.under_way:
            self._end(self.progress.under_way[0])

    def finish(self) -> None:
        """Ends all merges and makes the parameters equal on every rank."""
        progress = self.progress
        self.drain()
        all_finish = False
        while not all_finish:  # a message tells every rank alike, so all leave after the same one
            self._begin(progress.next_fragment, is_finishing=True)
            progress.turns += 1
            all_finish = self._end(progress.under_way[-1])
        progress.rest = [fragment.index for fragment in progress.fragments]
        self._merge_rest()
        progress.finished_at = progress.num_messages

    def read_all(self) -> None:
        """Waits for all messages under way, and merges nothing."""
        for message in self.progress.under_way:
            self._arrive(message)

    def _take_turn(self, weight: float | None = None) -> None:
        fragment = self.progress.next_fragment
        while any(message.fragment is fragment for message in self.progress.under_way):
            self._end(self.progress.under_way[0])  # a window was shorter than the delay; the message has arrived
        self._begin(fragment, weight=weight)
        self.progress.turns += 1
        self._end_due()

    def _end_due(self) -> None:
        under_way = self.progress.under_way
        while under_way and under_way[0].due <= self.progress.steps:
            self._end(under_way[0])

    def _merge_rest(self, weight: float | None = None) -> None:
        """The last messages of finish(). weight: None: as `weights` has it."""
        progress = self.progress
        while progress.rest:
            self._begin(progress.fragments[progress.rest[0]], weight=weight, is_finishing=True)
            self._end(progress.under_way[-1], is_final=True)
            del progress.rest[0]

    def _begin(self, fragment: Fragment, *, weight: float | None = None, is_finishing: bool = False) -> None:
        """Takes a fragment's snapshot, and hands its message to the engine. weight: None: as `weights` has it."""
        progress, index = self.progress, fragment.index
        self._check(fragment)
        self._before(progress.num_messages)
        own = fragment.read().sub_(fragment.anchor)
        message = Message(
            fragment=fragment,
            merge=progress.merges[index],
            began=progress.steps,
            due=progress.steps + progress.schedule.delay,
            own=own,
            mean=own,
            checksum=fragment.checksum(),
            number=progress.num_messages,
            weight=progress.take_weight(index) if weight is None else weight,
            is_finishing=is_finishing,
        )
        self.messages.send(message)
        progress.merges[index] += 1
        progress.num_messages += 1
        progress.under_way.append(message)

    def _end(self, message: Message, is_final: bool = False) -> bool:
        """Waits for a message, and merges. Returns whether all ranks were in finish() when they sent theirs.

        is_final: the parameters become the merged state, whatever the rule.
        """
        fragment, progress = message.fragment, self.progress
        self._check(fragment)
        self._arrive(message)
        progress.under_way.remove(message)
        # The last merges average: an outer step would go on by momentum alone, and no later merge corrects it.
        moved = rules.move(fragment, message.mean, None if message.all_finish else progress.outer)
        if is_final or message.began == progress.steps:
            # With no step since the snapshot, z is y: the corrected rule gives the merged state itself.
            fragment.write(fragment.anchor)
        else:
            fragment.write(rules.corrected(fragment.read(), moved, message.own))
        return message.all_finish

    def _arrive(self, message: Message) -> None:
        if not message.is_read:
            self._await(message)
            self.progress.spread = self.messages.read(message)
