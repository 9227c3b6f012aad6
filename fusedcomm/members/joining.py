"""How a process that wants to join finds the member that proposes it."""

import time
from collections.abc import Callable

from . import frames
from .loop import Channel, Dial, Loop
from .view import Member

# Seconds between two attempts, and how long one may take.
_AGAIN_S = 0.2
_ATTEMPT_S = 5.0


class Joining:
    """Asks members, one after the other, until one has accepted or refused. Only the loop's thread uses it.

    check: what the members' `check_join` is given. patience_s: for so long members may be unreachable.
    on_welcome(member, channel, job): the member proposes this process; its further messages arrive over the channel.
    on_refused(text).
    """

    def __init__(
        self,
        loop: Loop,
        check: dict,
        patience_s: float,
        on_welcome: Callable[[Member, Channel, str], None],
        on_refused: Callable[[str], None],
    ) -> None:
        self._loop, self._check, self._patience_s = loop, check, patience_s
        self._on_welcome, self._on_refused = on_welcome, on_refused
        self._addresses: list[tuple[str, int]] = []
        self._attempt: Dial | Channel | None = None
        self._began = self._not_before = self._heard = 0.0
        self._is_active = False
        self._last = "no attempt was made"
        self._proposed_by = ""

    def begin(self, me: Member, addresses: list[tuple[str, int]]) -> None:
        """addresses: (numeric host, port) of members; the first one is asked first."""
        self._me = me
        self._addresses = addresses + [known for known in self._addresses if known not in addresses]
        self._is_active, self._not_before, self._heard = True, 0.0, time.monotonic()
        self.tick(time.monotonic())

    def lose(self, uid: str) -> None:
        """A process is dead or gone. If it was to propose this one, the next one may."""
        if uid == self._proposed_by:
            self._proposed_by = ""
            self.begin(self._me, [])

    def tick(self, now: float) -> None:
        if not self._is_active:
            return
        if self._attempt is not None:
            if now - self._began > _ATTEMPT_S:
                self._attempt.close()
                self._again("it did not answer")
            return
        if now - self._heard > self._patience_s:
            self._is_active = False
            tried = ", ".join(f"{host}:{port}" for host, port in self._addresses)
            self._on_refused(
                f"fusedcomm: no member could be reached to join, tried: {tried}; why the last attempt failed: "
                f"{self._last}. Give the address of a member that trains, as its `address` says"
            )
            return
        if now >= self._not_before:
            self._began = now
            host, port = self._addresses[0]
            self._attempt = Dial(self._loop, host, port, self._connected, lambda _, reason: self._again(reason))

    def close(self) -> None:
        self._is_active = False
        if self._attempt is not None:
            self._attempt.close()

    def _again(self, reason: str, first: tuple[str, int] | None = None) -> None:
        """Tries `first` next, or the next one in turn."""
        self._attempt, self._last = None, reason
        self._not_before = time.monotonic() + _AGAIN_S
        self._addresses.append(self._addresses.pop(0))
        if first is not None:
            self._addresses = [first, *(known for known in self._addresses if known != first)]

    def _connected(self, channel: Channel) -> None:
        self._attempt = channel
        channel.on_end = self._again
        channel.on_frame = lambda kind, reply: self._answered(channel, kind, reply)
        hello = {"role": "join", "uid": self._me.uid, "member": self._me.to_json(), "check": self._check}
        channel.send(frames.HELLO, hello)

    def _answered(self, channel: Channel, kind: int, reply: dict) -> None:
        answer = reply.get("answer") if kind == frames.REPLY else None
        if answer == "welcome":
            self._is_active, self._attempt = False, None
            self._learn(reply)
            member = Member.from_json(reply["member"])
            self._proposed_by = member.uid
            self._on_welcome(member, channel, str(reply["job"]))
            return
        channel.close()
        if answer == "refused":
            self._is_active, self._attempt = False, None
            host, port = self._addresses[0]
            self._on_refused(f"fusedcomm: the member at {host}:{port} refuses this process: {reply['why']}")
        elif answer in ("later", "ask"):
            self._heard = time.monotonic()
            self._learn(reply)
            self._again("it is not ready", tuple(reply["ask"]) if answer == "ask" else None)
        else:
            self._again(f"its answer is {answer!r}")

    def _learn(self, reply: dict) -> None:
        for host, port in reply.get("others", ()):
            if (host, port) not in self._addresses:
                self._addresses.append((str(host), int(port)))
