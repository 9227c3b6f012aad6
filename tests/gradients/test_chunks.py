"""The size of chunks if a configuration leaves it open."""

import pytest
import torch
from models import Gradients, refusal
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm import chunks, memory
from fusedcomm.config import Chunks, Config, TwoLevels
from fusedcomm.native import _C

KIB, MIB = 1 << 10, 1 << 20
MBIT, GBIT = 8e-6, 8e-9
"""Seconds per byte of a link with 1 Mbit/s, and with 1 Gbit/s."""


ONE_SHOT, TWO_SHOT = {"wire": "int8", "sum": "one-shot"}, {"wire": "int8", "sum": "two-shot"}
BF16 = {"wire": "bf16"}
DIRECT = {**BF16, "sum": "direct"}
CASES = [
    (TWO_SHOT, 2, MBIT / 100, 64 * KIB, 16),  # at least 32 KiB for each rank
    (TWO_SHOT, 4, MBIT / 100, 256 * KIB, 16),  # at least 256 KiB with more than two ranks
    (TWO_SHOT, 2, GBIT, 256 * KIB, 16),  # a collective sends half of a chunk, at most the 250 kB that take 2 ms
    (TWO_SHOT, 2, GBIT / 2, 512 * KIB, 8),
    (TWO_SHOT, 2, GBIT / 10, 2 * MIB, 4),  # at most 1 MiB for each rank
    (TWO_SHOT, 4, 0.7 * GBIT, 512 * KIB, 8),  # the usual timing of 4 hosts with 1 Gbit/s
    (TWO_SHOT, 4, 1.3 * GBIT, 256 * KIB, 16),  # … and a chance one
    (TWO_SHOT, 64, GBIT / 100, 8 * MIB, 4),
    (TWO_SHOT, 64, MBIT / 100, 2 * MIB, 4),
    (TWO_SHOT, 1, None, 128 * KIB, 16),
    (TWO_SHOT, 2, None, 256 * KIB, 16),  # the same as with 1 Gbit/s
    # A rank sends twice as much at a time as in a two-shot on the same link, where it keeps one part of each chunk.
    (ONE_SHOT, 1, None, 256 * KIB, 16),
    (ONE_SHOT, 2, GBIT, 256 * KIB, 16),
    (ONE_SHOT, 2, MBIT / 100, 128 * KIB, 16),
    (ONE_SHOT, 2, GBIT / 10, MIB, 4),
    (ONE_SHOT, 2, GBIT / 100, MIB, 4),
    (ONE_SHOT, 5, GBIT, 64 * KIB, 16),
    ({"wire": "int8"}, 2, MBIT / 100, 128 * KIB, 16),
    # Chunks are larger where each needs one all-reduce.
    (DIRECT, 2, GBIT / 2, 2 * MIB, 4),
    (DIRECT, 2, MBIT / 100, MIB, 4),
    (DIRECT, 3, GBIT, 1536 * KIB, 4),
    ({"wire": "fp32"}, 2, GBIT, MIB, 4),
    ({"wire": "fp32"}, 4, GBIT / 100, 2 * MIB, 4),
    ({"wire": "fp32"}, 64, None, 4 * MIB, 4),
    (BF16, 2, GBIT, 256 * KIB, 16),
    (BF16, 3, GBIT, 512 * KIB, 8),  # a two-shot's time is 1.5 times as long
]


@pytest.mark.parametrize(("options", "world_size", "s_per_byte", "nbytes", "in_flight"), CASES)
def test_chunks_suit_the_link_and_the_sum(options, world_size, s_per_byte, nbytes, in_flight):
    resolved = chunks.resolved(Config(**options), world_size, "cpu", s_per_byte)
    assert (resolved.chunks.nbytes, resolved.chunks.in_flight) == (nbytes, in_flight)


@pytest.mark.parametrize(
    ("options", "s_per_byte", "nbytes", "in_flight"),
    [
        ({"wire": "bf16"}, GBIT, 512 * KIB, 16),  # 256 KiB, as between two ranks, for each of a host's two ranks
        ({"wire": "int8"}, GBIT, MIB, 8),
        ({"wire": "int4"}, GBIT, 2 * MIB, 4),  # messages inside a host are in bf16, four times as long as in int4
        ({"wire": "int4", "hosts": TwoLevels("auto", "fp32")}, GBIT, 4 * MIB, 4),
        ({"wire": "fp32", "hosts": TwoLevels("auto", "fp32")}, GBIT, 512 * KIB, 16),
        ({"wire": "int4"}, MBIT / 100, 512 * KIB, 16),
        ({"wire": "int4"}, GBIT / 100, 8 * MIB, 4),
        ({"wire": "int4", "chunks": Chunks(4096)}, GBIT, 4096, 16),
    ],
    ids=str,
)
def test_chunks_on_two_levels_are_as_long_between_hosts_as_among_as_many_ranks(options, s_per_byte, nbytes, in_flight):
    config = Config(**{"hosts": "auto", **options})
    resolved = chunks.resolved(config, 4, "cpu", s_per_byte, ranks_per_host=2)
    assert (resolved.chunks.nbytes, resolved.chunks.in_flight) == (nbytes, in_flight)
    native = chunks.native(resolved, 4, "cpu", ranks_per_host=2)
    plan = _C.plan_bucket(native, 4, torch.empty(0), [(16 * MIB, 0)])
    wider = config.local_wire != config.wire
    (on_host,) = _C.host_layouts(plan.layouts, config.local_wire, 2)
    assert on_host.chunk_nbytes <= nbytes and (plan.layout.chunk_nbytes < nbytes) == wider


@pytest.mark.parametrize("options", [{"sum": "direct"}, {"wire": "fp32", "sum": "exact"}, {"wire": "fp32"}])
def test_where_the_transport_adds_every_run_cuts_alike(options):
    """If the transport adds, the last bits of a sum of three ranks depend on the cuts. Those of two ranks do not."""
    by_link = [chunks.resolved(Config(**options), 3, "cpu", s_per_byte) for s_per_byte in (None, GBIT / 10, MBIT / 100)]
    assert by_link[0] == by_link[1] == by_link[2]
    for config, world_size in ((Config(**options), 2), (Config(wire="bf16"), 3)):
        fast, slow = (chunks.resolved(config, world_size, "cpu", s_per_byte) for s_per_byte in (GBIT / 10, MBIT / 100))
        assert fast != slow


def test_chunks_on_an_accelerator_are_ddps_buckets():
    resolved = chunks.resolved(Config(), 8, "cuda", None)
    assert (resolved.chunks.nbytes, resolved.chunks.in_flight) == (16 * MIB, 4)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_chunks_that_were_asked_for_stay(device_type):
    asked = Config(wire="int4", chunks=Chunks(12345, in_flight=3))
    assert chunks.resolved(asked, 4, device_type, 1e-9) == asked
    of_size = chunks.resolved(Config(chunks=Chunks(MIB)), 4, device_type, 1e-9)
    assert (of_size.chunks.nbytes, of_size.chunks.in_flight) == (MIB, 4)
    so_many = chunks.resolved(Config(chunks=Chunks(in_flight=7)), 4, device_type, 1e-9)
    assert so_many.chunks.in_flight == 7 and so_many.chunks.nbytes is not None


@pytest.mark.parametrize(
    ("world_size", "s_per_byte", "expected"),
    [(4, MBIT / 100, 2), (3, MBIT / 300, 2), (4, GBIT, 0), (2, MBIT / 100, 0), (4, None, 0)],
)
def test_few_exchanges_send_at_once_where_connections_share_a_slow_line(world_size, s_per_byte, expected):
    assert chunks.max_sending(world_size, s_per_byte) == expected


@pytest.mark.parametrize("sum", ["one-shot", "two-shot"])
def test_chunks_that_do_not_fit_into_the_machines_memory_are_refused(ranks, sum):
    config = Config("int8", sum, chunks=Chunks(64 * MIB, in_flight=4))
    for error in ranks.run(attached_with_memory, config, 256 * MIB, world_size=2):
        assert "Chunks(nbytes=67108864, in_flight=4) needs 0.5 GiB of scratch memory on each rank" in error
        assert "and a process may use 0.2 GiB here: use fewer bytes or fewer chunks in flight" in error


def attached_with_memory(rank, world_size, config, has_nbytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "total_nbytes", lambda: has_nbytes)
        return refusal(fusedcomm.attach, DistributedDataParallel(Gradients((50, 2))), config, quiet=True)


def test_memory_that_cannot_be_allocated_is_an_error_about_chunks():
    config = Config("int8", chunks=Chunks(MIB, in_flight=4))
    with pytest.raises(ValueError, match=r"Chunks\(nbytes=1048576, in_flight=4\) needs .*which cannot be allocated"):
        with chunks.fitting_memory(config, 4, "cpu", 1):
            raise MemoryError("std::bad_alloc")
    with chunks.fitting_memory(config, 4, "cuda", 1):
        pass
