"""The sockets of the coordinators: a star of TCP connections, every rank to rank 0.

Rank 0 listens and publishes its addresses with a random token in the store. The others try each address, prove that
they belong to the job with the token, and say who they are. Rank 0 answers with what it has learnt of all ranks. In a
job with a key each of these messages is signed for this connection: whoever can read the token needs the key, too.
"""

import contextlib
import dataclasses
import datetime
import hmac
import json
import os
import secrets
import socket
import struct
import time

import torch.distributed as dist

import fusedcomm.horovod.signatures as signatures
from fusedcomm.log import LOGGER

ADDRESSES_KEY = "control/addresses"
MAX_MESSAGE_NBYTES = 1 << 26
"""Longest message of the handshake: a host name for each of a million ranks."""
FIRST_TRY_S = 2.0
"""Seconds that a connection may take to each address at first; doubled in each round, since a busy host answers
late."""

_refused: set[str] = set()  # hosts that a warning has named


@dataclasses.dataclass(frozen=True)
class Star:
    """This rank's sockets, as file descriptors that the caller owns: rank 0 has one for each other rank in order, the
    others have one, to rank 0. `about`: what each rank has said about itself, in rank order. `token`: rank 0's random
    name for this star."""

    sockets: list[int]
    about: list[dict]
    token: str


def connect(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta, about: dict) -> Star:
    """Connects all ranks with rank 0. A collective call. `about` must be JSON; every rank gets everyone's.

    Raises TimeoutError that names the missing ranks (rank 0), or the addresses that were tried (others).
    """
    if size == 1:
        return Star([], [about], secrets.token_hex(16))
    return _accept_all(store, size, timeout, about) if rank == 0 else _join(store, rank, timeout, about)


def _accept_all(store: dist.Store, size: int, timeout: datetime.timedelta, about: dict) -> Star:
    token = secrets.token_hex(16)
    until = time.monotonic() + timeout.total_seconds()
    connected: dict[int, socket.socket] = {}
    hellos: list[dict] = [{"about": about}] * size
    with contextlib.ExitStack() as unfinished:
        with _listener(size) as listener:
            addresses = [[address, listener.getsockname()[1]] for address in own_addresses()]
            published = json.dumps({"token": token, "addresses": addresses}).encode()
            store.set(ADDRESSES_KEY, signatures.signed(published, ADDRESSES_KEY))
            while len(connected) < size - 1:
                listener.settimeout(_left(until, lambda: _missing(connected, size, timeout)))
                with contextlib.suppress(TimeoutError):
                    _accept_one(listener, token, size, connected, hellos, unfinished)
        abouts = [hello["about"] for hello in hellos]
        for peer, connection in connected.items():
            _send(connection, {"about": abouts}, "answer", token, peer, hellos[peer]["nonce"])
        unfinished.pop_all()
    return Star([_detach(connected[peer]) for peer in range(1, size)], abouts, token)


def _accept_one(
    listener: socket.socket,
    token: str,
    size: int,
    connected: dict[int, socket.socket],
    hellos: list[dict],
    unfinished: contextlib.ExitStack,
) -> None:
    """Accepts a connection, and closes it unless a rank of this job is at its other end."""
    connection, address = listener.accept()
    try:
        # A stranger that connects and says nothing must not hold up the ranks.
        connection.settimeout(FIRST_TRY_S)
        hello = _receive(connection, "hello", token)
        peer = hello["rank"]
        is_complete = {"about", "nonce"} <= hello.keys()
        if not hmac.compare_digest(hello["token"], token) or not 0 < peer < size or not is_complete:
            raise ValueError("not of this job")
    except signatures.RefusedError as error:
        connection.close()
        if address[0] not in _refused:
            _refused.add(address[0])
            LOGGER.warning("fusedcomm.horovod: refused a connection of %s:%d: its message %s", *address, error)
        return
    except (OSError, ValueError, KeyError, TypeError):
        connection.close()
        return
    if peer in connected:  # it has given its first connection up
        connected[peer].close()
    connected[peer], hellos[peer] = unfinished.enter_context(connection), hello


def _join(store: dist.Store, rank: int, timeout: datetime.timedelta, about: dict) -> Star:
    until = time.monotonic() + timeout.total_seconds()
    store.wait([ADDRESSES_KEY], timeout)
    try:
        published = json.loads(signatures.content_of(store.get(ADDRESSES_KEY), ADDRESSES_KEY))
    except signatures.RefusedError as error:
        raise signatures.RefusedError(
            f"fusedcomm.horovod: rank {rank} cannot trust where rank 0 is: {ADDRESSES_KEY!r} in the store {error}"
        ) from error
    # Rank 0's answer is signed for the nonce: the answer to an earlier init is a wrong one.
    hello = {"token": published["token"], "rank": rank, "about": about, "nonce": secrets.token_hex(16)}
    failures: dict[str, str] = {}
    try_s = FIRST_TRY_S
    while True:
        for host, port in published["addresses"]:
            left_s = _left(until, lambda: f"cannot reach rank 0: {failures}. Set GLOO_SOCKET_IFNAME to an interface "
                           "that all hosts share")  # fmt: skip
            try:
                connection = socket.create_connection((host, port), timeout=min(try_s, left_s))
            except OSError as error:
                failures[f"{host}:{port}"] = str(error)
                time.sleep(0.01)
                continue
            try:
                connection.settimeout(left_s)
                _send(connection, hello, "hello", published["token"])
                answer = _receive(connection, "answer", published["token"], rank, hello["nonce"])
            except (OSError, ValueError) as error:  # another program is at this address on this host
                failures[f"{host}:{port}"] = f"{type(error).__name__}: {error}"
                connection.close()
                time.sleep(0.01)
                continue
            return Star([_detach(connection)], answer["about"], published["token"])
        try_s *= 2


def own_addresses() -> list[str]:
    """Addresses at which others may reach this host, the likeliest first: those of the interfaces in
    GLOO_SOCKET_IFNAME, else those of the host's name and of the interface that leads outside; loopback last."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    found = [address for name in names if (address := _interface_address(name))]
    if not found:
        with contextlib.suppress(OSError):
            infos = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
            found += [info[4][0] for info in infos]
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outside:
            outside.connect(("192.0.2.1", 9))  # sends nothing: only asks for the route
            found.append(outside.getsockname()[0])
    # A host's name often stands for loopback.
    return list(dict.fromkeys([*(each for each in found if not each.startswith("127.")), "127.0.0.1"]))


def _interface_address(name: str) -> str | None:
    """The IPv4 address of an interface; None if there is no such interface or it has none."""
    import fcntl

    SIOCGIFADDR = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _listener(size: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("", 0))
    listener.listen(size)
    return listener


def _left(until: float, text) -> float:
    """Seconds left until then. Raises TimeoutError with what `text` returns if there are none."""
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise TimeoutError(f"fusedcomm.horovod: hvd.init() took too long: {text()}")
    return left_s


def _missing(connected: dict[int, socket.socket], size: int, timeout: datetime.timedelta) -> str:
    missing = [rank for rank in range(1, size) if rank not in connected]
    return (
        f"ranks {missing} of {size} have not connected to rank 0 within {timeout.total_seconds():.0f} s. Check that "
        "they run and call hvd.init(); HOROVOD_GLOO_TIMEOUT_SECONDS sets the time"
    )


def _send(connection: socket.socket, message: dict, *purpose: object) -> None:
    data = signatures.signed(json.dumps(message).encode(), *purpose)
    connection.sendall(struct.pack("!I", len(data)) + data)


def _receive(connection: socket.socket, *purpose: object) -> dict:
    """Raises ValueError if what comes is no message, or not signed for its purpose, and ConnectionError if the other
    end closes."""
    (nbytes,) = struct.unpack("!I", _receive_exactly(connection, 4))
    if nbytes > MAX_MESSAGE_NBYTES:
        raise ValueError(f"a message of {nbytes} bytes")
    return json.loads(signatures.content_of(_receive_exactly(connection, nbytes), *purpose))


def _receive_exactly(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = connection.recv(nbytes - len(data))
        if not part:
            raise ConnectionError("closed by the other end")
        data += part
    return data


def _detach(connection: socket.socket) -> int:
    """The socket's file descriptor, blocking, without delay of small messages, with a check that the peer lives."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection.detach()
