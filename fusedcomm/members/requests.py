"""Requests from one member to another, each on a connection that carries nothing else at the time."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

from fusedcomm.log import report

from . import frames
from .errors import FrameError, MemberLostError
from .view import Member

Handler = Callable[[dict], tuple[dict, Sequence[frames.Buffer]]]
"""Answers the header of a request by a header and a payload. Raising LookupError refuses, with its text."""

# Seconds between two attempts while the other member does not know this one yet, and for how long they go on.
_AGAIN_S = 0.05
_LATER_S = 30.0
_CONNECT_S = 5.0
# Attempts of a request whose answer arrives damaged.
_MAX_DAMAGED = 3


def _report(text: str) -> None:
    report(lambda: text)


class Requests:
    """Both sides of requests: serve() answers others', ask() makes one. Any thread may call any method.

    is_peer(uid): whether the member is in the view and neither dead nor silent.
    """

    def __init__(self, handlers: dict[str, Handler], is_peer: Callable[[str], bool]) -> None:
        self.uid, self._handlers, self._is_peer = "", handlers, is_peer
        self._lock = threading.Lock()
        self._open: dict[str, set[socket.socket]] = {}  # by the other's uid
        self._idle: dict[str, list[socket.socket]] = {}
        self.job = ""

    def ask(self, member: Member, kind: str, header: dict, into: memoryview | None = None) -> tuple[dict, memoryview]:
        for attempt in range(_MAX_DAMAGED):
            connection = self._connection(member)
            try:
                frames.send(connection, frames.REQUEST, {**header, "kind": kind})
                answer, reply, payload = frames.receive(connection, into)
            except FrameError:
                self._discard(member.uid, connection)
                if not self._is_peer(member.uid):
                    raise self._lost(member, kind) from None
                if attempt == _MAX_DAMAGED - 1:
                    raise
                continue
            except (OSError, EOFError) as error:
                self._discard(member.uid, connection)
                raise self._lost(member, kind, error) from None
            except BaseException:
                self._discard(member.uid, connection)
                raise
            with self._lock:
                self._idle.setdefault(member.uid, []).append(connection)
            if answer == frames.REFUSAL:
                text = str(reply.get("error"))
                raise LookupError(text) if reply.get("lookup") else RuntimeError(text)
            return reply, payload
        raise AssertionError("unreachable")

    def serve(self, uid: str, connection: socket.socket) -> None:
        """Answers the requests that arrive over the connection, on a thread of its own."""
        self._register(uid, connection)
        threading.Thread(target=self._answer_all, args=(uid, connection), name="fc-members-serve", daemon=True).start()

    def lose(self, uid: str) -> None:
        """Ends all requests to and from the process."""
        with self._lock:
            idle = self._idle.pop(uid, [])
            connections = list(self._open.get(uid, ()))
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for connection in idle:
            self._discard(uid, connection)

    def close(self) -> None:
        for uid in list(self._open):
            self.lose(uid)

    def close_in_child(self) -> None:
        """In a forked child: closes what it has inherited, without a word to the others."""
        for connections in list(self._open.values()):
            for connection in list(connections):
                connection.close()

    def _register(self, uid: str, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open.setdefault(uid, set()).add(connection)

    def _discard(self, uid: str, connection: socket.socket) -> None:
        with self._lock:
            self._open.get(uid, set()).discard(connection)
        connection.close()

    def _lost(self, member: Member, kind: str, why: object = "") -> MemberLostError:
        return MemberLostError(
            f"fusedcomm: {kind!r} was asked of the member at {member.address}, which was lost meanwhile"
            f"{f' ({why})' if str(why) else ''}: call recover() and ask another one"
        )

    def _connection(self, member: Member) -> socket.socket:
        with self._lock:
            idle = self._idle.get(member.uid)
            if idle:
                return idle.pop()
        until = time.monotonic() + _LATER_S
        while self._is_peer(member.uid) and time.monotonic() < until:
            family = socket.AF_INET6 if ":" in member.host else socket.AF_INET
            connection = socket.socket(family, socket.SOCK_STREAM)
            self._register(member.uid, connection)
            try:
                connection.settimeout(_CONNECT_S)
                connection.connect((member.host, member.port))
                hello = {"role": "request", "job": self.job, "uid": self.uid, "to": member.uid}
                frames.send(connection, frames.HELLO, hello)
                _, reply, _ = frames.receive(connection, max_payload_nbytes=0)
                if reply.get("answer") == "ok" and reply.get("uid") == member.uid:
                    connection.settimeout(None)
                    return connection
            except (OSError, EOFError, FrameError):
                pass
            self._discard(member.uid, connection)
            time.sleep(_AGAIN_S)
        raise self._lost(member, "a connection")

    def _answer_all(self, uid: str, connection: socket.socket) -> None:
        owner = os.getpid()
        try:
            while os.getpid() == owner:
                _, header, _ = frames.receive(connection, max_payload_nbytes=0)
                kind = frames.ANSWER
                answer: dict = {}
                payload: Sequence[frames.Buffer] = ()
                try:
                    handler = self._handlers.get(str(header.get("kind")))
                    if handler is None:
                        raise LookupError(f"fusedcomm: this member answers no {header.get('kind')!r}")
                    answer, payload = handler(header)
                except LookupError as error:
                    kind, answer = (
                        frames.REFUSAL,
                        {"error": str(error.args[0] if error.args else error), "lookup": True},
                    )
                except Exception as error:
                    text = f"fusedcomm: the member's answer to {header.get('kind')!r} failed: {error!r}"
                    _report(text)
                    kind, answer = frames.REFUSAL, {"error": text, "lookup": False}
                frames.send(connection, kind, answer, payload)
                payload = ()
        except (OSError, EOFError, FrameError):
            pass
        finally:
            self._discard(uid, connection)
