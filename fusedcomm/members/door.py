"""The port where a process listens, and the strangers that connect to it."""

import contextlib
import selectors
import socket
import time
from collections.abc import Callable

from fusedcomm.log import report

from . import frames
from .loop import Channel, Loop

# Seconds within which whoever connects says who it is.
HELLO_S = 5.0
# Connections whose hello has not arrived. The oldest gives way to the next one, so they hold at most so many headers.
MAX_STRANGERS = 32
# Strangers of which a line is logged; later ones are only counted.
_MAX_LOGGED = 20


def numeric_host(host: str | None) -> str:
    """A numeric address of `host`; of this host if None, and 127.0.0.1 if its name has no address that it owns."""
    if host is not None:
        return str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
    with contextlib.suppress(OSError):
        own = numeric_host(socket.gethostname())
        listen(own).close()
        return own
    return "127.0.0.1"


def listen(host: str) -> socket.socket:
    """A listening socket at a free port of the numeric address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.bind((host, 0))
        listening.listen(128)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


class Door:
    """Accepts connections and calls on_hello(channel, header) with each that begins with a hello. Others are closed.

    All calls are the loop's thread's.
    """

    def __init__(self, loop: Loop, listening: socket.socket, on_hello: Callable[[Channel, dict], None]) -> None:
        self._loop, self._listening, self._on_hello = loop, listening, on_hello
        self._strangers: dict[Channel, tuple[float, str]] = {}
        self._num_refused = 0
        loop.watch(listening, selectors.EVENT_READ, self._accept)

    def tick(self, now: float) -> None:
        for channel, (since, _) in list(self._strangers.items()):
            if now - since > HELLO_S:
                self.refuse(channel, f"said nothing for {HELLO_S:g} s")

    def refuse(self, channel: Channel, reason: str) -> None:
        """Closes the connection of a stranger, and logs one line."""
        _, address = self._strangers.pop(channel, (0.0, "a process"))
        channel.close_when_sent()
        self._num_refused += 1
        if self._num_refused <= _MAX_LOGGED:
            more = "; further ones are refused without a line" if self._num_refused == _MAX_LOGGED else ""
            text = reason.removeprefix("fusedcomm: ")
            report(lambda: f"fusedcomm: members refused a connection from {address}: {text}{more}")

    def close(self) -> None:
        self._loop.forget(self._listening)
        self._listening.close()
        for channel in self._strangers:
            channel.close()
        self._strangers.clear()

    def _accept(self, _: int) -> None:
        try:
            connection, address = self._listening.accept()
        except OSError:
            return  # it has gone again, or there is no descriptor left
        channel = Channel(self._loop, connection)
        if len(self._strangers) >= MAX_STRANGERS:
            self.refuse(next(iter(self._strangers)), f"{MAX_STRANGERS} others that had said nothing came after it")
        self._strangers[channel] = (time.monotonic(), f"{address[0]}:{address[1]}")
        channel.on_frame = lambda kind, header: self._frame(channel, kind, header)
        channel.on_end = lambda reason: self.refuse(channel, reason)

    def _frame(self, channel: Channel, kind: int, header: dict) -> None:
        if kind != frames.HELLO:
            self.refuse(channel, f"it began with a frame of kind {kind}, no hello")
            return
        channel.on_frame, channel.on_end = lambda kind, header: None, lambda reason: None
        try:
            self._on_hello(channel, header)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self.refuse(channel, f"its hello lacks or misuses {error}")
        self._strangers.pop(channel, None)
