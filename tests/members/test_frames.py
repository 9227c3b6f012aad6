"""Frames: every flipped bit is noticed, and lengths are checked before memory is."""

import asyncio
import io
import json

import pytest

from fusedcomm.members.errors import FrameError
from fusedcomm.members.plane import frames

HEADER = {"kind": "fetch", "step": -3}
PAYLOAD = [b"\x00\xff\x80", b"", bytes(range(256)) * 40]


class Writer(io.BytesIO):
    """What was sent."""

    async def drain(self) -> None:
        """Nothing waits."""


def wire() -> bytes:
    writer = Writer()
    asyncio.run(frames.send(writer, frames.ANSWER, HEADER, PAYLOAD))
    return writer.getvalue()


def received(data: bytes, max_payload_nbytes: int = 1 << 20, **options):
    async def receive():
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await frames.receive(reader, max_payload_nbytes=max_payload_nbytes, **options)

    return asyncio.run(receive())


def test_a_frame_arrives_and_its_payload_in_the_callers_memory():
    memory = bytearray(b"\xaa" * 20000)
    kind, header, payload = received(wire(), into=memoryview(memory))
    assert (kind, header, payload.nbytes) == (frames.ANSWER, HEADER, 10243)
    assert memory == b"".join(PAYLOAD) + b"\xaa" * (20000 - 10243)
    assert bytes(received(wire())[2]) == b"".join(PAYLOAD)


def test_a_payload_that_is_too_large_is_refused():
    with pytest.raises(FrameError, match="and 10243 bytes: at most 1048576 and 7 are possible"):
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
    with pytest.raises(ValueError, match="at most 1048576 are possible"):
        frames.encode(frames.HELLO, {"info": "x" * frames.MAX_HEADER_NBYTES})


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (b"GET / HTTP/1.1\r\n", "begins with b'GET '"),
        (frames.MAGIC + b"\xff" * 20, "at most 1048576 and 7 are possible"),
        (frames.encode(1, json.loads("[1]")), "is list, no object"),
    ],
)
def test_strange_bytes_are_refused(bad, text):
    with pytest.raises(FrameError, match=text):
        received(bad, max_payload_nbytes=7)
