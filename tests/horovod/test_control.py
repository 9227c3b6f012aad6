"""The star of sockets connects the ranks, and nobody else."""

import contextlib
import datetime
import errno
import json
import os
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from jobs import raised

from fusedcomm.horovod import control, signatures

KEY = "0123456789abcdef" * 4
SOON = datetime.timedelta(seconds=60)


def connect_all(size: int, before_join=lambda store: None) -> list[control.Star]:
    """The stars of `size` ranks, each in a thread of this process."""
    store = dist.HashStore()

    def run(rank: int) -> control.Star:
        if rank == 1:
            before_join(store)
        return control.connect(store, rank, size, SOON, {"number": rank * rank})

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def close(stars: list[control.Star]) -> None:
    for star in stars:
        for descriptor in star.sockets:
            os.close(descriptor)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_rank_is_connected_with_rank_0_and_knows_about_all(size):
    stars = connect_all(size)
    assert [len(star.sockets) for star in stars] == [size - 1] + [1] * (size - 1)
    for star in stars:
        assert star.about == [{"number": rank * rank} for rank in range(size)]
    for rank in range(1, size):
        os.write(stars[rank].sockets[0], bytes([rank]))
        assert os.read(stars[0].sockets[rank - 1], 1) == bytes([rank])
    close(stars)


def published_in(store: dist.Store) -> tuple[bytes, tuple[str, int]]:
    """The token, and an address of rank 0."""
    store.wait([control.ADDRESSES_KEY], SOON)
    published = json.loads(store.get(control.ADDRESSES_KEY))
    return published["token"].encode(), tuple(published["addresses"][-1])


def test_a_stranger_is_turned_away():
    def strange(store: dist.Store) -> None:
        token, address = published_in(store)
        for hello in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"",
            struct.pack("!I", 200_000) + b"[" * 200_000,
            b"0" * control.TOKEN_NBYTES + _message({"rank": 1, "about": {}}),
            token + _message({"rank": 9, "about": {}}),
            token + _message({"rank": 1}),
            token + _message([1, 2]),
            token + _message("x") + b"and more",
            token + struct.pack("!I", 200_000) + b"[" * 200_000,
            token + struct.pack("!I", control.MAX_MESSAGE_NBYTES + 1),
        ):
            with socket.create_connection(address, timeout=30) as stranger:
                _send_and_end(stranger, hello)
                with contextlib.suppress(ConnectionResetError):  # it was closed before all was read
                    assert stranger.recv(1) == b""

    stars = connect_all(3, strange)
    assert [star.about[2] for star in stars] == [{"number": 4}] * 3
    close(stars)


def test_ranks_are_let_in_beside_strangers_that_are_slow(monkeypatch):
    """They would hold up whoever reads one connection after another until SOON."""
    monkeypatch.setattr(control, "HELLO_S", 10 * SOON.total_seconds())
    strangers = []

    def strange(store: dist.Store) -> None:
        token, address = published_in(store)
        for said in (b"", b"0", token, token + struct.pack("!I", 1 << 20) + b" "):
            strangers.append(socket.create_connection(address, timeout=30))
            strangers[-1].sendall(said)

    close(connect_all(3, strange))
    for stranger in strangers:
        with stranger, contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b"", "closed once all ranks have come"


def test_a_stranger_that_says_nothing_is_closed_in_time(monkeypatch):
    monkeypatch.setattr(control, "HELLO_S", 0.2)

    def strange(store: dist.Store) -> None:
        with socket.create_connection(published_in(store)[1], timeout=30) as stranger:
            assert stranger.recv(1) == b""

    close(connect_all(2, strange))


def test_of_many_strangers_the_oldest_are_closed(monkeypatch):
    monkeypatch.setattr(control, "MAX_STRANGERS", 2)

    def strange(store: dist.Store) -> None:
        _, address = published_in(store)
        with contextlib.ExitStack() as strangers:
            first = strangers.enter_context(socket.create_connection(address, timeout=30))
            for _ in range(4):
                strangers.enter_context(socket.create_connection(address, timeout=30))
            assert first.recv(1) == b""

    close(connect_all(2, strange))


def test_a_rank_leaves_an_address_where_a_stranger_listens(monkeypatch):
    """One stranger says nothing, one too much. Neither is told more than the token."""
    monkeypatch.setattr(control, "HELLO_S", 0.4)
    silent, loud = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    with silent, loud, ThreadPoolExecutor(2) as threads:

        def shout() -> None:
            with loud.accept()[0] as connection, contextlib.suppress(OSError):
                connection.sendall(b"[" * 200_000)

        def join() -> control.Star:
            store = dist.HashStore()
            _, (host, port) = published_in(real)
            published = json.loads(real.get(control.ADDRESSES_KEY))
            others = [[host, each.getsockname()[1]] for each in (silent, loud)]
            store.set(control.ADDRESSES_KEY, json.dumps({**published, "addresses": [*others, [host, port]]}))
            return control.connect(store, 1, 2, SOON, {"number": 1})

        real = dist.HashStore()
        shouting = threads.submit(shout)
        joining = threads.submit(join)
        close([control.connect(real, 0, 2, SOON, {"number": 0}), joining.result()])
        shouting.result()


def test_the_time_counts_from_the_beginning_and_not_from_each_byte():
    """Rank 0's answer comes one byte at a time."""
    store, token = dist.HashStore(), "0" * control.TOKEN_NBYTES
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        addresses = [["127.0.0.1", listener.getsockname()[1]]]
        store.set(control.ADDRESSES_KEY, json.dumps({"token": token, "proof": token, "addresses": addresses}))

        def drip() -> None:
            connection, _ = listener.accept()
            listener.close()
            with connection, contextlib.suppress(OSError):
                connection.sendall(token.encode() + struct.pack("!I", 1 << 20))
                for _ in range(600):
                    connection.sendall(b" ")
                    time.sleep(0.05)

        dripping = threads.submit(drip)
        began = time.monotonic()
        kind, said = raised(control.connect, store, 1, 2, datetime.timedelta(seconds=1), {})
        assert kind == "TimeoutError" and "waits for other ranks" in said, said
        assert time.monotonic() - began < 25, "the bytes take 30 s"
        dripping.result()


def test_every_connection_is_given_up_when_its_host_is_lost():
    """Also while sent data are not acknowledged, when no probe is sent."""
    stars = connect_all(3)
    for star in stars:
        for descriptor in star.sockets:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                option = lambda name, connection=connection: connection.getsockopt(  # noqa: E731
                    socket.IPPROTO_TCP, getattr(socket, name)
                )
                assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                lost_after_s = option("TCP_KEEPIDLE") + option("TCP_KEEPCNT") * option("TCP_KEEPINTVL")
                assert option("TCP_USER_TIMEOUT") == 1000 * lost_after_s == 35000
    close(stars)


def test_who_has_read_the_token_but_not_the_key_is_turned_away_by_name(monkeypatch, caplog):
    monkeypatch.setenv(signatures.KEY, KEY)
    monkeypatch.setattr(control, "_refused", set())
    heard = []

    def strange(store: dist.Store) -> None:
        store.wait([control.ADDRESSES_KEY], SOON)
        record = store.get(control.ADDRESSES_KEY)
        published = json.loads(record[record.index(b'{"token"') :])
        hello = _message({"rank": 1, "about": {"number": 1}})
        elsewhere = signatures.derived(published["token"], "token", "192.0.2.1")  # seen by a program at that address
        for token in (published["token"], elsewhere):
            with socket.create_connection(tuple(published["addresses"][-1]), timeout=30) as stranger:
                _send_and_end(stranger, token.encode() + hello)
                with contextlib.suppress(ConnectionResetError):
                    heard.append(stranger.recv(1))

    stars = connect_all(3, strange)
    assert [star.about for star in stars] == [[{"number": rank * rank} for rank in range(3)]] * 3
    assert len({star.token for star in stars}) == 1 and set(heard) <= {b""}
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and "refused a connection of 127.0.0.1:" in warnings[0]
    assert "is a process without the job's key" in warnings[0] and KEY not in warnings[0]
    close(stars)


def test_addresses_that_a_stranger_has_published_are_refused(monkeypatch):
    published = json.dumps({"token": "x", "proof": "y", "addresses": [["127.0.0.1", 9]]}).encode()
    monkeypatch.setenv(signatures.KEY, KEY)
    of_another_record = signatures.signed(published, "control/other")
    honest = signatures.signed(published, control.ADDRESSES_KEY)
    for data in (published, of_another_record):
        store = dist.HashStore()
        store.set(control.ADDRESSES_KEY, data)
        kind, said = raised(control.connect, store, 1, 2, SOON, {})
        assert kind == "RefusedError"
        assert "rank 1 cannot trust where rank 0 is: 'control/addresses' in the store" in said
    monkeypatch.delenv(signatures.KEY)
    store.set(control.ADDRESSES_KEY, honest)
    kind, said = raised(control.connect, store, 1, 2, SOON, {})
    assert kind == "RefusedError"
    assert f"this process lacks: start it with `fusedcomm run`, which sets {signatures.KEY}" in said


@pytest.mark.parametrize("answer", ["published", "replayed"])
def test_who_answers_in_rank_0s_place_without_the_key_is_not_believed(monkeypatch, answer):
    """Another program has the port, and the signed record of an earlier init is in the store again."""
    monkeypatch.setenv(signatures.KEY, KEY)
    store, proof = dist.HashStore(), "0" * control.TOKEN_NBYTES
    if answer == "replayed":
        proof = signatures.derived(proof, "proof", 1, "the nonce of that time")
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        address = listener.getsockname()
        record = {"token": proof, "proof": "0" * control.TOKEN_NBYTES, "addresses": [address]}
        store.set(control.ADDRESSES_KEY, signatures.signed(json.dumps(record).encode(), control.ADDRESSES_KEY))

        def listen() -> None:
            connection, _ = listener.accept()
            listener.close()
            with connection, contextlib.suppress(OSError):
                connection.sendall(proof.encode() + _message({"about": [{}, {}]}))
                connection.recv(1 << 16)

        listening = threads.submit(listen)
        kind, said = raised(control.connect, store, 1, 2, datetime.timedelta(seconds=1), {})
        listening.result()
    assert kind == "TimeoutError" and f"127.0.0.1:{address[1]}" in said


def _send_and_end(stranger: socket.socket, hello: bytes) -> None:
    """The other end may have read enough to close the connection, before all is sent or while it is ended here."""
    try:
        stranger.sendall(hello)
        stranger.shutdown(socket.SHUT_WR)
    except OSError as error:
        assert error.errno in (errno.ENOTCONN, errno.ECONNRESET, errno.EPIPE), error


def _message(content) -> bytes:
    data = json.dumps(content).encode()
    return struct.pack("!I", len(data)) + data


def test_missing_ranks_are_named_when_the_time_is_up():
    kind, said = raised(control.connect, dist.HashStore(), 0, 3, datetime.timedelta(seconds=0.2), {})
    assert kind == "TimeoutError" and "[1, 2]" in said and "hvd.init()" in said


def test_an_address_that_cannot_be_reached_is_named_when_the_time_is_up():
    store = dist.HashStore()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    store.set(control.ADDRESSES_KEY, json.dumps({"token": "x", "proof": "y", "addresses": [["127.0.0.1", port]]}))
    kind, said = raised(control.connect, store, 1, 2, datetime.timedelta(seconds=0.3), {})
    assert kind == "TimeoutError" and f"127.0.0.1:{port}" in said and "GLOO_SOCKET_IFNAME" in said


def test_the_addresses_of_a_named_interface_come_first(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert control.own_addresses() == ["127.0.0.1"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-such")
    assert control.own_addresses()[-1] == "127.0.0.1"
