"""The port where a process listens, and the strangers that connect to it."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

from fusedcomm.log import report
from fusedcomm.members.errors import FrameError
from fusedcomm.members.plane import frames
from fusedcomm.members.plane.network import Connection
from fusedcomm.ranks import own_address

# Seconds within which whoever connects says who it is.
HELLO_S = 5.0
# Connections whose hello has not arrived, beside one of each member. The oldest gives way to the next one, so they hold
# at most so many headers.
MAX_STRANGERS = 32
# Strangers of which a line is logged; later ones are only counted.
_MAX_LOGGED = 20


def numeric_host(host: str | None) -> str:
    """A numeric address of `host`; of this host if None, and 127.0.0.1 if its name has no address that it owns."""
    if host is not None:
        return own_address.numeric(host)
    with contextlib.suppress(OSError):
        own = own_address.numeric(own_address.host_name())
        listen(own).close()
        return own
    return "127.0.0.1"


def listen(host: str) -> socket.socket:
    """A listening socket at a free port of the numeric address."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024)


class Listener:
    """Awaits on_hello(connection, header) for each connection that begins with a hello. Others are closed.

    num_members: returns how many may dial at the same moment, as all do when the training begins.
    """

    def __init__(self, on_hello: Callable[[Connection, dict], Awaitable[None]], num_members: Callable[[], int]) -> None:
        self._on_hello, self._num_members = on_hello, num_members
        self._strangers: dict[Connection, str] = {}  # and why they have to go; empty while they need not
        self._num_refused = 0

    async def meet(self, connection: Connection) -> None:
        """A process has connected."""
        if len(self._strangers) >= (most := MAX_STRANGERS + self._num_members()):
            oldest = next(stranger for stranger, why in self._strangers.items() if not why)
            self._strangers[oldest] = f"{most} others that had said nothing came after it"
            oldest.abort()
        self._strangers[connection] = ""
        try:
            kind, hello, _ = await asyncio.wait_for(connection.receive(), HELLO_S)
        except asyncio.TimeoutError:
            self.refuse(connection, f"said nothing for {HELLO_S:g} s")
        except (FrameError, EOFError, OSError) as error:
            self.refuse(connection, self._strangers[connection] or str(error))
        else:
            await self._greet(connection, kind, hello)
        finally:
            self._strangers.pop(connection, None)

    async def _greet(self, connection: Connection, kind: int, hello: dict) -> None:
        del self._strangers[connection]
        if kind != frames.HELLO:
            self.refuse(connection, f"it began with a frame of kind {kind}, no hello")
            return
        try:
            await self._on_hello(connection, hello)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self.refuse(connection, f"its hello lacks or misuses {error}")

    def refuse(self, connection: Connection, reason: str) -> None:
        """Closes the connection of a stranger, and logs one line."""
        connection.close()
        self._num_refused += 1
        if self._num_refused <= _MAX_LOGGED:
            more = "; further ones are refused without a line" if self._num_refused == _MAX_LOGGED else ""
            text = reason.removeprefix("fusedcomm: ")
            report(lambda: f"fusedcomm: members refused a connection from {connection.peer}: {text}{more}")
