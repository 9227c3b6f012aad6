"""A member's control thread: the parts put together."""

import dataclasses
import queue
import socket
import threading
from collections.abc import Callable

from fusedcomm.log import report

from . import frames
from .addresses import name_of, state_of
from .agreement import Agreement
from .door import Door
from .errors import JoinRefusedError
from .gate import Gate
from .joining import Joining
from .loop import Channel, Loop
from .peers import Peers
from .requests import Handler, Requests
from .view import Decision, Member, View

# A joiner that some member does not hear would be taken in and put off for ever.
_MAX_PUT_OFF = 5


def _report(text: str) -> None:
    report(lambda: text)


class Node:
    """Everything of a member that runs on its control thread. Methods not marked otherwise are that thread's.

    on_freeze and check_join run on threads of their own, so that a slow one silences nobody.
    """

    def __init__(self, me: Member, min_ranks: int, silence_s: float, listening: socket.socket, gate: Gate) -> None:
        self.me, self.gate = me, gate
        self.on_freeze: Callable[[], None] = lambda: None
        self.check_join: Callable[[dict], str] = lambda info: ""
        self.handlers: dict[str, Handler] = {}
        self.loop = Loop(self._tick, self._stood_still, self._broke)
        self.requests = Requests(self.handlers, self._is_peer)
        self._listening, self._min_ranks, self._silence_s = listening, min_ranks, silence_s
        self._make_anew()
        self._door = Door(self.loop, listening, self._hello)
        self._joining: Joining | None = None
        self._past: set[str] = set()
        self._reachable: frozenset[str] = frozenset()
        self._freezes: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: the end
        self._is_closed = False
        self._num_put_off = 0
        self._stood_s = 0.0  # for so long this process did not run the last time
        threading.Thread(target=self._run_freezes, name="fc-members-freeze", daemon=True).start()
        self.loop.start()

    def _make_anew(self) -> None:
        """All that belongs to this process's uid."""
        self.requests.uid = self.me.uid
        self._agreement = Agreement(self.me.uid, self._min_ranks, self)
        self._peers = Peers(self.loop, self.me, self._silence_s, self, lambda: self._agreement.state())

    @property
    def view(self) -> View | None:
        """The last committed view. Any thread may read it."""
        return self._agreement.view

    @property
    def job(self) -> str:
        """Empty before it is known. Any thread may read it."""
        return self._peers.job

    def set_job(self, job: str) -> None:
        self._peers.job = self.requests.job = job

    def start(self, view: View) -> None:
        self._past |= set(view.uids)
        self._agreement.start(view)
        self._peers.set_members(view.members)
        self._update_reachable()

    def join(self, addresses: list[tuple[str, int]], check: dict) -> None:
        def refused(text: str) -> None:
            self.failed(JoinRefusedError(text))

        self._joining = Joining(self.loop, check, 2 * self._silence_s, self._welcomed, refused)
        self._joining.begin(self.me, addresses)

    def set_ready(self, number: int) -> None:
        self._agreement.set_ready(number)

    def set_wants(self, number: int) -> None:
        self._agreement.set_wants(number)

    def close(self, farewell: dict | None) -> None:
        """Ends everything. farewell: the last message to the others."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._joining is not None:
            self._joining.close()
        self._door.close()
        self._peers.close(farewell)
        self.requests.close()
        self._freezes.put(None)
        self.loop.stop()

    def close_in_child(self) -> None:
        """In a forked child: closes what it has inherited, without a word to the others."""
        self._is_closed = True
        self.loop.close_in_child()
        self.requests.close_in_child()

    # Outlet: what the rules need.

    def send(self, uid: str, message: dict) -> None:
        self._peers.send(uid, message)

    def broadcast(self, message: dict) -> None:
        self._peers.broadcast(message)

    def freeze(self, number: int, then: Callable[[int | None], None]) -> None:
        self.gate.freeze(number)
        self._freezes.put(lambda: self.loop.call(lambda: then(self.gate.finished)))

    def hold(self, number: int, step: int) -> bool:
        return self.gate.hold(number, step)

    def release(self, number: int) -> None:
        self.gate.release(number)

    def progress(self) -> tuple[int | None, int]:
        return self.gate.finished, self.gate.entered

    def committed(self, decision: Decision, immediate: bool) -> None:
        self._past |= set(decision.view.uids)
        self._peers.set_members(decision.view.members, self._agreement.commit_message)
        self._update_reachable()
        self.gate.commit(decision, immediate)

    def gone(self, number: int) -> None:
        self.gate.set_gone(number)

    def put_off(self, number: int) -> bool:
        if not self.gate.put_off():
            return False
        view = self._agreement.view
        assert view is not None and self._joining is not None
        self._num_put_off += 1
        if self._num_put_off > _MAX_PUT_OFF:
            self.failed(
                JoinRefusedError(
                    f"fusedcomm: this process was taken in and put off {_MAX_PUT_OFF} times, each time because a "
                    f"member was lost or does not hear it: see that every member reaches {self.me.address}"
                )
            )
            return True
        others = [(member.host, member.port) for member in view.members if member.uid != self.me.uid]
        self._peers.close({"type": "goodbye", "reason": f"view {number} is without it, so it joins anew"})
        self.me = dataclasses.replace(self.me, uid=f"{self.me.uid}+")
        self._make_anew()
        self._update_reachable()
        self._joining.begin(self.me, others)
        return True

    def send_away(self, uid: str) -> None:
        self._peers.drop_joiner(uid)

    def heard_dead(self, uid: str, sender: str) -> None:
        self._peers.set_dead(uid, "another member has proof that its process has ended")

    def failed(self, error: RuntimeError) -> None:
        self.gate.fail(error)
        self._freezes.put(lambda: None)
        self.loop.call(lambda: self.close({"type": "goodbye", "reason": type(error).__name__}))

    def reason(self, uid: str) -> str:
        if uid != self.me.uid:
            return self._peers.reason(uid)
        stood_s = max(self._stood_s, self.loop.stood_s)
        is_long = stood_s > self._silence_s / 2
        return f"it stood still for {stood_s:.1f} s, and silence is {self._silence_s:g} s" if is_long else ""

    # Listener: what the connections say.

    def on_message(self, uid: str, message: dict) -> None:
        try:
            self._agreement.message(uid, message)
        except (KeyError, TypeError, ValueError) as error:
            text = f"fusedcomm: members ignored a message of an unknown form: {message} ({error!r})"
            _report(text)

    def on_dead(self, uid: str, reason: str) -> None:
        self._lost()
        self.requests.lose(uid)
        if self._agreement.view is None:  # perhaps said by the member that was to propose this process, as it left
            self.on_joiner_lost(uid, reason)

    def on_silence(self) -> None:
        self._lost()
        for uid in self._peers.silent:
            self.requests.lose(uid)

    def on_connected(self, uid: str) -> None:
        pass

    def on_joiner_lost(self, uid: str, reason: str) -> None:
        if self._agreement.view is None and self._joining is not None:
            self._joining.lose(uid)
        else:
            self._agreement.drop_joiner(uid)

    def on_not_a_member(self, number: int) -> None:
        self._agreement.expelled(number)

    # The rest.

    def _lost(self) -> None:
        self._update_reachable()
        self._agreement.set_lost(set(self._peers.dead), self._peers.silent, self._peers.doubtful)

    def _update_reachable(self) -> None:
        view = self._agreement.view
        members = set(view.uids) if view is not None else set()
        lost = self._reachable - members
        self._reachable = frozenset(members - set(self._peers.dead) - self._peers.silent)
        for uid in lost:
            self.requests.lose(uid)

    def _is_peer(self, uid: str) -> bool:
        """Any thread's."""
        return uid in self._reachable and not self._is_closed

    def _tick(self, now: float) -> None:
        if self._is_closed:
            return
        self._door.tick(now)
        self._peers.tick(now)
        if self._joining is not None:
            self._joining.tick(now)
        self._lost()
        self._agreement.tick(now)

    def _stood_still(self, seconds: float) -> None:
        self._stood_s = seconds
        self._peers.stood_still(seconds)

    def _broke(self, error: Exception) -> None:
        """The control thread has ended by an error: the others see the end of this process's connections."""
        failure = RuntimeError(f"fusedcomm: the control thread of this member failed: {error!r}")
        failure.__cause__ = error
        self.gate.fail(failure)
        self._freezes.put(lambda: None)
        self.close(None)

    def _run_freezes(self) -> None:
        while (then := self._freezes.get()) is not None:
            try:
                self.on_freeze()
            except Exception as error:
                text = f"fusedcomm: stopping a step for a change of members failed: {error!r}"
                _report(text)
            then()

    def _welcomed(self, member: Member, channel: Channel, job: str) -> None:
        self.set_job(job)
        self._peers.add_joiner(member, channel)

    def _hello(self, channel: Channel, hello: dict) -> None:
        role, uid = hello["role"], hello["uid"]
        if role == "who":
            state = state_of(self._agreement.view is not None, self._joining is not None)
            channel.send(frames.REPLY, {"state": state, "name": name_of(self.job) if self.job else ""})
            channel.close_when_sent()
            return
        if role == "join":
            self._join_hello(channel, uid, hello)
            return
        view = self._agreement.view
        reply: dict = {"uid": self.me.uid, "answer": "ok"}
        if hello["to"] != self.me.uid:
            reply["answer"] = "another"
        elif not self._peers.job:
            reply["answer"] = "later"
        elif hello["job"] != self._peers.job:
            reply["answer"] = "job"
        elif uid in self._peers.dead or (view is not None and uid in self._past and uid not in view):
            reply.update(answer="not a member", number=view.number if view is not None else -1)
        elif view is None or uid not in view:
            reply["answer"] = "later"
        channel.send(frames.REPLY, reply)
        if reply["answer"] == "job":
            self._door.refuse(channel, "it belongs to another job")
        elif reply["answer"] != "ok" or role == "probe":
            channel.close_when_sent()
        elif role == "link":
            self._peers.adopt(uid, channel)
        elif role == "request":
            connection = channel.detach()
            if connection is not None:
                self.requests.serve(uid, connection)
        else:
            self._door.refuse(channel, f"its role is {role!r}")

    def _join_hello(self, channel: Channel, uid: str, hello: dict) -> None:
        joiner, view = Member.from_json(hello["member"]), self._agreement.view
        if view is None or uid in view or self._agreement.failure is not None:
            # Processes that all wait for each other to be members would wait for ever.
            is_none = view is None and self._joining is not None
            channel.send(frames.REPLY, {"answer": "no member, but a process that joins" if is_none else "later"})
            channel.close_when_sent()
            return
        lowest = self._agreement.lowest()
        others = [(member.host, member.port) for member in view.members]
        if lowest != self.me.uid:
            to = next(((m.host, m.port) for m in view.members if m.uid == lowest), None)
            reply = {"answer": "ask", "ask": to} if to is not None else {"answer": "later"}
            channel.send(frames.REPLY, {**reply, "others": others})
            channel.close_when_sent()
            return

        def answer(why: str) -> None:
            if why:
                channel.send(frames.REPLY, {"answer": "refused", "why": why})
                self._door.refuse(channel, f"as a joiner: {why}")
            elif channel.is_open and not self._is_closed:
                channel.send(
                    frames.REPLY,
                    {"answer": "welcome", "job": self._peers.job, "member": self.me.to_json(), "others": others},
                )
                self._peers.add_joiner(joiner, channel)
                self._agreement.add_joiner(joiner)

        def check() -> None:
            try:
                why = self.check_join(hello["check"])
            except Exception as error:
                why = f"the members could not check it: {error!r}"
            self.loop.call(lambda: answer(why))

        threading.Thread(target=check, name="fc-members-check", daemon=True).start()
