"""What the rules of agreement have the process do."""

from collections.abc import Callable
from typing import Protocol

from fusedcomm.members.plane.view import Decision


class Effects(Protocol):
    """What the rules need of the process. All calls are the control thread's."""

    def send(self, uid: str, message: dict) -> None: ...
    def broadcast(self, message: dict) -> None: ...
    def stop_step(self, then: Callable[[], None]) -> None:
        """Stops the step under way, and calls then() later."""

    def committed(self, decision: Decision) -> None:
        """The members are those of the decision's view from now on."""

    def join_anew(self, number: int) -> None:
        """This process is not in view `number`, which was committed, and has not run in a view yet. It joins by another
        uid, so that nobody waits for anything of the old one."""

    def heard_dead(self, uid: str, reason: str) -> None:
        """A member has proof that the process is dead. reason: what that member saw."""

    def send_away(self, uid: str) -> None:
        """The joiner is to ask another member, because this one does not propose any more."""

    def failed(self, error: RuntimeError) -> None: ...
    def reason(self, uid: str) -> str:
        """What was seen of the uid last; empty if nothing was."""
