"""How far a rank's merges are: the state that all parts of LocalSteps share. Merges alone change it."""

import dataclasses
from typing import Any

from fusedcomm.local_steps.arguments import Schedule
from fusedcomm.local_steps.fragments import Fragment
from fusedcomm.local_steps.messages import Message, Spread
from fusedcomm.local_steps.rules import Outer
from fusedcomm.local_steps.windows import Window


@dataclasses.dataclass
class Progress:
    """What is merged, and how far that is."""

    schedule: Schedule
    fragments: list[Fragment]
    outer: Outer | None
    window: Window | None
    """Where `every` is a time."""
    steps: int = 0
    """The optimizer's steps."""
    turns: int = 0
    """Turns that fragments have had."""
    num_messages: int = 0
    finished_at: int = 0
    """Messages when finish() ended last."""
    merges: list[int] = dataclasses.field(default_factory=list)
    """How often each fragment was sent."""
    snapshots: list[int] = dataclasses.field(default_factory=list)
    """The steps at each fragment's last snapshot; before the first in a rank that has joined, those at which it did."""
    under_way: list[Message] = dataclasses.field(default_factory=list)
    rest: list[int] = dataclasses.field(default_factory=list)
    """The fragments of the last messages of finish() that are still to be sent."""
    spread: Spread | None = None
    """How far the ranks were apart at the last merge."""

    def __post_init__(self) -> None:
        self.merges, self.snapshots = [0] * self.schedule.fragments, [0] * self.schedule.fragments

    @property
    def next_fragment(self) -> Fragment:
        """The one whose turn it is."""
        return self.fragments[self.schedule.fragment_of(self.turns)]

    @property
    def is_turn(self) -> bool:
        """Whether the next fragment's turn is after this step. Call it once after each step."""
        if self.window is not None:
            return self.window.is_over()
        return self.schedule.step_of(self.turns) <= self.steps

    def take_weight(self, index: int) -> float:
        """This rank's weight in a merge whose snapshot is taken, of the fragment of that index."""
        own, self.snapshots[index] = self.steps - self.snapshots[index], self.steps
        return 1.0 if self.schedule.weights is None else own / self.schedule.unit

    def counts(self) -> dict[str, Any]:
        """What a rank that joins goes on with, beside tensors."""
        return {"steps": self.steps, "turns": self.turns, "merges": list(self.merges), "rest": list(self.rest)}

    def go_on(self, counts: dict[str, Any], num_messages: int) -> None:
        """Goes on with the counts() of another rank, after so many messages."""
        self.steps, self.turns = counts["steps"], counts["turns"]
        self.merges, self.rest = list(counts["merges"]), list(counts["rest"])
        self.num_messages, self.snapshots = num_messages, [self.steps] * self.schedule.fragments
