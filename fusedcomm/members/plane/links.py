"""The connections to the other members, and what they say about who lives.

Each pair of members holds one connection, over which both send their state about each second. The lower rank dials. The
end of a connection proves nothing: the other's port is dialed again. If nobody listens there, or another process
answers, the member is *dead*. If it answers, it lives. If nothing answers, it is *silent* after `silence_s`.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from fusedcomm.members.errors import FrameError
from fusedcomm.members.plane import frames
from fusedcomm.members.plane.network import Connection, Network, say_hello
from fusedcomm.members.plane.view import Member

# Seconds after which a member that says nothing is dialed, to see whether it lives.
_LATE_S = 3.0
# Seconds between two attempts to reach a member: the first of them, and the most. A process that is being killed
# closes its connections before its port, or the other way round, so the second attempt follows soon.
_REDIAL_S = 0.05
_MAX_REDIAL_S = 0.8
# Seconds for which the higher rank waits to be dialed before it looks whether the lower one lives.
_UNDIALED_S = 0.5
# Seconds that one attempt may take.
_DIAL_S = 5.0


class Hearer(Protocol):
    """What the links tell. All calls are the control thread's. Who is silent is read from the links at each tick."""

    def on_message(self, uid: str, message: dict) -> None: ...
    def on_dead(self, uid: str, reason: str) -> None: ...
    def on_joiner_lost(self, uid: str) -> None: ...
    def on_expelled(self, number: int) -> None:
        """A member has said that this process is not in its view of that number."""


@dataclass(eq=False)
class _Link:
    member: Member
    dials: bool  # whether this process dials; false for the higher rank, which only probes
    joins: bool  # a joiner, which nobody dials
    heard: float = field(default_factory=time.monotonic)
    connection: Connection | None = None
    dial: asyncio.Task | None = None
    dialed: float = 0.0
    redial_s: float = _REDIAL_S
    is_silent: bool = False
    why: str = ""  # why its last connection has ended
    is_unheard: bool = False  # since this process stood still

    def stop_dialing(self) -> None:
        if self.dial is not None:
            self.dial.cancel()
            self.dial = None


class Links:
    """The members that this process speaks with. Only the control thread uses it.

    state: returns the message that each of them gets about each second.
    """

    def __init__(
        self, network: Network, me: Member, silence_s: float, hearer: Hearer, state: Callable[[], dict]
    ) -> None:
        self._network, self._me, self._silence_s, self._hearer, self._state = network, me, silence_s, hearer, state
        self._beat_s, self._late_s = min(1.0, silence_s / 5), min(_LATE_S, silence_s / 3)
        self._beaten = 0.0
        self._links: dict[str, _Link] = {}
        self.job = ""
        self.dead: dict[str, str] = {}
        """Why each uid counts as dead."""
        self._quiet_then: dict[str, set[str]] = {}  # by dead uid: who was quiet when it was proven dead

    @property
    def doubtful(self) -> set[str]:
        """The dead that were proven dead while somebody was quiet who is still: before it died, such a process may have
        gone on with the quiet one, and without this process."""
        quiet = {uid for uid, link in self._links.items() if self._is_quiet(link)}
        return {uid for uid, then in self._quiet_then.items() if then & quiet}

    def _is_quiet(self, link: _Link) -> bool:
        """Whether the others may think the same of this process, so that it would be silent to them soon."""
        return link.is_unheard or link.is_silent or time.monotonic() - link.heard > self._silence_s / 2

    @property
    def silent(self) -> set[str]:
        return {uid for uid, link in self._links.items() if link.is_silent}

    def reason(self, uid: str) -> str:
        """What was seen of the uid last; empty if nothing was."""
        return self.dead.get(uid) or (self._links[uid].why if uid in self._links else "")

    def set_members(self, members: tuple[Member, ...], farewell: dict | None = None) -> None:
        """The members of the view by rank. Links to others end, with the message `farewell`."""
        uids = [member.uid for member in members]
        own = uids.index(self._me.uid)
        for rank, member in enumerate(members):
            if member.uid != self._me.uid and member.uid not in self.dead:
                link = self._links.setdefault(member.uid, _Link(member, dials=own < rank, joins=False))
                link.joins, link.dials = False, own < rank
        for uid in [uid for uid in self._links if uid not in uids and not self._links[uid].joins]:
            self._drop(uid, farewell)
        self.tick(time.monotonic())

    def add_joiner(self, member: Member, connection: Connection) -> None:
        self._links.setdefault(member.uid, _Link(member, dials=False, joins=True))
        self.adopt(member.uid, connection)

    def drop_joiner(self, uid: str) -> None:
        if uid in self._links and self._links[uid].joins:
            self._drop(uid, None)

    def adopt(self, uid: str, connection: Connection) -> None:
        """Uses the connection for the link in place of an earlier one. Closes it if there is no such link."""
        link = self._links.get(uid)
        if link is None:
            connection.close()
            return
        earlier, link.connection = link.connection, connection
        if earlier is not None:
            earlier.abort()
        link.heard, link.redial_s = time.monotonic(), _REDIAL_S
        link.is_silent = link.is_unheard = False
        link.stop_dialing()
        connection.send(frames.MESSAGE, self._state())
        self._network.spawn(self._listen(uid, link, connection))

    def send(self, uid: str, message: dict) -> None:
        """Sends if there is a connection. What matters is sent again by whoever waits for an answer."""
        link = self._links.get(uid)
        if link is not None and link.connection is not None:
            link.connection.send(frames.MESSAGE, message)

    def broadcast(self, message: dict) -> None:
        for uid in list(self._links):
            self.send(uid, message)

    def set_dead(self, uid: str, reason: str) -> None:
        """The process is proven dead. Its connection is closed, and it is told nothing any more."""
        if uid in self.dead or uid == self._me.uid:
            return
        self.dead[uid] = reason
        if uid in self._links:
            self._drop(uid, None)
        self._quiet_then[uid] = {other for other, link in self._links.items() if self._is_quiet(link)}
        self._hearer.on_dead(uid, reason)

    def stood_still(self, seconds: float) -> None:
        """This process did not run for so long, so nobody was silent meanwhile."""
        for link in self._links.values():
            link.heard = min(time.monotonic(), link.heard + seconds)
            link.is_unheard = link.is_unheard or seconds > self._silence_s / 2

    def tick(self, now: float) -> None:
        if now - self._beaten >= self._beat_s:
            self._beaten = now
            self.broadcast(self._state())
        for uid, link in list(self._links.items()):
            quiet_s = now - link.heard
            if link.joins:
                if quiet_s > self._silence_s:
                    self._lose_joiner(uid)
                continue
            patience_s = self._late_s if link.connection is not None else 0.0 if link.dials or link.why else _UNDIALED_S
            if quiet_s > patience_s and link.dial is None and now - link.dialed > link.redial_s:
                link.redial_s = min(2 * link.redial_s, _MAX_REDIAL_S)
                self._dial(uid, link)
            if quiet_s > self._silence_s and not link.is_silent:
                link.is_silent = True
                link.why = link.why or "nothing arrives from it"

    def close(self, farewell: dict | None = None) -> None:
        for uid in list(self._links):
            self._drop(uid, farewell)

    def _drop(self, uid: str, farewell: dict | None) -> None:
        link = self._links.pop(uid)
        link.stop_dialing()
        if link.connection is not None:
            if farewell is not None:
                link.connection.send(frames.MESSAGE, farewell)
            link.connection.close()

    def _is_current(self, uid: str, link: _Link, connection: Connection) -> bool:
        return self._links.get(uid) is link and link.connection is connection

    def _hear(self, link: _Link) -> None:
        link.heard = time.monotonic()
        link.is_silent = link.is_unheard = False

    async def _listen(self, uid: str, link: _Link, connection: Connection) -> None:
        """Takes what the member says, until the connection ends or is replaced."""
        try:
            while True:
                kind, message, _ = await connection.receive()
                if not self._is_current(uid, link, connection):
                    return
                if kind != frames.MESSAGE:
                    raise FrameError(f"it sent a frame of kind {kind}, no message")
                self._hear(link)
                if message.get("type") == "goodbye":
                    self.set_dead(uid, f"it has left: {message.get('reason', '')}")
                else:
                    self._hearer.on_message(uid, message)
        except (OSError, EOFError, FrameError) as error:
            why = str(error)
        finally:
            connection.close()
        if self._is_current(uid, link, connection):
            link.connection, link.why = None, why
            if link.joins:
                self._lose_joiner(uid)
            elif link.dial is None:
                self._dial(uid, link)

    def _lose_joiner(self, uid: str) -> None:
        self._drop(uid, None)
        self._hearer.on_joiner_lost(uid)

    def _dial(self, uid: str, link: _Link) -> None:
        link.dialed = time.monotonic()
        link.dial = self._network.spawn(self._reach(uid, link))

    async def _reach(self, uid: str, link: _Link) -> None:
        """Dials the member: for a new connection, or, as the higher rank, to see whether it lives."""
        hello = {"role": "link" if link.dials else "probe", "job": self.job, "uid": self._me.uid, "to": uid}
        try:
            connection, reply = await say_hello(link.member.host, link.member.port, hello, _DIAL_S)
        except (OSError, EOFError, FrameError, asyncio.TimeoutError) as error:
            link.dial = None
            if isinstance(error, ConnectionRefusedError):
                self.set_dead(uid, link.why or str(error))
            elif link.connection is None:
                link.why = str(error) or link.why
            return
        link.dial = None
        if reply.get("uid") == uid and reply.get("answer") == "ok" and link.dials:
            self.adopt(uid, connection)
            return
        connection.close()
        if reply.get("uid") != uid:
            self.set_dead(uid, f"another process listens at {link.member.address}")
        elif reply.get("answer") in ("ok", "later"):
            self._hear(link)
        elif reply.get("answer") == "not a member":
            self._hearer.on_expelled(int(reply["number"]))
