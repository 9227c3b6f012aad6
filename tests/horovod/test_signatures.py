"""A signature is right for one key, one content and one purpose. Forged objects are refused by name, and never run."""

import pytest
import torch
from jobs import job, raised

import fusedcomm.horovod as hvd
from fusedcomm.horovod import signatures

KEY = "0123456789abcdef" * 4
OTHER = KEY[::-1]


@pytest.fixture
def with_key(monkeypatch):
    """Sets the job's key; None: there is none."""

    def set_key(key: str | None) -> None:
        if key is None:
            monkeypatch.delenv(signatures.KEY, raising=False)
        else:
            monkeypatch.setenv(signatures.KEY, key)

    return set_key


def test_only_the_same_key_content_and_purpose_are_accepted(with_key):
    with_key(KEY)
    data = signatures.signed(b"content", "members", 3)
    assert signatures.content_of(data, "members", 3) == b"content"
    assert signatures.content_of(signatures.signed(b"", "members", 3), "members", 3) == b""
    for purpose in (("members", 4), ("members",), ("members3",), ("members", 3, ""), ("members", "3")):
        with pytest.raises(signatures.RefusedError, match="a wrong signature"):
            signatures.content_of(data, *purpose)
    for i in range(len(data)):
        changed = data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]
        with pytest.raises(signatures.RefusedError):
            signatures.content_of(changed, "members", 3)
    for missing in (b"", b"content", data[:-1], data[:20], data[1:]):
        with pytest.raises(signatures.RefusedError):
            signatures.content_of(missing, "members", 3)
    with_key(OTHER)
    with pytest.raises(signatures.RefusedError, match="a wrong signature"):
        signatures.content_of(data, "members", 3)


def test_without_a_key_nothing_is_signed_and_what_is_signed_is_refused(with_key):
    with_key(KEY)
    data = signatures.signed(b"content", "x")
    with_key(None)
    assert signatures.signed(b"content", "x") == b"content" == signatures.content_of(b"content", "x")
    with pytest.raises(signatures.RefusedError, match=f"which this process lacks: .*{signatures.KEY}"):
        signatures.content_of(data, "x")


def test_a_key_that_can_be_guessed_is_refused_and_not_shown(with_key):
    with_key("secret-of-mine")
    with pytest.raises(ValueError, match="has 14 characters: use at least 32") as refused:
        signatures.signed(b"content", "x")
    assert "secret-of-mine" not in str(refused.value)


RAN = []


class Payload:
    """Is noticed when it is unpickled."""

    def __reduce__(self):
        return RAN.append, ("ran",)


def send_forged(rank, size, forge):
    """What ranks 0 and 2 see of an object that rank 1 sends forged, and of the next one."""
    RAN.clear()
    sent = []
    real = signatures.signed

    def forged(content: bytes, *purpose: object) -> bytes:
        sent.append(real(content, *purpose))
        return {"unsigned": content, "replayed": sent[0], "elsewhere": real(content, *purpose[:-1], 0)}[forge]

    with job(**{signatures.KEY: KEY}):
        first = hvd.broadcast_object({"number": 7}, 1, name="state")  # an honest one, which can be copied later
        if rank == 1:
            signatures.signed = forged
        try:
            if forge == "replayed":
                hvd.broadcast_object({"number": 8}, 1, name="state")
            seen = raised(hvd.broadcast_object, Payload(), 1, "state") if rank != 1 else None
            if rank == 1:
                hvd.broadcast_object(Payload(), 1, "state")
        finally:
            signatures.signed = real
        gathered = hvd.allgather_object(rank)
    return first, seen, RAN, gathered


@pytest.mark.parametrize("forge", ["unsigned", "replayed", "elsewhere"])
def test_a_forged_object_is_refused_by_name_and_the_job_goes_on(ranks, forge):
    results = ranks.run(send_forged, forge, world_size=3)
    for rank, (first, seen, ran, gathered) in enumerate(results):
        assert first == {"number": 7} and gathered == [0, 1, 2] and ran == []
        if rank != 1:
            kind, said = seen
            assert kind == "HorovodInternalError" and "broadcast_object state: the object of rank 1 " in said
            assert ("is not signed" if forge == "unsigned" else "has a wrong signature") in said


def gather_with(rank, size):
    """Rank 2 sends, as its own, what rank 1 has signed."""
    with job(**{signatures.KEY: KEY}):
        if rank == 2:
            real = signatures.signed
            signatures.signed = lambda content, *purpose: real(content, *purpose[:-1], 1)
        try:
            return raised(hvd.allgather_object, Payload() if rank == 2 else rank)
        finally:
            if rank == 2:
                signatures.signed = real


def test_an_object_that_another_rank_has_signed_is_refused(ranks):
    for kind, said in ranks.run(gather_with, world_size=3):
        assert kind == "HorovodInternalError" and "the object of rank 2 has a wrong signature" in said


def exchange(rank, size):
    with job(**{signatures.KEY: KEY}):
        found = [hvd.broadcast_object((rank, i), i % size) for i in range(4)]
        found.append(hvd.allgather_object(str(rank) * rank))
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5 + rank)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        return found, optimizer.param_groups[0]["lr"]


def test_a_job_with_a_key_exchanges_objects_as_one_without(ranks):
    expected = [(0, 0), (1, 1), (2, 2), (0, 3), ["", "1", "22"]]
    assert ranks.run(exchange, world_size=3) == [(expected, 1.5)] * 3
