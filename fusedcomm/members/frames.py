"""One frame on a TCP connection.

A frame is a prefix, a header (JSON, an object), a payload and, if the payload is not empty, the payload's CRC-32:

    magic  kind  header_nbytes  payload_nbytes  crc     4 + 4 + 4 + 8 + 4 bytes, big-endian

`crc` covers the rest of the prefix and the header, so a flipped bit of a length is noticed before the length is used
for anything but a comparison with its limit. The payload's CRC follows it, so both are computed as blocks pass by.
"""

import json
import socket
import struct
import zlib
from collections.abc import Sequence

from .errors import FrameError

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
        raise ValueError(
            f"fusedcomm: a header of {len(text)} bytes is too long, at most {MAX_HEADER_NBYTES} are possible: "
            f"keep the description of a member short"
        )
    fields = _PREFIX.pack(MAGIC, kind, len(text), payload_nbytes, 0)[:-4]
    return fields + _CRC.pack(zlib.crc32(text, zlib.crc32(fields))) + text


def _lengths(prefix: Buffer, max_payload_nbytes: int) -> tuple[int, int, int, int]:
    """(kind, header_nbytes, payload_nbytes, crc). Raises FrameError."""
    magic, kind, header_nbytes, payload_nbytes, crc = _PREFIX.unpack(prefix)
    check_magic(magic)
    if header_nbytes > MAX_HEADER_NBYTES or payload_nbytes > max_payload_nbytes:
        raise FrameError(
            f"fusedcomm: a frame with {header_nbytes} bytes of header and {payload_nbytes} of payload arrived, where "
            f"at most {MAX_HEADER_NBYTES} and {max_payload_nbytes} are possible"
        )
    return kind, header_nbytes, payload_nbytes, crc


def check_magic(begin: Buffer) -> None:
    """Raises FrameError unless the first bytes of a frame, however few have arrived, are those of MAGIC."""
    if bytes(begin[: len(MAGIC)]) != MAGIC[: len(begin)]:
        raise FrameError(f"fusedcomm: {bytes(begin[:4])!r} arrived, where a frame begins with {MAGIC!r}")


def _header(prefix: Buffer, text: Buffer, crc: int) -> dict:
    seen = zlib.crc32(text, zlib.crc32(prefix[:-4]))
    if seen != crc:
        raise FrameError(f"fusedcomm: the CRC of a frame's header is {seen:#010x}, and {crc:#010x} was sent")
    try:
        header = json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"fusedcomm: a frame's header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise FrameError(f"fusedcomm: a frame's header is {type(header).__name__}, no object")
    return header


class Decoder:
    """Finds the frames, none with a payload, in bytes that arrive in pieces. Holds one frame at most."""

    def __init__(self) -> None:
        self._held = bytearray()

    @property
    def is_empty(self) -> bool:
        """Whether no byte of an incomplete frame is held."""
        return not self._held

    def feed(self, piece: Buffer) -> list[tuple[int, dict]]:
        """(kind, header) of each frame that `piece` completes. Raises FrameError."""
        self._held += piece
        found = []
        while self._held:
            check_magic(self._held)
            if len(self._held) < _PREFIX.size:
                break
            prefix = bytes(self._held[: _PREFIX.size])
            kind, header_nbytes, _, crc = _lengths(prefix, 0)
            end = _PREFIX.size + header_nbytes
            if len(self._held) < end:
                break
            found.append((kind, _header(prefix, self._held[_PREFIX.size : end], crc)))
            del self._held[:end]
        return found


def send(connection: socket.socket, kind: int, header: dict, payload: Sequence[Buffer] = ()) -> None:
    """Sends a frame over a blocking connection. The payload is the buffers one after another, without a copy.

    Raises OSError if the connection fails.
    """
    parts = [memoryview(part).cast("B") for part in payload if memoryview(part).nbytes]
    connection.sendall(encode(kind, header, sum(part.nbytes for part in parts)))
    crc = 0
    for part in parts:
        for begin in range(0, part.nbytes, _BLOCK_NBYTES):
            block = part[begin : begin + _BLOCK_NBYTES]
            crc = zlib.crc32(block, crc)
            connection.sendall(block)
    if parts:
        connection.sendall(_CRC.pack(crc))


def receive(
    connection: socket.socket, into: memoryview | None = None, max_payload_nbytes: int = MAX_PAYLOAD_NBYTES
) -> tuple[int, dict, memoryview]:
    """Receives a frame over a blocking connection: (kind, header, payload).

    into: writable memory of one byte an element; the payload is received into its beginning. Without it, a payload of
        up to `max_payload_nbytes` is received into new memory.

    Raises FrameError on bad bytes and on an end within a frame, EOFError at an end before one, OSError if the
    connection fails.
    """
    prefix = bytearray(_PREFIX.size)
    _fill(connection, memoryview(prefix), starts=True)
    limit = max_payload_nbytes if into is None else into.nbytes
    kind, header_nbytes, payload_nbytes, crc = _lengths(prefix, limit)
    text = bytearray(header_nbytes)
    _fill(connection, memoryview(text))
    header = _header(prefix, text, crc)
    payload = (memoryview(bytearray(payload_nbytes)) if into is None else into.cast("B"))[:payload_nbytes]
    if payload_nbytes:
        seen = 0
        for begin in range(0, payload_nbytes, _BLOCK_NBYTES):
            block = payload[begin : begin + _BLOCK_NBYTES]
            _fill(connection, block)
            seen = zlib.crc32(block, seen)
        sent = bytearray(_CRC.size)
        _fill(connection, memoryview(sent))
        if _CRC.pack(seen) != sent:
            raise FrameError(
                f"fusedcomm: the CRC of a payload of {payload_nbytes} bytes is {seen:#010x}, "
                f"and 0x{sent.hex()} was sent"
            )
    return kind, header, payload


def _fill(connection: socket.socket, memory: memoryview, starts: bool = False) -> None:
    """Receives memory.nbytes bytes. starts: a frame begins with them, so a connection may end here."""
    filled = 0
    while filled < memory.nbytes:
        nbytes = connection.recv_into(memory[filled:])
        if nbytes == 0:
            if starts and filled == 0:
                raise EOFError("fusedcomm: the connection has ended")
            raise FrameError(
                f"fusedcomm: a connection ended within a frame, after {filled} of {memory.nbytes} bytes of one part"
            )
        filled += nbytes
