"""A member's control plane, as the main thread uses it."""

import os
import socket
import uuid
import weakref
from collections.abc import Callable

from .addresses import name_of, split
from .door import listen, numeric_host
from .errors import JoinRefusedError
from .gate import Gate
from .node import Node
from .requests import Handler
from .view import Decision, Member, View


def new_uid() -> str:
    """A text that no other process has."""
    return uuid.uuid4().hex


class ControlPlane:
    """Says who is in the group, agreed with the other members without a server. It listens at once.

    Founders call start(), others join(). Then each step of the main thread is::

        decision = plane.boundary(step)     # None: go on
        ...                                 # the step; if it fails, or finish_step() is False: plane.recover()
        plane.finish_step(step)

    and after a decision `install(view)` until it is True, and `installed(view)`.

    Args:
        uid: new_uid(), or any text that no other process has.
        info: JSON that the others see in this process's Member. Its text has less than a megabyte.
        min_ranks: fewer members than this stop with TooFewRanksError.
        job: a random text that the founders share. None in a process that joins, which learns it.
        silence_s: seconds without a word after which a member is silent.
        host: this host's name or address by which the others reach it. None: what its own name resolves to.
    """

    def __init__(
        self,
        uid: str,
        info: dict,
        *,
        min_ranks: int,
        job: str | None,
        silence_s: float = 10.0,
        host: str | None = None,
    ) -> None:
        if min_ranks < 1:
            raise ValueError(f"fusedcomm: min_ranks={min_ranks} is not possible: use at least 1")
        if silence_s <= 0:
            raise ValueError(f"fusedcomm: silence_s={silence_s} is not possible: use seconds, more than 0")
        own = numeric_host(host)
        listening = listen(own)
        self._member = member = Member(uid, own, listening.getsockname()[1], info)
        self._min_ranks, self._silence_s, self._job, self._is_closed = min_ranks, silence_s, job, False
        self._gate = Gate()
        self._node = Node(member, min_ranks, silence_s, listening, self._gate)
        if job is not None:
            self._node.loop.call(lambda: self._node.set_job(job))
        _PLANES.add(self)

    @property
    def member(self) -> Member:
        """This process, as the last decision that the main thread has got names it: one that joins, and that a view
        leaves out before it runs, joins anew with another uid."""
        return self._member

    @property
    def is_closed(self) -> bool:
        """Whether this process has left, or has failed."""
        return self._is_closed or self._gate.failure is not None

    @property
    def address(self) -> str:
        """host:port, for a process that joins."""
        return self.member.address

    @property
    def job_name(self) -> str:
        """What others may know of the job; empty in a process that has not joined."""
        job = self._job or self._node.job
        return name_of(job) if job else ""

    @property
    def view(self) -> View | None:
        """The last view that was agreed on; None in a process that waits to join."""
        return self._node.view

    @property
    def on_freeze(self) -> Callable[[], None]:
        """Stops the step under way: called on a thread of its own when this member acknowledges an immediate change,
        and when it fails. It may be called again before a view is installed."""
        return self._node.on_freeze

    @on_freeze.setter
    def on_freeze(self, function: Callable[[], None]) -> None:
        self._node.on_freeze = function

    @property
    def check_join(self) -> Callable[[dict], str]:
        """Given what a joiner says of itself, returns why it is refused; empty if it is not."""
        return self._node.check_join

    @check_join.setter
    def check_join(self, function: Callable[[dict], str]) -> None:
        self._node.check_join = function

    @property
    def handlers(self) -> dict[str, Handler]:
        """By kind: what answers a request, on a thread of its own."""
        return self._node.handlers

    def start(self, view: View) -> None:
        """The founders' view, the same on all."""
        if self.member.uid not in view:
            raise ValueError(f"fusedcomm: this process, {self.member.uid}, is not in the view that it starts with")
        if len(view.members) < self._min_ranks:
            raise ValueError(
                f"fusedcomm: {len(view.members)} members start, and min_ranks is {self._min_ranks}: start more"
            )
        self._gate.start(view)
        self._node.loop.call_and_wait(lambda: self._node.start(view))  # requests are possible from now on

    def join(self, address: str, info_to_check: dict) -> Decision:
        """Waits until members have made this process one of them. address: host:port of one, or of several with commas.

        Raises JoinRefusedError with the reason, also if no member answers.
        """
        addresses, problem = [], ""
        for each in address.split(","):
            try:
                found = socket.getaddrinfo(*split(each), type=socket.SOCK_STREAM)
                addresses += [(str(entry[4][0]), int(entry[4][1])) for entry in found]
            except (OSError, ValueError) as error:
                problem = f"fusedcomm: {each!r} is no address of a member: {error}"
        if not addresses:
            raise JoinRefusedError(problem)
        self._node.loop.call(lambda: self._node.join(addresses, info_to_check))
        return self._named(self._gate.recover())

    def boundary(self, step: int) -> Decision | None:
        """To be called before each step begins. None: it runs in the same view."""
        if self._gate.begin(step):
            return None
        decision = self._gate.boundary(step)
        return self.recover() if decision is None and self._gate.is_stopped else decision

    def finish_step(self, step: int) -> bool:
        """The step is finished here. False: a change came first, so it is not; call recover()."""
        return self._gate.finish_step(step)

    def has_finished(self, step: int, view: View) -> bool:
        """The step is finished here although the members change to `view`: its last means came from another member.

        False: another change came first, so it is not; call recover().
        """
        return self._gate.has_finished(step, view.number)

    def is_superseded(self, view: View) -> bool:
        """Whether the members have left the view, or are about to."""
        return self._gate.is_superseded(view.number)

    def recover(self) -> Decision:
        """Waits for the next view. Raises MinorityError, TooFewRanksError or ExpelledError."""
        wanted = self._gate.wanted()
        self._node.loop.call(lambda: self._node.set_wants(wanted))
        try:
            return self._named(self._gate.recover())
        finally:
            self._node.loop.call(lambda: self._node.set_wants(-1))

    def _named(self, decision: Decision) -> Decision:
        """The same decision, once this process goes by the name that it has there."""
        own = (self._member.host, self._member.port)
        self._member = next((m for m in decision.view.members if (m.host, m.port) == own), self._member)
        return decision

    def install(self, view: View, timeout_s: float) -> bool:
        """This process can run in the view. Waits until all its members can: True. False: the view has been superseded,
        so call recover(). Raises InstallTimeoutError."""
        self._node.loop.call(lambda: self._node.set_ready(view.number))
        return self._gate.wait_installed(view.number, timeout_s)

    def installed(self, view: View) -> None:
        """The main thread runs in the view from now on."""
        self._gate.install(view)

    def request(
        self, member: Member, kind: str, header: dict, into: memoryview | None = None
    ) -> tuple[dict, memoryview]:
        """Asks a member of the view: (header, payload) of the answer. Any thread may call it.

        into: writable bytes that receive the payload, which is their beginning.

        Raises MemberLostError once the member is dead, silent or no longer in the view, LookupError if it refuses,
        FrameError if the answer arrives damaged repeatedly.
        """
        return self._node.requests.ask(member, kind, header, into)

    def leave(self, reason: str) -> None:
        """Says goodbye: the others go on without this process at once. Does nothing the second time."""
        self._close({"type": "goodbye", "reason": reason})

    def close(self) -> None:
        """Ends without a word, like the end of the process. Does nothing after leave()."""
        self._close(None)

    def _close(self, farewell: dict | None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._gate.fail(
            RuntimeError("fusedcomm: this process has left the members: to come back make new Members, with join=")
        )
        self._node.loop.call(lambda: self._node.close(farewell))
        self._node.loop.stop()

    def _forked(self) -> None:
        self._is_closed = True
        self._gate = Gate()
        self._gate.fail(RuntimeError("fusedcomm: this process was forked from a member, and is none itself"))
        self._node.close_in_child()


_PLANES: "weakref.WeakSet[ControlPlane]" = weakref.WeakSet()


def _after_fork() -> None:
    for plane in list(_PLANES):
        plane._forked()


os.register_at_fork(after_in_child=_after_fork)
