"""How far a rank's merges are: the state that all parts of LocalSteps share. Merges alone change it."""

import dataclasses

from fusedcomm.local_steps.arguments import Schedule
from fusedcomm.local_steps.merged_state import MergedState
from fusedcomm.local_steps.messages import Message, Spread
from fusedcomm.local_steps.windows import Window


@dataclasses.dataclass
class Progress:
    """What is merged, and how far that is."""

    schedule: Schedule
    state: MergedState
    window: Window | None
    """Where `every` is a time."""
    steps: int = 0
    """The optimizer's steps."""
    merges: int = 0
    """Messages that were sent, those before a loaded state included: the next message's number."""
    finished_at: int = 0
    """Steps when finish() ended last: all ranks had equal parameters then, and those are the merged state."""
    snapshot: int = 0
    """The steps at the last snapshot."""
    under_way: Message | None = None
    spread: Spread | None = None
    """How far the ranks were apart at the last merge."""

    @property
    def is_turn(self) -> bool:
        """Whether a snapshot is taken after this step. Call it once after each step."""
        if self.window is not None:
            return self.window.is_over()
        return self.schedule.step_of(self.merges) <= self.steps

    def take_weight(self) -> float:
        """This rank's weight in a merge whose snapshot is taken: in windows of time its steps since the last one, in a
        unit that all ranks share."""
        own, self.snapshot = self.steps - self.snapshot, self.steps
        return 1.0 if self.schedule.seconds is None else own / self.schedule.seconds
