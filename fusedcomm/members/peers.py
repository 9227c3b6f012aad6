"""The connections to the other members, and what they say about who lives.

Each pair of members holds one connection, over which both send a beat about each second. The lower rank dials. The end
of a connection proves nothing: the other's port is dialed again. If nobody listens there, or another process answers,
the member is *dead*. If it answers, it lives. If nothing answers, it is *silent* after `silence_s`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from . import frames
from .loop import Channel, Dial, Loop
from .view import Member

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


class Listener(Protocol):
    """What happens on the loop's thread."""

    def on_message(self, uid: str, message: dict) -> None: ...
    def on_dead(self, uid: str, reason: str) -> None: ...
    def on_silence(self) -> None: ...
    def on_connected(self, uid: str) -> None: ...
    def on_joiner_lost(self, uid: str, reason: str) -> None: ...
    def on_not_a_member(self, number: int) -> None: ...


@dataclass
class _Peer:
    member: Member
    dials: bool  # whether this process dials; false for the higher rank, which only probes
    joins: bool  # a joiner, which nobody dials
    heard: float = field(default_factory=time.monotonic)
    channel: Channel | None = None
    dial: Dial | Channel | None = None
    dialed: float = 0.0
    redial_s: float = _REDIAL_S
    is_silent: bool = False
    why: str = ""  # why its last connection has ended
    is_unheard: bool = False  # since this process stood still


class Peers:
    """The members that this process speaks with. Only the loop's thread uses it.

    beat: the message that each peer gets about each second. hello: the fields of a hello that name the job.
    """

    def __init__(self, loop: Loop, me: Member, silence_s: float, listener: Listener, beat: Callable[[], dict]) -> None:
        self._loop, self._me, self._silence_s, self._listener, self._beat = loop, me, silence_s, listener, beat
        self._beat_s, self._late_s = min(1.0, silence_s / 5), min(_LATE_S, silence_s / 3)
        self._beaten = 0.0
        self._peers: dict[str, _Peer] = {}
        self.job = ""
        self.dead: dict[str, str] = {}
        """Why each uid counts as dead."""
        self._quiet_then: dict[str, set[str]] = {}  # by dead uid: who was quiet when it was proven dead

    @property
    def doubtful(self) -> set[str]:
        """The dead that were proven dead while somebody was quiet who is still: before it died, such a process may have
        gone on with the quiet one, and without this process."""
        quiet = {uid for uid, peer in self._peers.items() if self._is_quiet(peer)}
        return {uid for uid, then in self._quiet_then.items() if then & quiet}

    def _is_quiet(self, peer: _Peer) -> bool:
        """Whether the others may think the same of this process, so that it would be silent to them soon."""
        return peer.is_unheard or peer.is_silent or time.monotonic() - peer.heard > self._silence_s / 2

    @property
    def silent(self) -> set[str]:
        return {uid for uid, peer in self._peers.items() if peer.is_silent}

    def reason(self, uid: str) -> str:
        """What was seen of the uid last; empty if nothing was."""
        return self.dead.get(uid) or (self._peers[uid].why if uid in self._peers else "")

    def set_members(self, members: tuple[Member, ...], farewell: dict | None = None) -> None:
        """The members of the view by rank. Peers that are not among them get the message `farewell` as the last one."""
        uids = [member.uid for member in members]
        own = uids.index(self._me.uid)
        for rank, member in enumerate(members):
            if member.uid == self._me.uid or member.uid in self.dead:
                continue
            peer = self._peers.setdefault(member.uid, _Peer(member, dials=own < rank, joins=False))
            peer.joins, peer.dials = False, own < rank
        for uid in [uid for uid in self._peers if uid not in uids and not self._peers[uid].joins]:
            self._drop(uid, farewell)
        self.tick(time.monotonic())

    def add_joiner(self, member: Member, channel: Channel) -> None:
        self._peers.setdefault(member.uid, _Peer(member, dials=False, joins=True))
        self.adopt(member.uid, channel)

    def drop_joiner(self, uid: str) -> None:
        if uid in self._peers and self._peers[uid].joins:
            self._drop(uid, None)

    def adopt(self, uid: str, channel: Channel) -> None:
        """Uses the connection for the peer in place of an earlier one. Closes it if there is no such peer."""
        peer = self._peers.get(uid)
        if peer is None:
            channel.close_when_sent()
            return
        if peer.channel is not None and peer.channel is not channel:
            peer.channel.close()
        peer.channel = channel
        channel.on_frame = lambda kind, header: self._frame(peer, channel, kind, header)
        channel.on_end = lambda reason: self._ended(peer, channel, reason)
        self._hear(peer)
        peer.redial_s = _REDIAL_S
        self._stop_dialing(peer)
        channel.send(frames.MESSAGE, self._beat())
        self._listener.on_connected(uid)

    def send(self, uid: str, message: dict) -> None:
        """Sends if there is a connection. What matters is sent again by whoever waits for an answer."""
        peer = self._peers.get(uid)
        if peer is not None and peer.channel is not None:
            peer.channel.send(frames.MESSAGE, message)

    def broadcast(self, message: dict) -> None:
        for uid in list(self._peers):
            self.send(uid, message)

    def set_dead(self, uid: str, reason: str) -> None:
        """The process is proven dead. Its connection is closed, and it is told nothing any more."""
        if uid in self.dead or uid == self._me.uid:
            return
        self.dead[uid] = reason
        if uid in self._peers:
            self._drop(uid, None)
        self._quiet_then[uid] = {other for other, peer in self._peers.items() if self._is_quiet(peer)}
        self._listener.on_dead(uid, reason)

    def stood_still(self, seconds: float) -> None:
        """This process did not run for so long, so nobody was silent meanwhile."""
        for peer in self._peers.values():
            peer.heard = min(time.monotonic(), peer.heard + seconds)
            peer.is_unheard = peer.is_unheard or seconds > self._silence_s / 2

    def tick(self, now: float) -> None:
        if now - self._beaten >= self._beat_s:
            self._beaten = now
            self.broadcast(self._beat())
        for uid, peer in list(self._peers.items()):
            quiet_s = now - peer.heard
            if peer.joins:
                if quiet_s > self._silence_s:
                    self._lose_joiner(peer, f"it said nothing for {quiet_s:.1f} s")
                continue
            patience_s = self._late_s if peer.channel is not None else 0.0 if peer.dials or peer.why else _UNDIALED_S
            needed = quiet_s > patience_s
            if peer.dial is not None and now - peer.dialed > _DIAL_S:
                self._stop_dialing(peer)
            if needed and peer.dial is None and now - peer.dialed > peer.redial_s:
                peer.redial_s = min(2 * peer.redial_s, _MAX_REDIAL_S)
                self._reach(uid, peer, now)
            if quiet_s > self._silence_s and not peer.is_silent:
                peer.is_silent = True
                peer.why = peer.why or "nothing arrives from it"
                self._listener.on_silence()

    def close(self, farewell: dict | None = None) -> None:
        for uid in list(self._peers):
            self._drop(uid, farewell)

    def _drop(self, uid: str, farewell: dict | None) -> None:
        peer = self._peers.pop(uid)
        self._stop_dialing(peer)
        if peer.channel is not None:
            if farewell is not None:
                peer.channel.send(frames.MESSAGE, farewell)
            peer.channel.close_when_sent()

    def _stop_dialing(self, peer: _Peer) -> None:
        if peer.dial is not None:
            peer.dial.close()
            peer.dial = None

    def _hear(self, peer: _Peer) -> None:
        peer.heard = time.monotonic()
        if peer.is_silent or peer.is_unheard:
            peer.is_silent = peer.is_unheard = False
            self._listener.on_silence()

    def _frame(self, peer: _Peer, channel: Channel, kind: int, message: dict) -> None:
        uid = peer.member.uid
        if self._peers.get(uid) is not peer or kind != frames.MESSAGE:
            channel.close()
            return
        self._hear(peer)
        if message.get("type") == "goodbye":
            self.set_dead(uid, f"it has left: {message.get('reason', '')}")
        else:
            self._listener.on_message(uid, message)

    def _ended(self, peer: _Peer, channel: Channel, reason: str) -> None:
        uid = peer.member.uid
        if peer.channel is not channel or self._peers.get(uid) is not peer:
            return
        peer.channel, peer.why = None, reason
        if peer.joins:
            self._lose_joiner(peer, reason)
        elif peer.dial is None:
            self._reach(uid, peer, time.monotonic())

    def _lose_joiner(self, peer: _Peer, reason: str) -> None:
        uid = peer.member.uid
        self._drop(uid, None)
        self._listener.on_joiner_lost(uid, reason)

    def _reach(self, uid: str, peer: _Peer, now: float) -> None:
        """Dials the member: for a new connection, or, as the higher rank, to see whether it lives."""
        peer.dialed = now

        def connected(channel: Channel) -> None:
            peer.dial = channel
            role = "link" if peer.dials else "probe"
            channel.on_frame = lambda kind, reply: self._answered(uid, peer, channel, kind, reply)
            channel.on_end = lambda reason: failed(False, reason)
            channel.send(frames.HELLO, {"role": role, "job": self.job, "uid": self._me.uid, "to": uid})

        def failed(was_refused: bool, reason: str) -> None:
            if self._peers.get(uid) is not peer:
                return
            peer.dial = None
            if was_refused:
                self.set_dead(uid, peer.why or reason)
            elif peer.channel is None:
                peer.why = reason

        peer.dial = Dial(self._loop, peer.member.host, peer.member.port, connected, failed)

    def _answered(self, uid: str, peer: _Peer, channel: Channel, kind: int, reply: dict) -> None:
        peer.dial = None
        if self._peers.get(uid) is not peer or kind != frames.REPLY:
            channel.close()
            return
        if reply.get("uid") != uid:
            channel.close()
            self.set_dead(uid, f"another process listens at {peer.member.address}")
            return
        answer = reply.get("answer")
        if answer == "ok" and peer.dials:
            self.adopt(uid, channel)
            return
        channel.close()
        if answer in ("ok", "later"):
            self._hear(peer)
        elif answer == "not a member":
            self._listener.on_not_a_member(int(reply["number"]))
