"""A member's control thread: the parts put together."""

import dataclasses
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from fusedcomm.log import report
from fusedcomm.members.errors import JoinRefusedError
from fusedcomm.members.plane import frames
from fusedcomm.members.plane.addresses import name_of, state_of
from fusedcomm.members.plane.agreement import Agreement
from fusedcomm.members.plane.barrier import StepBarrier
from fusedcomm.members.plane.joining import Address, Joining
from fusedcomm.members.plane.links import Links
from fusedcomm.members.plane.listener import Listener
from fusedcomm.members.plane.network import Connection, Network
from fusedcomm.members.plane.requests import Handler, Requests
from fusedcomm.members.plane.view import Decision, Member, View
from fusedcomm.ranks.errand import Errand

# A joiner that some member does not hear would be taken in and deferred for ever.
_MAX_DEFERRED = 5


@dataclass
class Hooks:
    """What the control plane asks of the training. Each call has a thread of its own, so a slow one silences nobody.

    stop_step: stops the step under way, when this member acknowledges an immediate change, and when it fails. It may be
    called again before a view is installed. check_join: given what a joiner says of itself, returns why it is refused;
    empty if it is not. handlers: by kind, what answers a request. num_founders: processes that may dial this one before
    the training begins.
    """

    stop_step: Callable[[], None] = lambda: None
    check_join: Callable[[dict], str] = lambda info: ""
    handlers: dict[str, Handler] = field(default_factory=dict)
    num_founders: int = 0


class ControlThread:
    """Everything of a member that runs on its control thread. Methods not marked otherwise are that thread's.

    The links tell it what they hear (:class:`Hearer`), the rules, `agreement`, have it act (:class:`Effects`).
    """

    def __init__(
        self, me: Member, min_ranks: int, silence_s: float, listening: socket.socket, barrier: StepBarrier, hooks: Hooks
    ) -> None:
        self.me, self._barrier, self._hooks = me, barrier, hooks
        self._min_ranks, self._silence_s = min_ranks, silence_s
        self._listener = Listener(self._hello, lambda: hooks.num_founders if self.view is None else len(self.view.uids))
        self.network = Network(listening, self._listener.meet, self._tick, self._stood_still, self._broke)
        self.requests = Requests(self.network, hooks.handlers, self._is_peer)
        self._make_anew()
        self._joining: Joining | None = None
        self._proposer = ""  # the uid of the member that proposes this process
        self._past: set[str] = set()
        self._reachable: frozenset[str] = frozenset()
        self._is_closed = False
        self._num_deferred = 0
        self._stood_s = 0.0  # for so long this process did not run the last time
        self.network.start()

    def _make_anew(self) -> None:
        """All that belongs to this process's uid."""
        self.requests.uid = self.me.uid
        self.agreement = Agreement(self.me.uid, self._min_ranks, self._barrier, self)
        self._links = Links(self.network, self.me, self._silence_s, self, lambda: self.agreement.state())

    @property
    def view(self) -> View | None:
        """The last committed view. Any thread may read it."""
        return self.agreement.view

    @property
    def job(self) -> str:
        """Empty before it is known. Any thread may read it."""
        return self._links.job

    def set_job(self, job: str) -> None:
        self._links.job = self.requests.job = job

    def start(self, view: View) -> None:
        self._past |= set(view.uids)
        self.agreement.start(view)
        self._links.set_members(view.members)
        self._update_reachable()

    def join(self, addresses: list[Address], check: dict) -> None:
        self._joining = Joining(addresses, check, 2 * self._silence_s)
        self.network.spawn(self._find_proposer([]))

    def not_ready(self, view: View) -> list[int]:
        """The ranks of other members that have not said that they can run in the view. Any thread may ask."""
        states = self.agreement.roster.states
        others = [uid for uid in view.uids if uid != self.me.uid]
        return [view.rank_of(uid) for uid in others if uid not in states or states[uid].ready < view.number]

    def close(self, farewell: dict | None) -> None:
        """Ends everything. farewell: the last message to the others."""
        if not self._is_closed:
            self._is_closed = True
            self._links.close(farewell)
            self.requests.close()
            self.network.stop()

    # ---- Effects

    def send(self, uid: str, message: dict) -> None:
        self._links.send(uid, message)

    def broadcast(self, message: dict) -> None:
        self._links.broadcast(message)

    def stop_step(self, then: Callable[[], None]) -> None:
        def stop() -> None:
            try:
                self._hooks.stop_step()
            except Exception as error:
                text = f"fusedcomm: stopping a step for a change of members failed: {error!r}"
                report(lambda: text)
            self.network.call(then)

        Errand(stop)  # a slow one silences nobody

    def committed(self, decision: Decision) -> None:
        self._past |= set(decision.view.uids)
        self._links.set_members(decision.view.members, self.agreement.commit)
        self._update_reachable()

    def join_anew(self, number: int) -> None:
        view = self.agreement.view
        assert view is not None
        self._num_deferred += 1
        if self._num_deferred > _MAX_DEFERRED:
            self.failed(
                JoinRefusedError(
                    f"fusedcomm: this process was taken in and put off {_MAX_DEFERRED} times, each time because a "
                    f"member was lost or does not hear it: see that every member reaches {self.me.address}"
                )
            )
            return
        others = [(member.host, member.port) for member in view.members if member.uid != self.me.uid]
        self._links.close({"type": "goodbye", "reason": f"view {number} is without it, so it joins anew"})
        self.me, self._proposer = dataclasses.replace(self.me, uid=f"{self.me.uid}+"), ""
        self._make_anew()
        self._update_reachable()
        self.network.spawn(self._find_proposer(others))

    def send_away(self, uid: str) -> None:
        self._links.drop_joiner(uid)

    def heard_dead(self, uid: str, reason: str) -> None:
        self._links.set_dead(uid, reason)

    def failed(self, error: RuntimeError) -> None:
        self._barrier.fail(error)
        self.stop_step(lambda: None)
        self.network.call(lambda: self.close({"type": "goodbye", "reason": type(error).__name__}))

    def reason(self, uid: str) -> str:
        if uid != self.me.uid:
            return self._links.reason(uid)
        stood_s = max(self._stood_s, self.network.stood_s)
        is_long = stood_s > self._silence_s / 2
        return f"it stood still for {stood_s:.1f} s, and silence is {self._silence_s:g} s" if is_long else ""

    # ---- Hearer

    def on_message(self, uid: str, message: dict) -> None:
        try:
            self.agreement.message(uid, message)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            text = f"fusedcomm: members ignored a message of an unknown form: {message} ({error!r})"
            report(lambda: text)

    def on_dead(self, uid: str, reason: str) -> None:
        self._update_lost()
        self.requests.lose(uid)
        if self.agreement.view is None:  # perhaps said by the member that was to propose this process, as it left
            self.on_joiner_lost(uid)

    def on_joiner_lost(self, uid: str) -> None:
        if self.agreement.view is not None:
            self.agreement.drop_joiner(uid)
        elif uid == self._proposer and not self._is_closed:
            self._proposer = ""
            self.network.spawn(self._find_proposer([]))

    def on_expelled(self, number: int) -> None:
        self.agreement.expelled(number)

    # ---- the rest

    def _update_lost(self) -> None:
        self._update_reachable()
        self.agreement.set_lost(set(self._links.dead), self._links.silent, self._links.doubtful)

    def _update_reachable(self) -> None:
        """Notes who can be asked, and ends the requests of those who cannot any more."""
        view = self.agreement.view
        members = set(view.uids) if view is not None else set()
        before, self._reachable = self._reachable, frozenset(members - set(self._links.dead) - self._links.silent)
        for uid in before - self._reachable:
            self.requests.lose(uid)

    def _is_peer(self, uid: str) -> bool:
        """Any thread's."""
        return uid in self._reachable and not self._is_closed

    def _tick(self, now: float) -> None:
        if not self._is_closed:
            self._links.tick(now)
            self._update_lost()
            self.agreement.tick(now)

    def _stood_still(self, seconds: float) -> None:
        self._stood_s = seconds
        self._links.stood_still(seconds)

    def _broke(self, error: BaseException) -> None:
        """The control thread ends by an error: the others see the end of this process's connections."""
        failure = RuntimeError(f"fusedcomm: the control thread of this member failed: {error!r}")
        failure.__cause__ = error
        self._barrier.fail(failure)
        self.stop_step(lambda: None)
        self.close(None)

    async def _find_proposer(self, first: list[Address]) -> None:
        assert self._joining is not None
        try:
            member, connection, job = await self._joining.find(self.me, first)
        except JoinRefusedError as error:
            self.failed(error)
            return
        self._proposer = member.uid
        self.set_job(job)
        self._links.add_joiner(member, connection)

    async def _hello(self, connection: Connection, hello: dict) -> None:
        """A process has connected, and says who it is and what for."""
        role, uid = hello["role"], hello["uid"]
        if role == "who":
            state = state_of(self.agreement.view is not None, self._joining is not None)
            connection.send(frames.REPLY, {"state": state, "name": name_of(self.job) if self.job else ""})
            connection.close()
            return
        if role == "join":
            await self._join_hello(connection, hello)
            return
        view = self.agreement.view
        reply: dict = {"uid": self.me.uid, "answer": "ok"}
        if hello["to"] != self.me.uid:
            reply["answer"] = "another"
        elif not self.job:
            reply["answer"] = "later"
        elif hello["job"] != self.job:
            reply["answer"] = "job"
        elif uid in self._links.dead or (view is not None and uid in self._past and uid not in view):
            reply.update(answer="not a member", number=view.number if view is not None else -1)
        elif view is None or uid not in view:
            reply["answer"] = "later"
        connection.send(frames.REPLY, reply)
        if reply["answer"] == "job":
            self._listener.refuse(connection, "it belongs to another job")
        elif reply["answer"] != "ok" or role == "probe":
            connection.close()
        elif role == "link":
            self._links.adopt(uid, connection)
        elif role == "request":
            self.network.spawn(self.requests.serve(uid, connection))
        else:
            self._listener.refuse(connection, f"its role is {role!r}")

    async def _join_hello(self, connection: Connection, hello: dict) -> None:
        joiner, view = Member.from_json(hello["member"]), self.agreement.view
        if view is None or joiner.uid in view or self.agreement.failure is not None:
            # Processes that all wait for each other to be members would wait for ever.
            is_none = view is None and self._joining is not None
            connection.send(frames.REPLY, {"answer": "no member, but a process that joins" if is_none else "later"})
            connection.close()
            return
        lowest = self.agreement.roster.lowest()
        reply: dict = {"others": [(member.host, member.port) for member in view.members]}
        if lowest != self.me.uid:
            to = next(((m.host, m.port) for m in view.members if m.uid == lowest), None)
            reply |= {"answer": "ask", "ask": to} if to is not None else {"answer": "later"}
            connection.send(frames.REPLY, reply)
            connection.close()
            return
        try:
            why = await self.network.on_thread(lambda: self._hooks.check_join(hello["check"]))
        except Exception as error:
            why = f"the members could not check it: {error!r}"
        if why:
            connection.send(frames.REPLY, {"answer": "refused", "why": why})
            self._listener.refuse(connection, f"as a joiner: {why}")
        elif connection.is_open and not self._is_closed:
            reply |= {"answer": "welcome", "job": self.job, "member": dataclasses.asdict(self.me)}
            connection.send(frames.REPLY, reply)
            self._links.add_joiner(joiner, connection)
            self.agreement.add_joiner(joiner)
