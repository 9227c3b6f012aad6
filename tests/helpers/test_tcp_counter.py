"""The byte counter against sockets that send a known number of bytes and close."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from tcp_counter import tcp_nbytes_sent

pytestmark = pytest.mark.skipif(tcp_nbytes_sent() is None, reason="this kernel does not count the bytes of a socket")


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as client, listener.accept()[0] as server:
        yield client, server


def send(source: socket.socket, target: socket.socket, nbytes: int) -> None:
    """Sends bytes and waits until they have arrived, so that they have been counted."""
    receiver = threading.Thread(target=target.recv, args=(nbytes, socket.MSG_WAITALL))
    receiver.start()
    source.sendall(b"x" * nbytes)
    receiver.join()


def test_a_closed_socket_still_counts():
    before = tcp_nbytes_sent()
    with connected() as (client, server):
        send(client, server, 5_000)
        assert tcp_nbytes_sent() - before == 5_000
    assert tcp_nbytes_sent() - before == 5_000
    with connected() as (client, server):
        send(client, server, 11)
        assert tcp_nbytes_sent() - before == 5_011
