"""One frame on a TCP connection.

A frame is a prefix, a header (JSON, an object), a payload and, if the payload is not empty, the payload's CRC-32:

    magic  kind  header_nbytes  payload_nbytes  crc     4 + 4 + 4 + 8 + 4 bytes, big-endian

`crc` covers the rest of the prefix and the header, so a flipped bit of a length is noticed before the length is used
for anything but a comparison with its limit. The payload's CRC follows it, so both are computed as blocks pass by.
"""

import asyncio
import json
import struct
import zlib
from collections.abc import Sequence

from fusedcomm.members.errors import FrameError

MAGIC = b"fcM1"

# Kinds of frames.
HELLO, REPLY, MESSAGE, REQUEST, ANSWER, REFUSAL = range(1, 7)

MAX_HEADER_NBYTES = 1 << 20
MAX_PAYLOAD_NBYTES = 1 << 30
"""The largest payload for which memory is allocated here. A caller that gives memory may receive more."""

_PREFIX = struct.Struct("!4sIIQI")
_CRC = struct.Struct("!I")
# Bytes of a payload that are received, and checked, at once.
_BLOCK_NBYTES = 1 << 20

Buffer = bytes | bytearray | memoryview


def encode(kind: int, header: dict, payload_nbytes: int = 0) -> bytes:
    """The prefix and header of a frame. Raises ValueError if the header is too long."""
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER_NBYTES:
        raise ValueError(f"fusedcomm: a header has {len(text)} bytes: at most {MAX_HEADER_NBYTES} are possible")
    fields = _PREFIX.pack(MAGIC, kind, len(text), payload_nbytes, 0)[:-4]
    return fields + _CRC.pack(zlib.crc32(text, zlib.crc32(fields))) + text


async def send(writer: asyncio.StreamWriter, kind: int, header: dict, payload: Sequence[Buffer] = ()) -> None:
    """Sends a frame, and returns when the system has nearly all of it. The payload is the buffers one after another.

    Raises OSError if the connection fails.
    """
    parts = [memoryview(part).cast("B") for part in payload if memoryview(part).nbytes]
    writer.write(encode(kind, header, sum(part.nbytes for part in parts)))
    crc = 0
    for part in parts:
        for begin in range(0, part.nbytes, _BLOCK_NBYTES):
            block = part[begin : begin + _BLOCK_NBYTES]
            crc = zlib.crc32(block, crc)
            writer.write(block)
            await writer.drain()
    if parts:
        writer.write(_CRC.pack(crc))
    await writer.drain()


async def receive(
    reader: asyncio.StreamReader, into: memoryview | None = None, max_payload_nbytes: int = 0
) -> tuple[int, dict, memoryview]:
    """Receives a frame: (kind, header, payload).

    into: writable memory of one byte an element; the payload is received into its beginning. Without it, a payload of
        up to `max_payload_nbytes` is received into new memory.

    Raises FrameError on bad bytes and on an end within a frame, EOFError at an end before one, OSError if the
    connection fails.
    """
    magic = await _read(reader, len(MAGIC), starts=True)
    if magic != MAGIC:
        raise FrameError(f"fusedcomm: a frame begins with {magic!r}, not {MAGIC!r}: this is no member")
    prefix = magic + await _read(reader, _PREFIX.size - len(MAGIC))
    _, kind, header_nbytes, payload_nbytes, crc = _PREFIX.unpack(prefix)
    limit = max_payload_nbytes if into is None else into.nbytes
    if header_nbytes > MAX_HEADER_NBYTES or payload_nbytes > limit:
        given, most = f"{header_nbytes} and {payload_nbytes}", f"{MAX_HEADER_NBYTES} and {limit}"
        raise FrameError(f"fusedcomm: a frame has {given} bytes: at most {most} are possible")
    header = _header(prefix, await _read(reader, header_nbytes), crc)
    payload = (memoryview(bytearray(payload_nbytes)) if into is None else into.cast("B"))[:payload_nbytes]
    if payload_nbytes:
        seen = 0
        for begin in range(0, payload_nbytes, _BLOCK_NBYTES):
            block = await _read(reader, min(_BLOCK_NBYTES, payload_nbytes - begin))
            payload[begin : begin + len(block)] = block
            seen = zlib.crc32(block, seen)
        sent = await _read(reader, _CRC.size)
        if _CRC.pack(seen) != sent:
            raise FrameError(f"fusedcomm: a payload's CRC is {seen:#010x}, and 0x{sent.hex()} was sent")
    return kind, header, payload


def _header(prefix: bytes, text: bytes, crc: int) -> dict:
    """Raises FrameError unless `text` is the header that was sent."""
    seen = zlib.crc32(text, zlib.crc32(prefix[:-4]))
    if seen != crc:
        raise FrameError(f"fusedcomm: the CRC of a frame's header is {seen:#010x}, and {crc:#010x} was sent")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"fusedcomm: a frame's header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise FrameError(f"fusedcomm: a frame's header is {type(header).__name__}, no object")
    return header


async def _read(reader: asyncio.StreamReader, nbytes: int, starts: bool = False) -> bytes:
    """Receives so many bytes. starts: a frame begins with them, so a connection may end here."""
    try:
        return await reader.readexactly(nbytes)
    except asyncio.IncompleteReadError as error:
        if starts and not error.partial:
            raise EOFError("its connection has ended") from None
        raise FrameError(
            f"fusedcomm: a connection ended within a frame, after {len(error.partial)} of {nbytes} bytes of one part"
        ) from None
