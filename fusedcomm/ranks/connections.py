"""What the kernel knows of this process's TCP connections, and the cut links of a network that follow from it."""

import contextlib
import ctypes
import dataclasses
import os
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
_ESTABLISHED = 1
_TCP_INFO = struct.Struct("=8B24I3Q")
"""struct tcp_info of <linux/tcp.h>, up to tcpi_bytes_acked."""
_MOST_NBYTES = 256
_libc = ctypes.CDLL(None)
_SENT_AGAIN = 3
"""Transmissions of the same bytes before they count as unacknowledged: a busy link drops some once or twice."""
MAX_LISTED = 8
"""A report lists at most this many ranks or connections of a kind: on a thousand ranks it must stay readable."""
KEEP_IDLE_S, KEEP_INTERVAL_S, KEEP_COUNT = 15, 5, 4
"""A peer that does not answer at all counts as lost after KEEP_IDLE_S + KEEP_COUNT × KEEP_INTERVAL_S seconds."""
_MIN_CUT_S = 2.0
"""For a shorter time, a busy link may just have dropped the same packet a few times."""


@dataclasses.dataclass
class Connections:
    """All TCP connections of this process. Addresses are numeric, without ports. Empty except on Linux: other systems
    do not report these numbers."""

    own: set[str] = dataclasses.field(default_factory=set)
    """The local addresses."""
    unacked_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """By remote address: the longest time for which the remote end has not acknowledged bytes that were sent several
    times. The kernel of a stopped process still acknowledges, so that host or the link to it is down."""


def connections() -> Connections:
    """Adds up this process's connections."""
    found = Connections()
    for fd, info in _sockets():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.own.add(_end(_libc.getsockname, fd))
            if unacked_s := _unacked_s(info):
                address = _end(_libc.getpeername, fd)
                found.unacked_s[address] = max(unacked_s, found.unacked_s.get(address, 0.0))
    return found


def kept_alive(make: Callable[[], T]) -> tuple[T, list[int]]:
    """What `make` returns, and the descriptors of the connections that it has opened: the loss of a silent peer ends
    them, too. Nothing is probed while sent data are not acknowledged: they would be sent again for a quarter of an
    hour. Connections keep their modes elsewhere than on Linux."""
    before = _open_ones()
    made = make()
    found = sorted(_open_ones() - before)
    lost_after_ms = 1000 * (KEEP_IDLE_S + KEEP_COUNT * KEEP_INTERVAL_S)
    for fd in found:
        _set(fd, socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, KEEP_IDLE_S),
            (socket.TCP_KEEPINTVL, KEEP_INTERVAL_S),
            (socket.TCP_KEEPCNT, KEEP_COUNT),
            (socket.TCP_USER_TIMEOUT, lost_after_ms),
        ):
            _set(fd, socket.IPPROTO_TCP, option, value)
    return made, found


def _open_ones() -> set[int]:
    return {fd for fd, info in _sockets() if info[0] == _ESTABLISHED}


def _sockets() -> list[tuple[int, tuple[int, ...]]]:
    """The descriptors of this process's TCP connections, with what the kernel says of each; see _TCP_INFO."""
    found = []
    with contextlib.suppress(OSError):  # only Linux lists them
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # no TCP connection, or closed meanwhile
                said = _asked(_libc.getsockopt, int(name), socket.IPPROTO_TCP, socket.TCP_INFO)
                found.append((int(name), _TCP_INFO.unpack_from(said)))
    return found


def _set(fd: int, level: int, option: int, value: int) -> None:
    _libc.setsockopt(fd, level, option, ctypes.byref(ctypes.c_int(value)), ctypes.sizeof(ctypes.c_int))


def _asked(call: Callable[..., int], *arguments: int) -> bytes:
    """What one of libc's functions writes for a descriptor. A socket object of Python's would change the mode of
    somebody else's connection, where the script has called socket.setdefaulttimeout()."""
    written, nbytes = ctypes.create_string_buffer(_MOST_NBYTES), ctypes.c_uint(_MOST_NBYTES)
    if call(*arguments, written, ctypes.byref(nbytes)) != 0:
        raise OSError
    return written.raw


def _end(call: Callable[..., int], fd: int) -> str:
    name = _asked(call, fd)
    family = int.from_bytes(name[:2], sys.byteorder)
    address = socket.inet_ntop(family, name[4:8] if family == socket.AF_INET else name[8:24])
    return address.removeprefix("::ffff:")  # an IPv4 address on a socket for both IPv4 and IPv6


def _unacked_s(info: Sequence[int]) -> float:
    """Seconds for which bytes have been sent again and again without an acknowledgement; 0.0 if there are none."""
    retransmits, backoff, rto_us, unacked, last_sent_ms, last_acknowledged_ms = (info[i] for i in (2, 4, 8, 12, 17, 20))
    if unacked == 0 or retransmits < _SENT_AGAIN:
        return 0.0
    # The timeout doubles with each transmission, so all before the last one took a little less than the next will.
    sending_s = rto_us * 1e-6 * (1 - 0.5**backoff)
    # Nor is it longer than the last acknowledgement is ago. That alone says too much: the connection may have been
    # idle.
    return min(sending_s + last_sent_ms * 1e-3, last_acknowledged_ms * 1e-3)


@dataclasses.dataclass
class Traffic:
    """What one rank says of its connections: its addresses, and by remote address seconds without an
    acknowledgement."""

    own: list[str] = dataclasses.field(default_factory=list)
    unacked_s: dict[str, float] = dataclasses.field(default_factory=dict)


class Network:
    """The hosts of the ranks. Ranks that have an address in common, other than loopback, are on one host."""

    def __init__(self, traffic: Mapping[int, Traffic]) -> None:
        self._host_of: dict[str, int] = {}
        self._ranks: list[list[int]] = []
        self._unacked_s: dict[tuple[int, int], float] = {}
        """By sending and receiving host."""
        of_rank = {rank: self._place(rank, said.own) for rank, said in traffic.items()}
        for rank, said in traffic.items():
            # Not connections to addresses of no rank, and not those within a host, which use no network.
            links = {address: (of_rank[rank], to) for address, to in self._host_of.items() if to != of_rank[rank]}
            for address, link in links.items():
                self._unacked_s[link] = max(self._unacked_s.get(link, 0.0), said.unacked_s.get(address, 0.0))

    def _place(self, rank: int, own: Sequence[str]) -> int:
        host = next((self._host_of[address] for address in own if address in self._host_of), len(self._ranks))
        if host == len(self._ranks):
            self._ranks.append([])
        self._ranks[host].append(rank)
        self._host_of.update({one: host for one in own if not one.startswith("127.") and one != "::1"})
        return host

    def cuts(self) -> list[tuple[list[int], list[int], float, float]]:
        """Pairs of hosts between which bytes do not arrive in one direction at least: the ranks of both, and the
        seconds for which each got no acknowledgement from the other; 0.0 where that is not known."""
        cut = {link: seconds for link, seconds in self._unacked_s.items() if seconds >= _MIN_CUT_S}
        pairs = sorted({tuple(sorted(link)) for link in cut})
        return [(self._ranks[a], self._ranks[b], cut.get((a, b), 0.0), cut.get((b, a), 0.0)) for a, b in pairs]


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 2"; "ranks 0, 1 and 5 more" with at most MAX_LISTED of them."""
    text = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:MAX_LISTED]))
    return f"{text} and {len(ranks) - MAX_LISTED} more" if len(ranks) > MAX_LISTED else text
