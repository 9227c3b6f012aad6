"""TCP proxies between ranks, which flip single bits of what gloo sends.

Ranks find each other by the addresses that they set in the store. Each rank uses the store through a proxy of its own,
which replaces every address that the rank sets by that of a further proxy. All bytes between ranks then pass a proxy,
which knows gloo's messages: a header of 48 bytes, whose first 8 have the length, and what follows.
"""

import contextlib
import dataclasses
import re
import socket
import struct
import threading
from collections.abc import Callable
from functools import partial

HEADER_NBYTES = 48
# What a rank that connects says first: which of the listener's pairs it means.
GREETING_NBYTES = 8

# A sockaddr_in in a sockaddr_storage: family, port, address, zeros.
_HOST = "127.0.0.1"
_SEARCHED_PORTS = 64
_ADDRESS = re.compile(rb"\x02\x00(..)" + re.escape(socket.inet_aton(_HOST)) + rb"\x00{8}", re.DOTALL)


@dataclasses.dataclass
class Flip:
    """One bit to flip.

    Args:
        sender: the rank whose messages may be hit, among two ranks.
        least_nbytes: only messages with at least as many bytes after the header count.
        skipped: messages that count and pass unchanged before.
        position: where in the message, from 0 to below 1: a fraction of its bits.
        in_header: whether the bit is one of the header instead.
    """

    sender: int
    least_nbytes: int = 4096
    skipped: int = 0
    position: float = 0.5
    in_header: bool = False
    done: threading.Event = dataclasses.field(default_factory=threading.Event)

    def takes(self, sender: int, nbytes: int) -> bool:
        """Whether it hits this message. Counts it."""
        if self.done.is_set() or sender != self.sender or nbytes < self.least_nbytes:
            return False
        if self.skipped:
            self.skipped -= 1
            return False
        self.done.set()
        return True


class FlippingProxies:
    """The proxies of two ranks, whose store listens at `store_port` of this host. They use its loopback device.

    ``ports[rank]`` is where a rank finds the store. Set `flip` at any time. Use it in a ``with`` block.
    """

    def __init__(self, store_port: int) -> None:
        self.flip: Flip | None = None
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._proxied: dict[bytes, bytes] = {}
        self.ports = []
        for rank in range(2):
            listener = socket.create_server((_HOST, 0))
            self.ports.append(listener.getsockname()[1])
            self._serve(listener, (_HOST, store_port), partial(self._replaced, rank), lambda data: data)

    def __enter__(self) -> "FlippingProxies":
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def _serve(
        self, listener: socket.socket, target: tuple[str, int], to_target: "Change", from_target: "Change"
    ) -> None:
        self._keep(listener)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    server = socket.create_connection(target)
                    for each in (client, server):
                        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        self._keep(each)
                    self._pump(client, server, to_target)
                    self._pump(server, client, from_target)

        threading.Thread(target=accept, daemon=True).start()

    def _keep(self, each: socket.socket) -> None:
        with self._lock:
            self._sockets.append(each)

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, change: "Change") -> None:
        """Carries bytes until a side closes."""
        if isinstance(change, _Messages):
            change = change.fresh()

        def carry() -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 20):
                    target.sendall(change(data))
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)

        threading.Thread(target=carry, daemon=True).start()

    def _replaced(self, rank: int, data: bytes) -> bytes:
        """What a rank says to the store, with its addresses replaced."""

        def replace(match: re.Match) -> bytes:
            port = match[1]
            if port not in self._proxied:
                self._proxied[port] = self._add_proxy(rank, int.from_bytes(port, "big"))
            return b"\x02\x00" + self._proxied[port] + socket.inet_aton(_HOST) + bytes(8)

        return _ADDRESS.sub(replace, data)

    def _add_proxy(self, rank: int, port: int) -> bytes:
        """Returns the port of a new proxy for this port of a rank.

        It is next to the real one: of two ranks the one with the greater address connects to the other, and each
        compares its own address with that of the other's proxy. Two ranks whose ports are neighbors do not connect.
        """
        for near in range(port + 1, port + _SEARCHED_PORTS):
            with contextlib.suppress(OSError):
                listener = socket.create_server((_HOST, near))
                break
        else:
            raise RuntimeError(f"no free port next to {port}")
        inward, outward = _Messages(self, 1 - rank, GREETING_NBYTES), _Messages(self, rank, 0)
        self._serve(listener, (_HOST, port), inward, outward)
        return near.to_bytes(2, "big")


Change = Callable[[bytes], bytes]
"""What a proxy makes of the bytes of one direction."""


class _Messages:
    """Follows the messages of one direction of a connection, and flips what is to be flipped."""

    def __init__(self, proxies: FlippingProxies, sender: int, greeting_nbytes: int) -> None:
        self._proxies, self._sender, self._greeting_nbytes = proxies, sender, greeting_nbytes
        self._passing = greeting_nbytes  # bytes to pass before the next header
        self._header = bytearray()
        self._flipped: tuple[int, int] | None = None  # (bytes until that one, bit)

    def fresh(self) -> "_Messages":
        """One for a new connection."""
        return _Messages(self._proxies, self._sender, self._greeting_nbytes)

    def __call__(self, data: bytes) -> bytes:
        changed = bytearray(data)
        at = 0
        while at < len(changed):
            if self._passing:
                step = min(self._passing, len(changed) - at)
                self._flip_within(changed, at, step)
                self._passing -= step
            else:
                step = min(HEADER_NBYTES - len(self._header), len(changed) - at)
                self._header += changed[at : at + step]
                if len(self._header) == HEADER_NBYTES:
                    self._begin_message(changed, at + step - HEADER_NBYTES)
            at += step
        return bytes(changed)

    def _begin_message(self, changed: bytearray, header_at: int) -> None:
        (nbytes,) = struct.unpack_from("<Q", self._header)
        self._header.clear()
        self._passing = nbytes - HEADER_NBYTES
        flip = self._proxies.flip
        if flip is None or not flip.takes(self._sender, self._passing):
            return
        bits = 8 * (HEADER_NBYTES if flip.in_header else self._passing)
        byte, bit = divmod(int(flip.position * bits), 8)
        if not flip.in_header:
            self._flipped = (byte, bit)
        elif header_at >= 0:  # else its first bytes have been sent
            changed[header_at + byte] ^= 1 << bit

    def _flip_within(self, changed: bytearray, at: int, step: int) -> None:
        if self._flipped is None:
            return
        byte, bit = self._flipped
        if byte < step:
            changed[at + byte] ^= 1 << bit
            self._flipped = None
        else:
            self._flipped = (byte - step, bit)
