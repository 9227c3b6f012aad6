"""Chooses the bytes of a bucket's chunks and how many chunks are under way, where a configuration leaves that open."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator

from fusedcomm import memory
from fusedcomm.config import Chunks, Config
from fusedcomm.native import _C

_SECONDS = 2e-3
"""Seconds that one chunk takes on the link, which is timed at attach. Each chunk costs some tenths of a millisecond
beside its bytes, so small chunks waste time. The codec stages wait while a chunk is on the link, so large chunks
overlap less."""
_LARGER_IF_ONE_SHOT, _MIN_NBYTES_IF_ONE_SHOT = 2, 128 << 10
"""Factor on _SECONDS for a one-shot, and the least bytes that a rank sends for one of its chunks. A one-shot chunk has
a single collective, so larger chunks pay."""
_LARGER_AMONG_MANY, _MIN_NBYTES_AMONG_MANY = 1.5, 256 << 10
"""Factor on _SECONDS, and least bytes of a chunk, for a two-shot of more than two ranks. Its chunks cost more, because
each is a message to every other rank. _MAX_IN_FLIGHT chunks of 128 KiB are only half of _UNDER_WAY_NBYTES."""
_LARGER_IF_ADDED, _MIN_NBYTES_PER_RANK_IF_ADDED = 4, 512 << 10
"""Factor on _SECONDS, and least bytes of a chunk for each rank, where the transport adds: a direct or an exact sum. Its
all-reduce cuts the message itself, sends 2 (ranks - 1) messages one after the other, and is the chunk's only
collective, so larger chunks only save the cost of a chunk. Among four ranks on an unlimited link steps with chunks of
256 KiB took three times as long as with DDP's own all-reduce."""
_DEFAULT_S_PER_BYTE = 8e-9
"""Seconds a byte of a link that was not timed: 1 Gbit/s."""
# Least and most bytes of each part of a chunk. A one-shot's chunk has one part.
_MIN_NBYTES_PER_RANK, _MAX_NBYTES_PER_RANK = 32 << 10, 1 << 20
# Most bytes of a chunk on CPU, if its size is chosen here.
MAX_DEFAULT_NBYTES = 8 << 20

_GIB = 1 << 30

# Bytes under way at once, in many small chunks: ranks differ in speed, and a rank's link is idle while every one of its
# chunks waits for another rank.
_UNDER_WAY_NBYTES = 4 << 20
# Fewest and most chunks under way.
_MIN_IN_FLIGHT, _MAX_IN_FLIGHT = 4, 16

# A link that takes at least this many seconds a byte is slow: 400 Mbit/s.
_SLOW_S_PER_BYTE = 2e-8
_MAX_SENDING_IF_SLOW = 2
"""Exchanges of one channel that may send at once, on a slow link of more than two ranks. TCP shares a line unevenly
among connections; without a limit some ranks end a step later than others."""

# Bytes of a chunk on an accelerator, where each chunk costs up to three launches and two collectives. DDP's buckets (25
# MiB of gradients) are not cut: a chunk holds 32 MiB of fp32 gradients on a 16-bit wire, 62 MiB on int8.
_DEVICE_NBYTES = 16 << 20


def resolved(
    config: Config,
    world_size: int,
    device_type: str = "cpu",
    s_per_byte: float | None = None,
    ranks_per_host: int = 1,
) -> Config:
    """Returns `config` with both numbers of its chunks: those that were open are chosen here.

    Args:
        world_size: ranks that sum together.
        device_type: that of the gradients, "cpu" or "cuda".
        s_per_byte: seconds that the link takes for each byte that a rank sends; equal on every rank. None: not timed.
        ranks_per_host: ranks on each host for sums on two levels, 1 for sums on one level.
    """
    is_cpu = device_type == "cpu"
    nbytes, in_flight = config.chunks.nbytes, config.chunks.in_flight
    if nbytes is None:
        nbytes = _nbytes(config, world_size, s_per_byte, ranks_per_host) if is_cpu else _DEVICE_NBYTES
    if in_flight is None:
        # On two levels a chunk goes through twice as many collectives.
        under_way_nbytes = _UNDER_WAY_NBYTES * (2 if ranks_per_host > 1 else 1)
        in_flight = min(max(under_way_nbytes // nbytes, _MIN_IN_FLIGHT), _MAX_IN_FLIGHT) if is_cpu else _MIN_IN_FLIGHT
    return dataclasses.replace(config, chunks=Chunks(nbytes, in_flight))


def native(config: Config, world_size: int, device_type: str = "cpu", ranks_per_host: int = 1) -> "_C.WireConfig":
    """The engine's configuration, with the chunks that :func:`resolved` chooses for a link that was not timed; its
    arguments are the same."""
    whole = resolved(config, world_size, device_type, ranks_per_host=ranks_per_host)
    return whole.native(whole.chunks, ranks_per_host)


@contextlib.contextmanager
def fitting_memory(config: Config, world_size: int, device_type: str, ranks_per_host: int) -> Iterator[None]:
    """Context in which an engine allocates its scratch memory. `config` has both numbers of its chunks.

    Raises:
        ValueError: the chunks need more memory than a process may use here, or than can be allocated. Not on
            accelerators, whose allocators say what they lack.
    """
    native = config.native(config.chunks, ranks_per_host)
    num_parts = world_size if _C.is_one_shot(native, world_size) else 2
    scratch_nbytes = config.chunks.in_flight * num_parts * _C.workspace_nbytes(native, world_size)
    needs = (
        f"{config.chunks} needs {scratch_nbytes / _GIB:.1f} GiB of scratch memory on each rank, {{}}: use fewer bytes "
        "or fewer chunks in flight"
    )
    has_nbytes = memory.total_nbytes()
    if device_type == "cpu" and has_nbytes is not None and scratch_nbytes > has_nbytes:
        raise ValueError(needs.format(f"and a process may use {has_nbytes / _GIB:.1f} GiB here"))
    try:
        yield
    except MemoryError as error:
        raise ValueError(needs.format("which cannot be allocated")) from error


def _nbytes(config: Config, world_size: int, s_per_byte: float | None, ranks_per_host: int) -> int:
    """Bytes of a chunk on CPU."""
    # If the transport adds, the order of addition depends on the cuts. Every run must cut alike, whatever the link.
    transport_adds = ranks_per_host == 1 and not config.plan_of_large_buckets(world_size).sums_codes
    if world_size > 2 and transport_adds:
        s_per_byte = None
    p = world_size // ranks_per_host
    # A one-shot sends the whole chunk to each other rank; the other sums send each rank one part of it.
    is_one_shot = ranks_per_host == 1 and not transport_adds and config.is_one_shot(world_size)
    num_parts = 1 if is_one_shot else p
    sent, least = _SECONDS / (s_per_byte or _DEFAULT_S_PER_BYTE), _MIN_NBYTES_PER_RANK * num_parts
    if is_one_shot:
        sent *= _LARGER_IF_ONE_SHOT
        least = max(least, _MIN_NBYTES_IF_ONE_SHOT // max(1, p - 1))
    elif transport_adds:
        sent, least = sent * _LARGER_IF_ADDED, min(_MIN_NBYTES_PER_RANK_IF_ADDED * num_parts, _UNDER_WAY_NBYTES)
    elif p > 2:
        sent, least = sent * _LARGER_AMONG_MANY, max(least, _MIN_NBYTES_AMONG_MANY)
    nbytes = 1 << math.floor(math.log2(max(1.0, sent * num_parts / max(1, p - 1))))
    nbytes = min(max(nbytes, least), _MAX_NBYTES_PER_RANK * num_parts)
    if ranks_per_host > 1:
        # Between hosts a message is as long as it would be among num_hosts ranks on one level. Within a host it holds
        # the parts of every rank on the host, mostly in a wider wire.
        wider = nbytes_per_element(config.local_wire) / nbytes_per_element(config.wire)
        nbytes *= ranks_per_host * max(1, 1 << round(math.log2(wider)))
    return min(nbytes, MAX_DEFAULT_NBYTES)


def max_sending(world_size: int, s_per_byte: float | None) -> int:
    """Returns how many exchanges of a channel may send at once; 0: any number. `s_per_byte`: see :func:`resolved`."""
    is_slow = world_size > 2 and s_per_byte is not None and s_per_byte >= _SLOW_S_PER_BYTE
    return _MAX_SENDING_IF_SLOW if is_slow else 0


def nbytes_per_element(wire: str) -> float:
    """Bytes of an element on the wire, scales included."""
    numel = 1 << 20
    return _C.bucket_layout(wire, _C.default_block_numel(wire), 1, 0, numel, 1 << 30).chunk_nbytes / numel
