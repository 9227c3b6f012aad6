"""The byte counter against sockets that send a known number of bytes."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from tcp_counter import tcp_nbytes_sent

pytestmark = pytest.mark.skipif(tcp_nbytes_sent() is None, reason="this kernel does not count the bytes of a socket")


@contextlib.contextmanager
def connected(host: str = "127.0.0.1", family: int = socket.AF_INET) -> Iterator[tuple[socket.socket, socket.socket]]:
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError as error:
        pytest.skip(f"no address {host} here: {error}")
    with listener, socket.create_connection(listener.getsockname()[:2]) as client, listener.accept()[0] as server:
        yield client, server


def send(source: socket.socket, target: socket.socket, nbytes: int) -> None:
    """Sends bytes and waits until they have arrived, so that they have been counted."""
    receiver = threading.Thread(target=target.recv, args=(nbytes, socket.MSG_WAITALL))
    receiver.start()
    source.sendall(b"x" * nbytes)
    receiver.join()


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_counts_what_was_sent_both_ways(host, family):
    with connected(host, family) as (client, server):
        before = tcp_nbytes_sent()
        send(client, server, 3_000_001)
        send(server, client, 77)
        assert tcp_nbytes_sent() - before == 3_000_078


def test_a_closed_socket_still_counts():
    before = tcp_nbytes_sent()
    with connected() as (client, server):
        send(client, server, 5_000)
        assert tcp_nbytes_sent() - before == 5_000
    assert tcp_nbytes_sent() - before == 5_000
    with connected() as (client, server):
        send(client, server, 11)
        assert tcp_nbytes_sent() - before == 5_011


def test_what_is_not_tcp_does_not_count():
    before = tcp_nbytes_sent()
    client, server = socket.socketpair()
    datagrams = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
    with client, server, datagrams[0] as receiver, datagrams[1] as sender:
        send(client, server, 1_000)
        receiver.bind(("127.0.0.1", 0))
        sender.sendto(b"x" * 1_000, receiver.getsockname())
        assert tcp_nbytes_sent() == before
