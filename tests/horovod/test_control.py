"""The star of sockets connects the ranks, and nobody else."""

import contextlib
import datetime
import errno
import json
import os
import socket
import struct
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


def test_a_stranger_is_turned_away():
    def strange(store: dist.Store) -> None:
        store.wait([control.ADDRESSES_KEY], SOON)
        published = json.loads(store.get(control.ADDRESSES_KEY))
        for hello in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"",
            _message({"token": "guessed", "rank": 1, "about": {}}),
            _message({"token": published["token"], "rank": 9, "about": {}}),
            _message({"token": published["token"]}),
            _message([1, 2]),
        ):
            with socket.create_connection(tuple(published["addresses"][-1]), timeout=30) as stranger:
                _send_and_end(stranger, hello)
                with contextlib.suppress(ConnectionResetError):  # it was closed before all was read
                    assert stranger.recv(1) == b""

    stars = connect_all(3, strange)
    assert [star.about[2] for star in stars] == [{"number": 4}] * 3
    close(stars)


def test_who_has_read_the_token_but_not_the_key_is_turned_away_by_name(monkeypatch, caplog):
    monkeypatch.setenv(signatures.KEY, KEY)
    monkeypatch.setattr(control, "_refused", set())
    monkeypatch.setattr(control, "FIRST_TRY_S", 60.0)  # a stranger on a busy machine is heard to the end
    heard = []

    def strange(store: dist.Store) -> None:
        store.wait([control.ADDRESSES_KEY], SOON)
        record = store.get(control.ADDRESSES_KEY)
        published = json.loads(record[record.rindex(b"{") :])
        hello = {"token": published["token"], "rank": 1, "about": {"number": 1}, "nonce": "0"}
        elsewhere = signatures.signed(json.dumps(hello).encode(), "hello", "the token of an earlier init")
        for message in (_message(hello), struct.pack("!I", len(elsewhere)) + elsewhere):
            with socket.create_connection(tuple(published["addresses"][-1]), timeout=30) as stranger:
                _send_and_end(stranger, message)
                with contextlib.suppress(ConnectionResetError):
                    heard.append(stranger.recv(1))

    stars = connect_all(3, strange)
    assert [star.about for star in stars] == [[{"number": rank * rank} for rank in range(3)]] * 3
    assert set(heard) <= {b""}
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and "refused a connection of 127.0.0.1:" in warnings[0]
    assert "its message is not signed with the job's key" in warnings[0] and KEY not in warnings[0]
    close(stars)


def test_addresses_that_a_stranger_has_published_are_refused(monkeypatch):
    published = json.dumps({"token": "x", "addresses": [["127.0.0.1", 9]]}).encode()
    monkeypatch.setenv(signatures.KEY, KEY)
    of_another_record = signatures.signed(published, "control/other")
    honest = signatures.signed(published, control.ADDRESSES_KEY)
    for data in (published, of_another_record):
        store = dist.HashStore()
        store.set(control.ADDRESSES_KEY, data)
        kind, said = raised(control.connect, store, 1, 2, SOON, {})
        assert (
            kind == "RefusedError" and "rank 1 cannot trust where rank 0 is: 'control/addresses' in the store" in said
        )
    monkeypatch.delenv(signatures.KEY)
    store.set(control.ADDRESSES_KEY, honest)
    kind, said = raised(control.connect, store, 1, 2, SOON, {})
    assert (
        kind == "RefusedError"
        and f"this process lacks: start it with `fusedcomm run`, which sets {signatures.KEY}" in said
    )


def test_who_answers_in_rank_0s_place_without_the_key_is_not_believed(monkeypatch):
    """Another program has the port, and an old record is in the store again."""
    monkeypatch.setenv(signatures.KEY, KEY)
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        addresses = [["127.0.0.1", listener.getsockname()[1]]]
        record = json.dumps({"token": "old", "addresses": addresses}).encode()
        store.set(control.ADDRESSES_KEY, signatures.signed(record, control.ADDRESSES_KEY))
        old = signatures.signed(json.dumps({"about": [{}, {}]}).encode(), "answer", "old", 1, "the nonce of that time")

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                control._receive(connection, "hello", "old")
                connection.sendall(struct.pack("!I", len(old)) + old)
                connection.recv(1)
            listener.close()

        answering = threads.submit(answer)
        kind, said = raised(control.connect, store, 1, 2, datetime.timedelta(seconds=2), {})
        answering.result()
    assert kind == "TimeoutError" and "cannot reach rank 0" in said and f"127.0.0.1:{addresses[0][1]}" in said


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
    store.set(control.ADDRESSES_KEY, json.dumps({"token": "x", "addresses": [["127.0.0.1", port]]}))
    kind, said = raised(control.connect, store, 1, 2, datetime.timedelta(seconds=0.3), {})
    assert kind == "TimeoutError" and f"127.0.0.1:{port}" in said and "GLOO_SOCKET_IFNAME" in said


def test_the_addresses_of_a_named_interface_come_first(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert control.own_addresses() == ["127.0.0.1"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-such")
    assert control.own_addresses()[-1] == "127.0.0.1"
