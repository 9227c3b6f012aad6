"""The star of sockets connects the ranks, and nobody else."""

import contextlib
import datetime
import json
import os
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from jobs import raised

from fusedcomm.horovod import control, signatures
from fusedcomm.ranks import own_address

KEY = "0123456789abcdef" * 4
SOON = datetime.timedelta(seconds=60)


def connect_all(size: int, before_join: Callable = lambda *found: None) -> list[control.Star]:
    """The stars of `size` ranks, each in a thread of this process. before_join: is called before rank 1 connects, with
    what rank 0 has published, and an address of rank 0."""
    store = dist.HashStore()

    def run(rank: int) -> control.Star:
        if rank == 1:
            before_join(*published_in(store))
        return control.connect(store, rank, size, SOON, {"number": rank * rank})

    with ThreadPoolExecutor(size) as threads:
        stars = list(threads.map(run, range(size)))
    assert [star.about for star in stars] == [[{"number": rank * rank} for rank in range(size)]] * size
    assert [len(star.sockets) for star in stars] == [size - 1] + [1] * (size - 1)
    return stars


def close(stars: list[control.Star]) -> None:
    for star in stars:
        for descriptor in star.sockets:
            os.close(descriptor)


def published_in(store: dist.Store) -> tuple[dict, tuple[str, int]]:
    store.wait([control.ADDRESSES_KEY], SOON)
    record = store.get(control.ADDRESSES_KEY)
    published = json.loads(record[record.index(b'{"token"') :])
    return published, tuple(published["addresses"][-1])


def message(content: object) -> bytes:
    data = json.dumps(content).encode()
    return struct.pack("!I", len(data)) + data


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_rank_is_connected_with_rank_0_which_gives_up_a_host_that_is_lost(size):
    """Also while sent data are not acknowledged, when no probe is sent."""
    stars = connect_all(size)
    for rank in range(1, size):
        os.write(stars[rank].sockets[0], bytes([rank]))
        assert os.read(stars[0].sockets[rank - 1], 1) == bytes([rank])
    for descriptor in [each for star in stars for each in star.sockets]:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            idle, count, interval, unacknowledged = (
                connection.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPCNT, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
            )
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert unacknowledged == 1000 * (idle + count * interval) == 35000
    close(stars)


# ---- strangers at rank 0's door: they are told nothing, and the ranks come in


def heard(connection: socket.socket) -> bytes:
    """What is read until the other end closes."""
    with contextlib.suppress(ConnectionResetError):  # it was closed before all was read
        return connection.recv(1)
    return b""


def say_and_end(address: tuple[str, int], hello: bytes) -> None:
    with socket.create_connection(address, timeout=30) as stranger:
        with contextlib.suppress(OSError):  # the other end has read enough
            stranger.sendall(hello)
            stranger.shutdown(socket.SHUT_WR)
        assert heard(stranger) == b""


def wrong_hellos(published: dict, address: tuple[str, int]) -> None:
    token = published["token"].encode()
    for hello in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
        struct.pack("!I", 200_000) + b"[" * 200_000,
        b"0" * control.TOKEN_NBYTES + message({"rank": 1, "about": {}}),
        token + message({"rank": 9, "about": {}}),
        token + message({"rank": 1}),
        token + message([1, 2]),
        token + message("x") + b"and more",
        token + struct.pack("!I", 200_000) + b"[" * 200_000,
        token + struct.pack("!I", control.MAX_MESSAGE_NBYTES + 1),
    ):
        say_and_end(address, hello)


def silent(published: dict, address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=30) as stranger:
        assert heard(stranger) == b""


def too_many(published: dict, address: tuple[str, int]) -> None:
    with contextlib.ExitStack() as strangers:
        first, *_ = (strangers.enter_context(socket.create_connection(address, timeout=30)) for _ in range(5))
        assert heard(first) == b"", "the oldest is closed"


@pytest.mark.parametrize(
    ("strange", "limits"),
    [
        (wrong_hellos, {}),
        (silent, {"HELLO_S": 0.2}),
        pytest.param(too_many, {"MAX_STRANGERS": 2}, marks=pytest.mark.check),
    ],
)
def test_strangers_are_turned_away(monkeypatch, strange, limits):
    for name, value in limits.items():
        monkeypatch.setattr(control, name, value)
    close(connect_all(3, strange))


def test_ranks_are_let_in_beside_strangers_that_are_slow(monkeypatch):
    """They would hold up whoever reads one connection after another until SOON."""
    monkeypatch.setattr(control, "HELLO_S", 10 * SOON.total_seconds())
    strangers = []

    def strange(published: dict, address: tuple[str, int]) -> None:
        token = published["token"].encode()
        for said in (b"", b"0", token, token + struct.pack("!I", 1 << 20) + b" "):
            strangers.append(socket.create_connection(address, timeout=30))
            strangers[-1].sendall(said)

    close(connect_all(3, strange))
    for stranger in strangers:
        with stranger:
            assert heard(stranger) == b"", "closed once all ranks have come"


def test_who_has_read_the_token_but_not_the_key_is_turned_away_by_name(monkeypatch, caplog):
    monkeypatch.setenv(signatures.KEY, KEY)
    monkeypatch.setattr(control, "_refused", set())

    def strange(published: dict, address: tuple[str, int]) -> None:
        elsewhere = signatures.derived(published["token"], "token", "192.0.2.1")  # seen by a program at that address
        for token in (published["token"], elsewhere):
            say_and_end(address, token.encode() + message({"rank": 1, "about": {"number": 1}}))

    stars = connect_all(3, strange)
    assert len({star.token for star in stars}) == 1
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "refused a connection of 127.0.0.1:" in warning and KEY not in warning
    assert "is a process without the job's key" in warning
    close(stars)


# ---- strangers in rank 0's place, seen by rank 1


@contextlib.contextmanager
def listening(*answers: Callable[[socket.socket], object]):
    """Programs that answer one connection each. Yields their addresses."""

    def answer(listener: socket.socket, say: Callable) -> None:
        with listener.accept()[0] as connection, contextlib.suppress(OSError):
            listener.close()
            say(connection)

    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in answers]
    addresses = [list(listener.getsockname()) for listener in listeners]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(answers)) as threads:
        for listener in listeners:
            stack.enter_context(listener)
        waiting = [threads.submit(answer, *each) for each in zip(listeners, answers, strict=True)]
        yield addresses
        for each in waiting:
            each.result()


def record_of(addresses: list, token: str = "0" * control.TOKEN_NBYTES) -> bytes:
    record = {"token": token, "proof": "0" * control.TOKEN_NBYTES, "addresses": addresses}
    return signatures.signed(json.dumps(record).encode(), control.ADDRESSES_KEY)


def refusal_of_rank_1(record: bytes | None, seconds: float = SOON.total_seconds()) -> tuple[str, str]:
    store = dist.HashStore()
    if record is not None:
        store.set(control.ADDRESSES_KEY, record)
    return raised(control.connect, store, 1, 2, datetime.timedelta(seconds=seconds), {})


def test_a_rank_leaves_an_address_where_a_stranger_listens(monkeypatch):
    """One stranger says nothing, one too much. Neither is told more than the token."""
    monkeypatch.setattr(control, "HELLO_S", 0.4)
    real = dist.HashStore()

    def join(strangers: list) -> control.Star:
        store = dist.HashStore()
        published, address = published_in(real)
        store.set(control.ADDRESSES_KEY, json.dumps({**published, "addresses": [*strangers, address]}))
        return control.connect(store, 1, 2, SOON, {"number": 1})

    shout = lambda connection: connection.sendall(b"[" * 200_000)  # noqa: E731
    wait = lambda connection: connection.recv(1 << 16, socket.MSG_WAITALL)  # noqa: E731
    with listening(wait, shout) as strangers, ThreadPoolExecutor(1) as threads:
        joining = threads.submit(join, strangers)
        close([control.connect(real, 0, 2, SOON, {"number": 0}), joining.result()])


def test_the_time_counts_from_the_beginning_and_not_from_each_byte():
    """Rank 0's answer comes one byte at a time."""

    def drip(connection: socket.socket) -> None:
        connection.sendall(b"0" * control.TOKEN_NBYTES + struct.pack("!I", 1 << 20))
        for _ in range(600):
            connection.sendall(b" ")
            time.sleep(0.05)

    with listening(drip) as addresses:
        began = time.monotonic()
        kind, said = refusal_of_rank_1(record_of(addresses), 1)
        assert kind == "TimeoutError" and "waits for other ranks" in said, said
        assert time.monotonic() - began < 25, "the bytes take 30 s"


@pytest.mark.parametrize("is_replayed", [False, True])
def test_who_answers_in_rank_0s_place_without_the_key_is_not_believed(monkeypatch, is_replayed):
    """Another program has the port, and the signed record of an earlier init is in the store again."""
    monkeypatch.setenv(signatures.KEY, KEY)
    proof = "0" * control.TOKEN_NBYTES
    if is_replayed:
        proof = signatures.derived(proof, "proof", 1, "the nonce of that time")

    def answer(connection: socket.socket) -> None:
        connection.sendall(proof.encode() + message({"about": [{}, {}]}))
        connection.recv(1 << 16)

    with listening(answer) as addresses:
        kind, said = refusal_of_rank_1(record_of(addresses, proof), 1)
    assert kind == "TimeoutError" and f"127.0.0.1:{addresses[0][1]}" in said


def test_addresses_that_a_stranger_has_published_are_refused(monkeypatch):
    published = record_of([["127.0.0.1", 9]])
    monkeypatch.setenv(signatures.KEY, KEY)
    for record in (published, signatures.signed(published, "control/other")):
        kind, said = refusal_of_rank_1(record)
        assert kind == "RefusedError"
        assert "rank 1 cannot trust where rank 0 is: 'control/addresses' in the store" in said
    honest = record_of([["127.0.0.1", 9]])
    monkeypatch.delenv(signatures.KEY)
    kind, said = refusal_of_rank_1(honest)
    assert kind == "RefusedError"
    assert f"this process lacks: start it with `fusedcomm run`, which sets {signatures.KEY}" in said


def test_missing_ranks_and_addresses_that_cannot_be_reached_are_named_when_the_time_is_up():
    kind, said = raised(control.connect, dist.HashStore(), 0, 3, datetime.timedelta(seconds=0.2), {})
    assert kind == "TimeoutError" and "[1, 2]" in said and "hvd.init()" in said
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    kind, said = refusal_of_rank_1(record_of([["127.0.0.1", port]]), 0.3)
    assert kind == "TimeoutError" and f"127.0.0.1:{port}" in said and "GLOO_SOCKET_IFNAME" in said


def test_the_addresses_of_a_named_interface_come_first(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address.candidates() == ["127.0.0.1"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-such")
    assert own_address.candidates()[-1] == "127.0.0.1"
