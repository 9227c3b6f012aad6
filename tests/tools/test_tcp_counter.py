"""The byte counter against sockets that send a known number of bytes."""

import socket
import threading

import pytest

from fusedcomm.tools.tcp_counter import tcp_nbytes_sent

pytestmark = pytest.mark.skipif(tcp_nbytes_sent() is None, reason="this kernel does not count the bytes of a socket")


def connected_pair(host: str, family: socket.AddressFamily) -> tuple[socket.socket, socket.socket]:
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        try:
            listener.bind((host, 0))
        except OSError as error:
            pytest.skip(f"no address {host} here: {error}")
        listener.listen()
        client = socket.create_connection(listener.getsockname()[:2])
        server, _ = listener.accept()
    return client, server


def send(source: socket.socket, target: socket.socket, numel: int) -> None:
    """Sends `numel` bytes and waits until they have arrived, so that they have been counted."""

    def receive():
        left = numel
        while left:
            left -= len(target.recv(min(left, 1 << 16)))

    receiver = threading.Thread(target=receive)
    receiver.start()
    source.sendall(b"x" * numel)
    receiver.join()


@pytest.mark.parametrize(
    "host, family", [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)], ids=["ipv4", "ipv6"]
)
def test_counts_what_was_sent_both_ways(host, family):
    client, server = connected_pair(host, family)
    with client, server:
        before = tcp_nbytes_sent()
        send(client, server, 3_000_001)
        send(server, client, 77)
        assert tcp_nbytes_sent() - before == 3_000_078


def test_a_closed_socket_still_counts():
    client, server = connected_pair("127.0.0.1", socket.AF_INET)
    before = tcp_nbytes_sent()
    send(client, server, 5_000)
    assert tcp_nbytes_sent() - before == 5_000
    client.close()
    server.close()
    assert tcp_nbytes_sent() - before == 5_000

    client, server = connected_pair("127.0.0.1", socket.AF_INET)
    with client, server:
        send(client, server, 11)
        assert tcp_nbytes_sent() - before == 5_011


def test_what_is_not_tcp_does_not_count():
    client, server = socket.socketpair()
    before = tcp_nbytes_sent()
    with client, server:
        send(client, server, 1_000)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"x" * 1_000, receiver.getsockname())
            assert tcp_nbytes_sent() == before
