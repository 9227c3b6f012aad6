"""A signature is right for one key, one content and one purpose. Forged objects are refused by name, and never run."""

import pytest
from jobs import job, raised

import fusedcomm.horovod as hvd
from fusedcomm.horovod import signatures, world

KEY = "0123456789abcdef" * 4


def test_only_the_same_key_content_and_purpose_are_accepted(monkeypatch):
    monkeypatch.setenv(signatures.KEY, KEY)
    data, purpose = signatures.signed(b"content", "members", 3), ("members", 3)
    assert signatures.content_of(data, *purpose) == b"content"
    assert signatures.content_of(signatures.signed(b"", *purpose), *purpose) == b""
    changed = [data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in range(len(data))]
    others = [("members", 4), ("members",), ("members3",), ("members", 3, ""), ("members", "3")]
    refused = [(data, other) for other in others]
    refused += [(each, purpose) for each in (*changed, b"", b"content", data[:-1], data[:20], data[1:])]
    for given, of in refused:
        with pytest.raises(signatures.RefusedError):
            signatures.content_of(given, *of)
    monkeypatch.setenv(signatures.KEY, KEY[::-1])
    with pytest.raises(signatures.RefusedError, match="a wrong signature"):
        signatures.content_of(data, *purpose)
    monkeypatch.delenv(signatures.KEY)
    assert signatures.signed(b"content", "x") == b"content" == signatures.content_of(b"content", "x")
    with pytest.raises(signatures.RefusedError, match=f"which this process lacks: .*{signatures.KEY}"):
        signatures.content_of(data, *purpose)


RAN = []


class Payload:
    """Is noticed when it is unpickled."""

    def __reduce__(self):
        return RAN.append, ("ran",)


FORGERIES = {
    "is not signed": lambda first, content, purpose: content,
    "replayed": lambda first, content, purpose: first,
    "of another rank": lambda first, content, purpose: SIGNED(content, *purpose[:-1], 0),
}
SIGNED = signatures.signed


def see_forgeries(rank, size):
    """What each rank is told of objects that rank 1 forges, by forgery. Honest ones go through before and after."""
    told = {}
    with job(**{signatures.KEY: KEY}), pytest.MonkeyPatch.context() as patch:
        for name, forge in FORGERIES.items():
            sent = []

            def signed(content: bytes, *purpose: object, sent=sent, forge=forge) -> bytes:
                sent.append(SIGNED(content, *purpose))
                return sent[0] if len(sent) == 1 else forge(sent[0], content, purpose)

            patch.setattr(signatures, "signed", signed if rank == 1 else SIGNED)
            assert hvd.broadcast_object({"number": 7}, 1, name=name) == {"number": 7}
            of_broadcast = raised(hvd.broadcast_object, None, 1, name) if rank != 1 else None
            if rank == 1:
                hvd.broadcast_object(Payload(), 1, name)
            told[name] = of_broadcast, raised(hvd.allgather_object, Payload() if rank == 1 else rank)
            patch.setattr(signatures, "signed", SIGNED)
            assert hvd.allgather_object(rank) == list(range(size))
    return told, RAN


def test_a_forged_object_is_refused_by_name_and_the_job_goes_on(ranks):
    for rank, (told, ran) in enumerate(ranks.run(see_forgeries, world_size=3)):
        assert ran == []
        for name, (of_broadcast, of_gather) in told.items():
            reason = name if name == "is not signed" else "has a wrong signature"
            assert of_gather[0] == "HorovodInternalError" and f"the object of rank 1 {reason}" in of_gather[1]
            if rank != 1:
                expected = f"broadcast_object {name}: the object of rank 1 {reason}"
                assert of_broadcast[0] == "HorovodInternalError" and expected in of_broadcast[1]


def purposes_of_roots(rank, size):
    """What each root's object is signed for, were it the first of its name."""
    found = []

    def signed(content: bytes, *purpose: object) -> bytes:
        found.append(purpose)
        return SIGNED(content, *purpose)

    with job(**{signatures.KEY: KEY}), pytest.MonkeyPatch.context() as patch:
        patch.setattr(signatures, "signed", signed)
        for root in range(size):
            world.world().num_objects.clear()
            hvd.broadcast_object(7, root, name="object")
    return found


def test_an_object_is_signed_for_its_root(ranks):
    (first,), (second,) = ranks.run(purposes_of_roots, world_size=2)
    assert first != second and first[:-1] == second[:-1]
