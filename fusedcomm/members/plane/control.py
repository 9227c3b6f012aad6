"""A member's control plane, as the main thread uses it."""

import os
import socket
import weakref

from fusedcomm.members.errors import InstallTimeoutError, JoinRefusedError
from fusedcomm.members.plane.addresses import name_of, split
from fusedcomm.members.plane.barrier import StepBarrier
from fusedcomm.members.plane.control_thread import ControlThread, Hooks
from fusedcomm.members.plane.listener import listen
from fusedcomm.members.plane.view import Decision, Member, View


class ControlPlane:
    """Says who is in the group, agreed with the other members without a server. It listens at once.

    Founders call start(), others join(). Then each step of the main thread is::

        decision = plane.boundary(step)     # None: go on
        ...                                 # the step; if it fails, or finish_step() is False: plane.recover()
        plane.barrier.finish_step(step)

    and after a decision `install(view)` until it is True, and `barrier.install(view)`.

    Args:
        uid: a text that no other process has.
        info: JSON that the others see in this process's Member. Its text has less than a megabyte.
        min_ranks: fewer members than this stop with TooFewRanksError.
        silence_s: seconds without a word after which a member is silent.
        host: this host's numeric address, by which the others reach it.

    Attributes:
        hooks: what the training does for it.
        barrier: where the main thread says what it has finished, and asks whether a view still is the members'.
    """

    def __init__(
        self,
        uid: str,
        info: dict,
        *,
        min_ranks: int,
        silence_s: float,
        host: str,
    ) -> None:
        listening = listen(host)
        self._member = member = Member(uid, host, listening.getsockname()[1], info)
        self._is_closed = False
        self.hooks = Hooks()
        self.barrier = StepBarrier()
        self._thread = ControlThread(member, min_ranks, silence_s, listening, self.barrier, self.hooks)
        self._network = self._thread.network
        _PLANES.add(self)

    @property
    def member(self) -> Member:
        """This process, as the last decision that the main thread has got names it: one that joins, and that a view
        leaves out before it runs, joins anew with another uid."""
        return self._member

    @property
    def is_closed(self) -> bool:
        """Whether this process has left, or has failed."""
        return self._is_closed or self.barrier.failure is not None

    @property
    def address(self) -> str:
        """host:port, for a process that joins."""
        return self.member.address

    @property
    def job_name(self) -> str:
        """What others may know of the job; empty in a process that has not joined."""
        return name_of(self._thread.job) if self._thread.job else ""

    @property
    def view(self) -> View | None:
        """The last view that was agreed on; None in a process that waits to join."""
        return self._thread.view

    def set_job(self, job: str) -> None:
        """Gives it a random text that the founders share. A process that joins learns it."""
        self._network.call_and_wait(lambda: self._thread.set_job(job))

    def start(self, view: View) -> None:
        """The founders' view, the same on all."""
        self.barrier.start(view)
        self._network.call_and_wait(lambda: self._thread.start(view))  # requests are possible from now on

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
        self._network.call(lambda: self._thread.join(addresses, info_to_check))
        return self._named(self.barrier.recover())

    def boundary(self, step: int) -> Decision | None:
        """To be called before each step begins. None: it runs in the same view."""
        if self.barrier.begin(step):
            return None
        decision = self.barrier.boundary(step)
        return self.recover() if decision is None and self.barrier.is_stopped else decision

    def recover(self) -> Decision:
        """Waits for the next view. Raises MinorityError, TooFewRanksError or ExpelledError."""
        wanted = self.barrier.wanted()
        self._network.call(lambda: self._thread.agreement.set_wants(wanted))
        try:
            return self._named(self.barrier.recover())
        finally:
            self._network.call(lambda: self._thread.agreement.set_wants(-1))

    def _named(self, decision: Decision) -> Decision:
        """The same decision, once this process goes by the name that it has there."""
        own = (self._member.host, self._member.port)
        self._member = next((m for m in decision.view.members if (m.host, m.port) == own), self._member)
        return decision

    def install(self, view: View, timeout_s: float) -> bool:
        """This process can run in the view. Waits until all its members can: True. False: the view has been superseded,
        so call recover(). Raises InstallTimeoutError that names the members which cannot yet; call it again to wait
        longer."""
        self._network.call(lambda: self._thread.agreement.set_ready(view.number))
        try:
            return self.barrier.wait_active(view.number, timeout_s)
        except InstallTimeoutError as error:
            late = self._thread.not_ready(view)  # empty if the last of them has just come
            raise InstallTimeoutError(f"{error}: rank(s) {late} of it have not come" if late else str(error)) from None

    def request(
        self, member: Member, kind: str, header: dict, into: memoryview | None = None
    ) -> tuple[dict, memoryview]:
        """Asks a member of the view: (header, payload) of the answer. Any thread may call it.

        into: writable bytes that receive the payload, which is their beginning.

        Raises MemberLostError once the member is dead, silent or no longer in the view, or if the answer arrives
        damaged; LookupError if it refuses.
        """
        return self._thread.requests.ask(member, kind, header, into)

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
        self.barrier.fail(
            RuntimeError("fusedcomm: this process has left the members: to come back make new Members, with join=")
        )
        self._network.call(lambda: self._thread.close(farewell))
        self._network.stop()

    def _forked(self) -> None:
        self._is_closed = True
        self.barrier = StepBarrier()
        self.barrier.fail(RuntimeError("fusedcomm: this process was forked from a member, and is none itself"))
        self._network.cut_off_in_child()


_PLANES: "weakref.WeakSet[ControlPlane]" = weakref.WeakSet()


def _after_fork() -> None:
    for plane in list(_PLANES):
        plane._forked()


os.register_at_fork(after_in_child=_after_fork)
