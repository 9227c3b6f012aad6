"""Frames: every flipped bit is noticed, and lengths are checked before memory is."""

import io
import json

import pytest

from fusedcomm.members import frames
from fusedcomm.members.errors import FrameError

HEADER = {"kind": "fetch", "step": -3}
PAYLOAD = [b"\x00\xff\x80", b"", bytes(range(256)) * 40]


class Connection(io.BytesIO):
    """What was sent, and can be received."""

    sendall, recv_into = io.BytesIO.write, io.BytesIO.readinto


def wire() -> bytes:
    connection = Connection()
    frames.send(connection, frames.ANSWER, HEADER, PAYLOAD)
    return connection.getvalue()


def received(data: bytes, **options):
    return frames.receive(Connection(data), **options)


def test_a_frame_arrives_and_its_payload_in_the_callers_memory():
    memory = bytearray(b"\xaa" * 20000)
    kind, header, payload = received(wire(), into=memoryview(memory))
    assert (kind, header, payload.nbytes) == (frames.ANSWER, HEADER, 10243)
    assert memory == b"".join(PAYLOAD) + b"\xaa" * (20000 - 10243)
    assert bytes(received(wire())[2]) == b"".join(PAYLOAD)


def test_a_payload_that_is_too_large_is_refused():
    with pytest.raises(FrameError, match="10243 of payload arrived, where at most 1048576 and 7 are possible"):
        received(wire(), into=memoryview(bytearray(7)))


@pytest.mark.parametrize("at", [*range(24), 24, 40, 48, 1000, -5, -4, -1])
def test_every_flipped_bit_is_noticed(at):
    for bit in range(8):
        data = bytearray(wire())
        data[at] ^= 1 << bit
        with pytest.raises(FrameError):
            received(bytes(data))


@pytest.mark.parametrize("nbytes", [1, 23, 24, 30, 60, 5000, -1])
def test_a_short_frame_is_noticed(nbytes):
    with pytest.raises(FrameError, match="ended within a frame"):
        received(wire()[:nbytes])
    with pytest.raises(EOFError):
        received(b"")


def test_a_header_that_is_too_long_is_not_sent():
    with pytest.raises(ValueError, match="too long"):
        frames.encode(frames.HELLO, {"info": "x" * frames.MAX_HEADER_NBYTES})


def test_the_decoder_finds_frames_in_any_pieces():
    data = frames.encode(1, HEADER) + frames.encode(2, {}) + frames.encode(3, {"a": [1]})
    for nbytes in (1, 7, 25, len(data)):
        decoder, found = frames.Decoder(), []
        for begin in range(0, len(data), nbytes):
            found += decoder.feed(data[begin : begin + nbytes])
        assert found == [(1, HEADER), (2, {}), (3, {"a": [1]})]
        assert decoder.is_empty


@pytest.mark.parametrize("bad", [b"GET / HTTP/1.1\r\n", b"f\x00", frames.MAGIC + b"\xff" * 20])
def test_the_decoder_refuses_strange_bytes(bad):
    with pytest.raises(FrameError):
        frames.Decoder().feed(bad)


def test_the_decoder_refuses_a_header_that_is_no_object():
    data = frames.encode(1, json.loads("[1]"))
    with pytest.raises(FrameError, match="is list, no object"):
        frames.Decoder().feed(data)
