"""How large a bucket's chunks are, and how many of them are under way, where a configuration leaves that open."""

import dataclasses
import math

from fusedcomm.config import Chunks, Config
from fusedcomm.native import _C

# A chunk takes so long on the link, as it was timed at attach. Each costs some tenths of a millisecond beside its
# bytes, and while it is on its way its codec stages wait. Speed-up over DDP's default on bench/hosts.py: 4 hosts, 100
# Mbit/s, int4 in chunks of 512 KiB ×6.0, of 256 KiB ×6.2, of 128 KiB another 2%; 2 hosts, 10 Gbit/s, bf16 in chunks of
# 512 KiB ×1.0, of 2 MiB ×1.4.
_SECONDS = 2e-3
_LARGER_IF_ONE_SHOT, _MIN_NBYTES_IF_ONE_SHOT = 2, 128 << 10
"""It has one collective on its way. 2 hosts, 1 Gbit/s, chunks of 256 KiB instead of 128: a step of a ResNet takes 5%
less with bf16, 3% with int4, as long with int8; synchronisation alone 1% less (bf16, int8) and 4% (int4). With 512 KiB
bf16 takes more again. 100 Mbit/s, of 128 KiB instead of 32: the fastest of ten steps took 868.8 ms instead of 872.5
with bf16, for 0.4% fewer bytes (the C++ fp16 hook: 869.5), 459.7 instead of 461.7 with int8."""
_LARGER_AMONG_MANY = 1.5
"""A two-shot of more than two ranks, whose chunks cost more: each is a message to every other one. 4 hosts, 1 Gbit/s,
all on two cores: bf16 in chunks of 128 KiB 886 ms a step, of 256 KiB 779, of 512 KiB 760; int8 546, 470, 474; int4 371,
365, 331. That link is timed as 6 to 10 ns a byte: without this, chance chose between 256 and 128 KiB."""
_MIN_NBYTES_AMONG_MANY = 256 << 10
"""4 hosts, 100 Mbit/s, instead of 128 KiB, of which only half as many bytes are under way: 1,316 ms instead of 1,324
with bf16 (torch's fp16 hook: 1,303), 696 instead of 705 with int8, as long with int4; 128 KiB with as many bytes under
way took 1,321, 706 and as long."""
_LARGER_IF_DIRECT, _MIN_NBYTES_IF_DIRECT = 4, 1 << 20
"""One all-reduce of two ranks cuts its message by itself and has one stage on its way: of larger chunks only the cost
is less. Beside a step that computes, on 2 hosts at 1 Gbit/s: 0.24 ms of a core for each chunk. At 100 Mbit/s 256 KiB
took 0.9% more time, and 1% more bytes, than 1 MiB; 2 MiB no less."""
_DEFAULT_S_PER_BYTE = 8e-9
"""Of a link that nobody has timed: 1 Gbit/s."""
_MIN_NBYTES_PER_RANK, _MAX_NBYTES_PER_RANK = 32 << 10, 1 << 20
MAX_DEFAULT_NBYTES = 8 << 20

# Many small ones: ranks do not get on equally fast, and a rank's link is idle while all its chunks wait for others'.
_UNDER_WAY_NBYTES = 4 << 20
_MIN_IN_FLIGHT, _MAX_IN_FLIGHT = 4, 16

_SLOW_S_PER_BYTE = 2e-8
_MAX_SENDING_IF_SLOW = 2
"""Exchanges of a channel. TCP shares a line unevenly among connections, so that some ranks end a step later than
others. 4 hosts, 100 Mbit/s, the slowest rank's first, second and third step after a barrier (torch's fp16 hook: 1,286,
1,292 and 1,287 ms): with bf16 1,287, 1,291 and 1,289 ms, where three may send 1,293, 1,288 and 1,292, where all may
1,303, 1,296 and 1,297. int8: 683, 684 and 681 ms instead of 692, 686 and 684; int4 no different. At 1 Gbit/s nothing
that repeats; at 10 Gbit/s bf16 takes 4% longer for it."""

# On an accelerator a chunk costs up to three launches and two collectives, so DDP's buckets (25 MiB of gradients) are
# not cut: up to 32 MiB of fp32 gradients fit on a 16-bit wire, 62 MiB on int8.
_DEVICE_NBYTES = 16 << 20


def resolved(
    config: Config,
    world_size: int,
    device_type: str = "cpu",
    s_per_byte: float | None = None,
    ranks_per_host: int = 1,
) -> Config:
    """`config` with numbers where its chunks were left open.

    Args:
        s_per_byte: seconds that the link takes for each byte a rank sends, the same on every rank; None: not timed.
        ranks_per_host: more than one for sums on two levels.
    """
    is_cpu = device_type == "cpu"
    nbytes, in_flight = config.chunks.nbytes, config.chunks.in_flight
    if nbytes is None:
        nbytes = _nbytes(config, world_size, s_per_byte, ranks_per_host) if is_cpu else _DEVICE_NBYTES
    if in_flight is None:
        # On two levels a chunk has twice as many collectives to be in.
        under_way_nbytes = _UNDER_WAY_NBYTES * (2 if ranks_per_host > 1 else 1)
        in_flight = min(max(under_way_nbytes // nbytes, _MIN_IN_FLIGHT), _MAX_IN_FLIGHT) if is_cpu else _MIN_IN_FLIGHT
    return dataclasses.replace(config, chunks=Chunks(nbytes, in_flight))


def native(config: Config, world_size: int, device_type: str = "cpu", ranks_per_host: int = 1) -> "_C.WireConfig":
    """For the engine; as :func:`resolved` for a link that nobody has timed."""
    whole = resolved(config, world_size, device_type, ranks_per_host=ranks_per_host)
    return whole.native(whole.chunks, ranks_per_host)


def _nbytes(config: Config, world_size: int, s_per_byte: float | None, ranks_per_host: int) -> int:
    """Over CPU channels."""
    # Where the transport adds, in an order that depends on the cuts, every run has to cut alike.
    transport_adds = not config.plan_of_large_buckets(world_size).sums_codes
    if world_size > 2 and transport_adds:
        s_per_byte = None
    p = world_size // ranks_per_host
    # In a one-shot a chunk is what goes to each of the others, else a part of it is.
    is_one_shot = ranks_per_host == 1 and config.is_one_shot(world_size)
    num_parts = 1 if is_one_shot else p
    sent, least = _SECONDS / (s_per_byte or _DEFAULT_S_PER_BYTE), _MIN_NBYTES_PER_RANK * num_parts
    if is_one_shot:
        sent *= _LARGER_IF_ONE_SHOT
        least = max(least, _MIN_NBYTES_IF_ONE_SHOT // max(1, p - 1))
    elif world_size <= 2 and config.sum == "direct":
        sent, least = sent * _LARGER_IF_DIRECT, _MIN_NBYTES_IF_DIRECT
    elif p > 2 and not transport_adds:
        sent, least = sent * _LARGER_AMONG_MANY, max(least, _MIN_NBYTES_AMONG_MANY)
    nbytes = 1 << math.floor(math.log2(max(1.0, sent * num_parts / max(1, p - 1))))
    nbytes = min(max(nbytes, least), _MAX_NBYTES_PER_RANK * num_parts)
    if ranks_per_host > 1:
        # A chunk is as long between hosts as it would be among so many ranks. Within a host its message has all
        # ranks' parts of it, mostly in a wider wire: 2 hosts × 2 ranks, 1 Gbit/s, int4, 10 M parameters: 214 ms
        # where that message is 128 KiB, 78 where it is 2 MiB.
        wider = nbytes_per_element(config.local_wire) / nbytes_per_element(config.wire)
        nbytes *= ranks_per_host * max(1, 1 << round(math.log2(wider)))
    return min(nbytes, MAX_DEFAULT_NBYTES)


def max_sending(world_size: int, s_per_byte: float | None) -> int:
    """How many exchanges of a channel send at once; 0: any number. `s_per_byte`: as of :func:`resolved`."""
    is_slow = world_size > 2 and s_per_byte is not None and s_per_byte >= _SLOW_S_PER_BYTE
    return _MAX_SENDING_IF_SLOW if is_slow else 0


def nbytes_per_element(wire: str) -> float:
    """On the wire, scales included."""
    numel = 1 << 20
    return _C.bucket_layout(wire, _C.default_block_numel(wire), 1, 0, numel, 1 << 30).chunk_nbytes / numel
