"""LocalSteps on ranks that come and go.

a rank is lost    the message under way ends with an error; it is taken from a rank that has its mean, or is sent again
a rank joins      before a message: the merge under way is ended first, and it gets the merged state and a member's
                  buffers and optimizer; it takes part in that message with no weight
"""

import collections
import time
from typing import Any

import torch
from torch import nn

from fusedcomm.config import Config, LocalOptions, combinations
from fusedcomm.local_steps import shards
from fusedcomm.local_steps.merges import Merges
from fusedcomm.local_steps.messages import Message
from fusedcomm.local_steps.progress import Progress
from fusedcomm.members.members import INSTALL_TIMEOUT_S, Members
from fusedcomm.members.plane.view import Decision
from fusedcomm.members.training.recovery import UnexplainedSession, on_one_level
from fusedcomm.members.training.views import MAX_FAILURES, Views
from fusedcomm.ranks import agreement, objects
from fusedcomm.ranks.own_group import OwnGroup

_MEAN = "mean of a merge"
_MERGED, _BUFFERS = "merged state", "buffers"


def fitting(members: Members, config: Config, model: nn.Module, group: object) -> Config:
    """`config` for ranks that come and go. Raises ValueError where something needs the same ranks all the time."""
    if not isinstance(members, Members):
        raise ValueError(f"members={members!r} is no fusedcomm.Members: make one, or leave it out")
    given = {
        "members": members,
        "DDP or FSDP2 inside a host": shards.has_mates(model),
        "process_group": group,
        "microbatches": members.microbatches,
        "parameters on an accelerator": next(model.parameters()).device.type != "cpu",
    }
    combinations.refuse("LocalSteps", given)
    return on_one_level(config)


class Merging(Views):
    """The sessions of a LocalSteps. A step is a message; it has ended on a rank that has its mean.

    Args:
        model: its buffers are given to ranks that join.
        problem: what keeps this rank from taking part.
    """

    _merges: Merges
    """Set by start(); nothing is under way before."""

    def __init__(
        self,
        progress: Progress,
        model: nn.Module,
        members: Members,
        config: Config,
        device: torch.device,
        record: dict[str, object],
        problem: Exception | None,
    ) -> None:
        super().__init__(members, device)
        self._of, self._model, self._config = progress, model, config
        self._also_agree = {**record, "members": {"min_ranks": members.min_ranks}}
        self._is_stopped = False
        # Another rank may lack the last one: it has sent it, and not the next.
        self._means: collections.deque[tuple[int, tuple[torch.Tensor, ...]]] = collections.deque(maxlen=2)
        members.plane.hooks.handlers[_MEAN] = self._serve_mean
        if members.joins is None:
            self._begin(problem)
        elif problem is not None:
            raise problem
        else:
            self._join(members.joins)

    def start(self, merges: Merges) -> None:
        """Call it when the merges over the first session are made. Gives this rank the state that it begins with."""
        self._merges = merges
        if self.members.joins is None:
            self._take_first_anchor()
        else:
            self._take_state()

    # ---- Views

    def _record(self) -> dict[str, object]:
        return {**agreement.versions(), "config": self._config.record(), **self._also_agree}

    def _make_session(self, group: OwnGroup, problem: Exception | None) -> Any:
        agreed = self._also_agree
        return UnexplainedSession(
            self._config, group, None, LocalOptions(), self.device, also_agree=agreed, problem=problem
        )

    def _said(self) -> dict[str, object]:
        return {"counts": self._of.counts(), "synchronizer step": self.session.synchronizer.step}

    def _own_state(self, name: str) -> Any:
        if name == _MERGED:
            return {"anchor": self._of.state.anchor}
        return dict(self._model.named_buffers()) if name == _BUFFERS else None

    def _is_common(self, name: str) -> bool:
        return name == _MERGED

    def _install(self, decision: Decision, began: float) -> bool:
        old = self.session
        if not super()._install(decision, began):
            return False
        with self._lock:
            self._is_stopped = self.members.plane.barrier.is_superseded(decision.view.number)
        if old is not None:
            self.session.synchronizer.take_over(old.synchronizer)
            self._merges.messages.use(self.session)
        return True

    def stop_step(self) -> None:
        with self._lock:
            self._is_stopped = True
        super().stop_step()

    def receive(self, name: str, carried: Any) -> None:
        super().receive(name, carried)
        if self.members.joins is not None and not self._missing:
            self._merges.take_first_turn()

    # ---- called by the control thread

    def _serve_mean(self, header: dict) -> tuple[dict, list[memoryview]]:
        number = int(header["number"])
        with self._lock:
            found = next((tensors for sent, tensors in self._means if sent == number), None)
        if found is None:
            raise LookupError(f"the mean of message {number} is not kept: this member is at message {self.step}")
        return {}, objects.ranges(found, 0, objects.nbytes_of(found))

    # ---- called on the main thread

    @torch.no_grad()
    def _take_first_anchor(self) -> None:
        """Takes the first rank's parameters, in a founder."""

        def take(found: list) -> None:
            self._of.state.anchor.copy_(found[0]["anchor"])

        self._begin_equal([_MERGED], take, lambda decision: self.recover("", decision))

    @torch.no_grad()
    def _take_state(self) -> None:
        """Takes the merged state, in a rank that joins; its parameters begin as this state."""
        said, value = self._received(_MERGED)
        self._of.state.anchor.copy_(value["anchor"])
        self._of.state.write(self._of.state.anchor)
        buffers = self._received(_BUFFERS)[1]
        for name, buffer in self._model.named_buffers():
            buffer.copy_(buffers[name])
        self._of.go_on(said["counts"], num_messages=self.step)
        self.session.synchronizer.step = said["synchronizer step"]
        self._missing = set(said["carries"])
        if not self._missing:
            self._merges.take_first_turn()

    def look(self) -> None:
        """Goes over to the next view if the members have left this one. Call it after each step of the optimizer."""
        self._refuse_missing()
        if self._is_stopped:
            self.recover("")

    def before(self, number: int) -> None:
        """Installs the view that begins with this message, if one does."""
        self._refuse_missing()
        while True:
            decision = self.members.plane.boundary(number)
            if decision is None:
                if self._compare_places():
                    return
                continue
            if self._is_stopped:
                self.recover("", decision)
                continue
            began = time.monotonic()
            self._merges.drain()  # which may lead to a later view
            is_new = decision.view.number > self.members.view
            if is_new:
                self._install_one(decision, began)
            self._tell()
            if is_new:
                # The state that joiners take must not change.
                self.members.wait_for_others(INSTALL_TIMEOUT_S, in_view=True)

    def arrive(self, message: Message) -> None:
        """Waits for the mean of a message, whatever happens to the ranks."""
        if message.future is None:
            return
        for _ in range(MAX_FAILURES):
            failure = ""
            try:
                self._merges.messages.wait(message)
            except RuntimeError as error:
                failure = str(error)
            if not failure and self.members.plane.barrier.finish_step(message.number):
                message.future = None
                self._end_step(message)
                return
            self.recover(failure)
            if message.future is None:  # another rank had the mean
                return
        with self._going_on():
            raise RuntimeError(f"fusedcomm: message {message.number} failed {MAX_FAILURES} times, last with: {failure}")

    def recover(self, failure: str, first: Decision | None = None) -> None:
        """Goes over to the next view, with the message under way. first: the decision on it, if it is known."""
        began = time.monotonic()
        with self._going_on():
            for _ in range(MAX_FAILURES):
                decision, first = first or self.members.plane.recover(), None
                if self._fetch(decision) and self._install(decision, began):
                    message = self._of.under_way
                    if message is not None and message.future is not None:
                        self._merges.messages.send(message)
                    return self._tell()
            raise RuntimeError(f"fusedcomm: {MAX_FAILURES} changes of ranks failed one after another: {failure}")

    def _fetch(self, decision: Decision) -> bool:
        """Takes the mean that others have from them. False if they are lost."""
        message, newest = self._of.under_way, max(decision.finished.values(), default=-1)
        if message is None or message.future is None or message.number > newest:
            return True
        found = self._ask(self._ahead(decision, message.number), _MEAN, {"number": message.number})
        if found is None or not self.members.plane.barrier.finish_step(message.number, decision.view.number):
            return False
        self._merges.messages.fill(message, found[1])
        self._end_step(message)
        return True

    def _end_step(self, message: Message) -> None:
        with self._lock:
            self._means.append((message.number, (message.control, message.mean)))
            self.step = message.number + 1
