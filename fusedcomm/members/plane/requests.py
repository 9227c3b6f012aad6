"""Requests from one member to another, each on a connection that carries nothing else at the time."""

import asyncio
import concurrent.futures
import functools
import time
from collections.abc import Callable, Sequence

from fusedcomm.log import report
from fusedcomm.members.errors import FrameError, MemberLostError
from fusedcomm.members.plane import frames
from fusedcomm.members.plane.network import Connection, Network, say_hello
from fusedcomm.members.plane.view import Member

Handler = Callable[[dict], tuple[dict, Sequence[frames.Buffer]]]
"""Answers the header of a request by a header and a payload. Raising LookupError refuses, with its text."""

# Seconds between two attempts while the other member does not know this one yet, and for how long they go on.
_AGAIN_S = 0.05
_LATER_S = 30.0
_CONNECT_S = 5.0


class Requests:
    """Both sides of requests. ask() is for any thread; all else is the control thread's.

    handlers: by kind; each call has a thread of its own. is_peer(uid): whether the member is in the view and neither
    dead nor silent.
    """

    def __init__(self, network: Network, handlers: dict[str, Handler], is_peer: Callable[[str], bool]) -> None:
        self.uid, self.job = "", ""
        self._network, self._handlers, self._is_peer = network, handlers, is_peer
        self._open: dict[str, set[Connection]] = {}  # by the other's uid
        self._idle: dict[str, list[Connection]] = {}

    def ask(self, member: Member, kind: str, header: dict, into: memoryview | None = None) -> tuple[dict, memoryview]:
        """See :meth:`ControlPlane.request`."""
        try:
            answer, reply, payload = self._network.result(lambda: self._ask(member, kind, header, into))
        except concurrent.futures.CancelledError:
            raise _lost(member, kind, "this process has left") from None
        if answer == frames.REFUSAL:
            text = str(reply.get("error"))
            raise LookupError(text) if reply.get("lookup") else RuntimeError(text)
        return reply, payload

    async def serve(self, uid: str, connection: Connection) -> None:
        """Answers the requests that arrive over the connection, until it ends."""
        self._open.setdefault(uid, set()).add(connection)
        try:
            while True:
                _, header, _ = await connection.receive()
                kind, reply, payload = await self._network.on_thread(functools.partial(self._answer, header))
                await connection.send_all(kind, reply, payload)
                payload = ()
        except (OSError, EOFError, FrameError):
            pass
        finally:
            self._discard(uid, connection)

    def lose(self, uid: str) -> None:
        """Ends all requests to and from the process."""
        self._idle.pop(uid, None)
        for connection in self._open.pop(uid, set()):
            connection.abort()

    def close(self) -> None:
        for uid in list(self._open):
            self.lose(uid)

    async def _ask(
        self, member: Member, kind: str, header: dict, into: memoryview | None
    ) -> tuple[int, dict, memoryview]:
        connection = await self._connection(member)
        try:
            await connection.send_all(frames.REQUEST, {**header, "kind": kind})
            answer = await connection.receive(into, frames.MAX_PAYLOAD_NBYTES)
        except BaseException as error:
            self._discard(member.uid, connection)
            if isinstance(error, (OSError, EOFError, FrameError)):
                raise _lost(member, kind, error) from None
            raise
        self._idle.setdefault(member.uid, []).append(connection)
        return answer

    async def _connection(self, member: Member) -> Connection:
        idle = [connection for connection in self._idle.pop(member.uid, []) if connection.is_open]
        if idle:
            found = idle.pop()
            self._idle[member.uid] = idle
            return found
        hello = {"role": "request", "job": self.job, "uid": self.uid, "to": member.uid}
        until = time.monotonic() + _LATER_S
        while self._is_peer(member.uid) and time.monotonic() < until:
            try:
                connection, reply = await say_hello(member.host, member.port, hello, _CONNECT_S)
                if reply.get("answer") == "ok" and reply.get("uid") == member.uid and self._is_peer(member.uid):
                    self._open.setdefault(member.uid, set()).add(connection)
                    return connection
                connection.abort()
            except (OSError, EOFError, FrameError, asyncio.TimeoutError):
                pass
            await asyncio.sleep(_AGAIN_S)
        raise _lost(member, "a connection")

    def _discard(self, uid: str, connection: Connection) -> None:
        self._open.get(uid, set()).discard(connection)
        connection.abort()

    def _answer(self, header: dict) -> tuple[int, dict, Sequence[frames.Buffer]]:
        """(kind of the frame, header, payload) of the answer. Runs on a thread of its own."""
        kind = header.get("kind")
        try:
            handler = self._handlers.get(str(kind))
            if handler is None:
                raise LookupError(f"fusedcomm: this member answers no {kind!r}")
            return frames.ANSWER, *handler(header)
        except LookupError as error:
            text = str(error.args[0] if error.args else error)
            return frames.REFUSAL, {"error": text, "lookup": True}, ()
        except Exception as error:
            text = f"fusedcomm: the member's answer to {kind!r} failed: {error!r}"
            report(lambda: text)
            return frames.REFUSAL, {"error": text, "lookup": False}, ()


def _lost(member: Member, kind: str, why: object = "") -> MemberLostError:
    return MemberLostError(
        f"fusedcomm: {kind!r} was asked of the member at {member.address}, which was lost meanwhile"
        f"{f' ({why})' if str(why) else ''}: call recover() and ask another one"
    )
