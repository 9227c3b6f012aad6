"""What the rules of agreement need of the process that follows them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from .view import Decision, Member


class Outlet(Protocol):
    """What the rules need of the process. All calls are the loop's thread's."""

    def send(self, uid: str, message: dict) -> None: ...
    def broadcast(self, message: dict) -> None: ...
    def freeze(self, number: int, then: Callable[[int | None], None]) -> None:
        """Stops the main thread's step, and calls then(last finished step; None before the first view) later."""

    def hold(self, number: int, step: int) -> bool:
        """Has the main thread wait at the beginning of `step`. False if it has begun it already."""

    def release(self, number: int) -> None:
        """Undoes hold()."""

    def progress(self) -> tuple[int | None, int]:
        """(last finished step, None before the first view; the step under way)."""

    def committed(self, decision: Decision, immediate: bool) -> None: ...
    def gone(self, number: int) -> None: ...
    def put_off(self, number: int) -> bool:
        """This process is not in view `number`, which was committed. If it has not run in a view yet, it joins anew,
        by another uid, so that nobody waits for anything of the old one. False if it has run in one."""

    def heard_dead(self, uid: str, sender: str) -> None:
        """A member has proof that the process is dead."""

    def send_away(self, uid: str) -> None:
        """The joiner is to ask another member, because this one does not propose any more."""

    def failed(self, error: RuntimeError) -> None: ...
    def reason(self, uid: str) -> str: ...


@dataclass
class Round:
    """A proposal of this process."""

    number: int
    base: int
    immediate: bool
    members: tuple[Member, ...]
    participants: tuple[str, ...]
    step: int
    acks: dict[str, dict] = field(default_factory=dict)
    sent: float = 0.0
