"""The sockets of the coordinators: a star of TCP connections, every rank to rank 0.

Rank 0 listens, and publishes its addresses with two random texts in the store, `token` and `proof`.

1. Another rank connects to an address, and sends the token and who it is.
2. Rank 0 answers with the proof. A rank that does not get it tries the next address.
3. When every rank has come, rank 0 sends each of them what it has learnt of all ranks.

Neither end reads more than the token or the proof of a stranger, and no stranger keeps rank 0 from the ranks.

In a job with a key what is published is signed, and what travels in its place is derived from it with the key: the
token for one address, the proof for one rank's nonce. Whoever can read the store needs the key, too.
"""

import contextlib
import dataclasses
import datetime
import hmac
import json
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Container

import torch.distributed as dist

import fusedcomm.horovod.signatures as signatures
from fusedcomm.log import LOGGER
from fusedcomm.ranks import own_address

ADDRESSES_KEY = "control/addresses"
TOKEN_NBYTES = 32
"""Length of the token and of the proof, which are hexadecimal digits."""
MAX_MESSAGE_NBYTES = 1 << 26
"""Longest message of the handshake: a host name for each of a million ranks."""
MAX_READ_NBYTES = 1 << 16
FIRST_TRY_S = 2.0
"""Seconds that a connection may take to each address at first; doubled in each round, since a busy host answers
late."""
HELLO_S = 10.0
"""Seconds from a connection until a rank has said who it is, and until rank 0 has answered with the proof; the latter
is doubled in each round, too."""
MAX_STRANGERS = 64
"""Connections beyond the ranks' that may be open before they have sent the token."""
_refused: set[str] = set()  # hosts that a warning has named
KEEP_IDLE_S, KEEP_INTERVAL_S, KEEP_COUNT = 15, 5, 4
"""A host that does not answer is lost after KEEP_IDLE_S + KEEP_COUNT · KEEP_INTERVAL_S seconds."""


@dataclasses.dataclass(frozen=True)
class Star:
    """This rank's sockets, as file descriptors that the caller owns: rank 0 has one for each other rank in order, the
    others have one, to rank 0. `about`: what each rank has said about itself, in rank order. `token`: rank 0's, which
    names this star."""

    sockets: list[int]
    about: list[dict]
    token: str


def connect(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta, about: dict) -> Star:
    """Connects all ranks with rank 0. A collective call. `about` must be JSON; every rank gets everyone's.

    Raises TimeoutError that names the missing ranks (rank 0), or the addresses that were tried (others).
    """
    if size == 1:
        return Star([], [about], secrets.token_hex(TOKEN_NBYTES // 2))
    return _accept_all(store, size, timeout, about) if rank == 0 else _join(store, rank, timeout, about)


def _accept_all(store: dist.Store, size: int, timeout: datetime.timedelta, about: dict) -> Star:
    token, proof = (secrets.token_hex(TOKEN_NBYTES // 2) for _ in range(2))
    deadline = time.monotonic() + timeout.total_seconds()
    with _Door(token, proof, size) as door:
        addresses = [[address, door.port] for address in door.addresses]
        published = json.dumps({"token": token, "proof": proof, "addresses": addresses}).encode()
        store.set(ADDRESSES_KEY, signatures.signed(published, ADDRESSES_KEY))
        while len(door.ranks) < size - 1:
            door.serve(_left(deadline, lambda: _missing(door.ranks, size, timeout)))
        abouts = [about, *(door.ranks[rank].about for rank in range(1, size))]
        connections = [door.ranks[rank].connection for rank in range(1, size)]
        for connection in connections:
            connection.settimeout(_left(deadline, lambda: "a rank does not read rank 0's answer"))
            connection.sendall(_message({"about": abouts}))
        return Star([_detach(connection) for connection in connections], abouts, token)


@dataclasses.dataclass(eq=False)
class _Guest:
    """Who has connected to rank 0. By `deadline` it must have sent `token`, then who it is: `about`, None before."""

    connection: socket.socket
    address: tuple[str, int]
    token: bytes
    deadline: float
    data: bytearray = dataclasses.field(default_factory=bytearray)
    about: dict | None = None


class _Door:
    """Rank 0's listener and everybody who has connected to it; all of them are served together. `ranks`: those that
    have said who they are. Its end closes every connection that has not been detached."""

    def __init__(self, token: str, proof: str, size: int) -> None:
        self._token, self._proof, self._size = token, proof, size
        self.ranks: dict[int, _Guest] = {}
        self._guests: list[_Guest] = []  # without those in `ranks`; the oldest first
        self.addresses = own_address.candidates()
        where = self.addresses[0] if len(self.addresses) == 1 else ""
        self._listener = socket.create_server((where, 0), backlog=size + MAX_STRANGERS)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def __enter__(self) -> "_Door":
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        self._listener.close()
        for guest in [*self._guests, *self.ranks.values()]:
            guest.connection.close()

    def serve(self, timeout_s: float) -> None:
        """Waits for something to happen, for at most so long, and deals with it."""
        now = time.monotonic()
        first_s = min([timeout_s, *(max(0.0, each.deadline - now) for each in self._guests)])
        for key, _ in self._selector.select(first_s):
            if key.data is None:
                self._let_in()
            elif key.data.connection.fileno() >= 0:  # it was not closed meanwhile
                self._read(key.data)
        now = time.monotonic()
        for guest in [each for each in self._guests if each.deadline <= now]:
            self._close(guest)

    def _let_in(self) -> None:
        with contextlib.suppress(OSError):  # it has left again
            connection, address = self._listener.accept()
            connection.setblocking(False)
            token = _token_for(self._token, connection.getsockname()[0])
            guest = _Guest(connection, address, token, time.monotonic() + HELLO_S)
            self._guests.append(guest)
            self._selector.register(connection, selectors.EVENT_READ, guest)
        if len(self._guests) > self._size + MAX_STRANGERS:
            self._close(self._guests[0])

    def _close(self, guest: _Guest) -> None:
        self._selector.unregister(guest.connection)
        guest.connection.close()
        self._guests = [each for each in self._guests if each is not guest]
        self.ranks = {rank: each for rank, each in self.ranks.items() if each is not guest}

    def _read(self, guest: _Guest) -> None:
        """Reads what has come, and closes the connection unless a rank of this job is at its other end."""
        try:
            part = guest.connection.recv(min(self._num_missing(guest), MAX_READ_NBYTES) or 1)
            # A rank that has said who it is says nothing more, but it may give its connection up.
            if not part or guest.about is not None:
                raise ConnectionError("closed by the other end")
            guest.data += part
            if self._num_missing(guest) == 0:
                self._welcome(guest, json.loads(guest.data[TOKEN_NBYTES + 4 :]))
        except BlockingIOError:
            return
        except signatures.RefusedError as error:
            host, port = guest.address
            self._close(guest)
            if host not in _refused:
                _refused.add(host)
                LOGGER.warning("fusedcomm.horovod: refused a connection of %s:%d: it %s", host, port, error)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            self._close(guest)

    def _num_missing(self, guest: _Guest) -> int:
        """Bytes to the end of the token and the length, and once they are there to the end of the message. Raises
        RefusedError for another token."""
        head, data = TOKEN_NBYTES + 4, guest.data
        if len(data) < head:
            return head - len(data)
        if not hmac.compare_digest(data[:TOKEN_NBYTES], guest.token):
            raise signatures.RefusedError("has not sent this job's token, or is a process without the job's key")
        return head + _message_nbytes(data[TOKEN_NBYTES:head]) - len(data)

    def _welcome(self, guest: _Guest, hello: dict) -> None:
        rank, about = hello["rank"], hello["about"]
        if not 0 < rank < self._size or about is None:
            raise ValueError("no rank of this job")
        guest.connection.sendall(_proof_for(self._proof, rank, hello.get("nonce")))
        if rank in self.ranks:  # it has given its first connection up
            self._close(self.ranks[rank])
        self._guests = [each for each in self._guests if each is not guest]
        guest.about = about
        self.ranks[rank] = guest


def _join(store: dist.Store, rank: int, timeout: datetime.timedelta, about: dict) -> Star:
    deadline = time.monotonic() + timeout.total_seconds()
    store.wait([ADDRESSES_KEY], timeout)
    try:
        published = json.loads(signatures.content_of(store.get(ADDRESSES_KEY), ADDRESSES_KEY))
    except signatures.RefusedError as error:
        raise signatures.RefusedError(
            f"fusedcomm.horovod: rank {rank} cannot trust where rank 0 is: {ADDRESSES_KEY!r} in the store {error}"
        ) from error
    nonce = secrets.token_hex(TOKEN_NBYTES // 2)
    expected = _proof_for(published["proof"], rank, nonce)
    hello = _message({"rank": rank, "about": about, "nonce": nonce})
    failures: dict[str, str] = {}

    def left() -> float:
        return _left(deadline, lambda: f"cannot connect with rank 0: {failures}. Set GLOO_SOCKET_IFNAME to an "
                     "interface that all hosts share")  # fmt: skip

    try_s = FIRST_TRY_S
    while True:
        for host, port in published["addresses"]:
            where, connect_s = f"{host}:{port}", min(try_s, left())
            try:
                connection = socket.create_connection((host, port), timeout=connect_s)
            except OSError as error:
                failures[where] = str(error)
                time.sleep(0.01)
                continue
            try:
                proof_deadline = min(deadline, time.monotonic() + try_s * HELLO_S / FIRST_TRY_S)
                connection.sendall(_token_for(published["token"], connection.getpeername()[0]) + hello)
                proof = _receive(connection, TOKEN_NBYTES, proof_deadline)
                if not hmac.compare_digest(proof, expected):
                    raise ValueError("another program is at this address")
                failures[where] = "rank 0 is there, and waits for other ranks"
                nbytes = _message_nbytes(_receive(connection, 4, deadline))
                answer = json.loads(_receive(connection, nbytes, deadline))
            except (OSError, ValueError) as error:
                connection.close()
                left()
                failures[where] = f"{type(error).__name__}: {error}"
                time.sleep(0.01)
                continue
            return Star([_detach(connection)], answer["about"], published["token"])
        try_s *= 2


def _left(deadline: float, text) -> float:
    """Seconds left. Raises TimeoutError with what `text` returns if there are none."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError(f"fusedcomm.horovod: hvd.init() took too long: {text()}")
    return left_s


def _missing(connected: Container[int], size: int, timeout: datetime.timedelta) -> str:
    missing = [rank for rank in range(1, size) if rank not in connected]
    return (
        f"ranks {missing} of {size} have not connected to rank 0 within {timeout.total_seconds():.0f} s. Check that "
        "they run and call hvd.init(); HOROVOD_GLOO_TIMEOUT_SECONDS sets the time"
    )


def _token_for(token: str, address: str) -> bytes:
    """Another program that is found at one of rank 0's addresses can do nothing with it at the others."""
    return signatures.derived(token, "token", address).encode()


def _proof_for(proof: str, rank: int, nonce: str | None) -> bytes:
    """The proof of an earlier init is a wrong one: the nonce is another."""
    return signatures.derived(proof, "proof", rank, nonce).encode()


def _message(content: dict) -> bytes:
    data = json.dumps(content).encode()
    return struct.pack("!I", len(data)) + data


def _message_nbytes(header: bytes | bytearray) -> int:
    """Raises ValueError if a message is too long."""
    (nbytes,) = struct.unpack("!I", header)
    if nbytes > MAX_MESSAGE_NBYTES:
        raise ValueError(f"a message of {nbytes} bytes")
    return nbytes


def _receive(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    """Raises ConnectionError if the other end closes, and TimeoutError unless all bytes come by then."""
    data = bytearray()
    while len(data) < nbytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left_s)
        part = connection.recv(nbytes - len(data))
        if not part:
            raise ConnectionError("closed by the other end")
        data += part
    return bytes(data)


def _detach(connection: socket.socket) -> int:
    """The socket's file descriptor, blocking, without delay of small messages, with a check that the peer lives."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    lost_after_ms = 1000 * (KEEP_IDLE_S + KEEP_COUNT * KEEP_INTERVAL_S)
    for option, value in (
        ("TCP_KEEPIDLE", KEEP_IDLE_S),
        ("TCP_KEEPINTVL", KEEP_INTERVAL_S),
        ("TCP_KEEPCNT", KEEP_COUNT),
        # Nothing is probed while sent data are not acknowledged: they would be sent again for a quarter of an hour.
        ("TCP_USER_TIMEOUT", lost_after_ms),
    ):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection.detach()
