"""The bytes that the ranks send in every sum, in all and to other hosts: planned, counted by engines and by the kernel
of the operating system. Of ranks on hosts that have different numbers of them: test_hosts.py."""

from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from models import Gradients, synchronize
from tcp_counter import tcp_nbytes_sent
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm import chunks
from fusedcomm.config import SUMS, WIRES, WITH_SCALES, Chunks, Config, TwoLevels
from fusedcomm.native import _C

FP32, BF16 = torch.empty(0), torch.empty(0, dtype=torch.bfloat16)

# --- plans of every sum ---------------------------------------------------------------------------------------------


def plans() -> Iterator[tuple["_C.BucketPlan", int, int, Config, torch.Tensor, str]]:
    """Yields plans of every sum, each with the world size, the ranks per host, the configuration, a tensor of the
    gradients' dtype and a description."""
    for world_size in (1, 2, 3, 4, 6, 8, 12):
        for per_host in (1, 2, 3, 4):
            if world_size % per_host or (per_host > 1 and world_size == per_host):
                continue
            for sum, wire, exact, like in choices(per_host):
                others = {"head": "bf16", "tail": "int4"} if sum not in ("exact", "direct") else {}
                config = Config(wire=wire, sum=sum, wires=others, chunks=Chunks(5000))
                native = chunks.native(config, world_size, ranks_per_host=per_host)
                for lossy in (1, 5003, 70001):
                    numels = [lossy, 0, 700][: len(config.numbered_wires)]
                    slices = [(exact, _C.EXACT_WIRE), *((numel, wire) for wire, numel in enumerate(numels))]
                    plan = _C.plan_bucket(native, world_size, like, slices)
                    what = f"{sum} {wire} {world_size} ranks {per_host} {exact} {numels}"
                    yield plan, world_size, per_host, config, like, what


def choices(per_host: int) -> Iterator[tuple[str, str, int, torch.Tensor]]:
    """Yields (sum, wire dtype, number of exempt elements, a tensor of the gradients' dtype)."""
    sums = ("exact", "direct", "two-shot", "one-shot") if per_host == 1 else ("two-shot",)
    assert set(sums) <= set(SUMS) and (per_host > 1 or {"auto", *sums} == set(SUMS))
    for sum in sums:
        wires = {"exact": ("fp32",), "direct": ("bf16", "fp16")}.get(sum, ("fp32", "bf16", "int8", "int4"))
        for wire in wires:
            for exact in (0,) if sum == "direct" else (0, 3, 4099):
                for like in (FP32, BF16):
                    yield sum, wire, exact, like


def is_in_place(plan: "_C.BucketPlan", like: torch.Tensor) -> bool:
    return plan.sum == "exact" and like is FP32


# --- the formulae ---------------------------------------------------------------------------------------------------

BITS = {
    "fp32": 32,
    "bf16": 16,
    "fp16": 16,
    "fp8": 8 + 32 / 128,
    "int8": 8 + 32 / 128,
    "int4": 4 + 16 / 32,
}
"""By wire dtype: bits of an element, including its share of its block's scale."""
NUMEL = 24 * 12 * 1024
"""Elements of a bucket. In 4 chunks for 1, 2, 3, 4, 6 or 12 ranks, every part has whole blocks: nothing is padded."""
SUMS_OF_WIRES = [("exact", "fp32"), ("direct", "bf16"), ("direct", "fp16")]
SUMS_OF_WIRES += [(sum, wire) for sum in ("two-shot", "one-shot") for wire in BITS]


def test_the_formulae_know_every_sum_and_wire():
    assert {"auto", *(sum for sum, _ in SUMS_OF_WIRES)} == set(SUMS) and set(BITS) == set(WIRES)


def message_nbytes(wire: str) -> int:
    return int(NUMEL * BITS[wire] / 8)


def _config(sum: str, wire: str, chunks: Chunks | None = None, hosts: TwoLevels | str = "auto") -> Config:
    """The same wire for all parameters."""
    return Config(wire, sum, wires={"1d": wire}, chunks=chunks or Chunks(), hosts=hosts)


def formula(sum: str, wire: str, world_size: int, per_host: int = 1, local_wire: str = "bf16") -> tuple[int, int]:
    """Bytes that one rank sends for NUMEL elements, and how many of them go to other hosts.

    Among p ranks, for a message of n bytes, an all-to-all or an all-gather sends (p−1)/p · n, and a ring all-reduce
    sends 2(p−1)/p · n. A ring of all ranks leaves each host once.
    """
    n, p = Fraction(message_nbytes(wire)), world_size
    if per_host > 1 and sum == "two-shot":
        num_hosts = world_size // per_host
        within = Fraction(per_host - 1, per_host) * (message_nbytes(local_wire) + n)
        between = 2 * Fraction(num_hosts - 1, num_hosts) * n / per_host
    else:
        # A one-shot is an all-gather of p · n bytes: in the end every rank has the messages of all ranks.
        within, between = 0, (p - 1) * n if sum == "one-shot" else 2 * Fraction(p - 1, p) * n
    assert Fraction(within).denominator == between.denominator == 1
    return int(within + between), int(between)


def test_bytes_of_padded_messages_are_those_of_the_formula():
    """The messages have the layouts' sizes. Several wire dtypes and exempt parameters share a message, and chunks are
    uneven."""
    for plan, p, per_host, config, like, what in plans():
        n = 4 * plan.layout.lossy_numel if is_in_place(plan, like) else plan.num_chunks * plan.layout.chunk_nbytes
        if per_host > 1:
            (on_host, *_) = _C.host_layouts(plan.layouts, config.local_wire, per_host)
            workspace = _C.workspace_nbytes(chunks.native(config, p, ranks_per_host=per_host), p)
            assert max(on_host.part_stride * per_host, plan.layout.chunk_nbytes) <= workspace, what
            assert on_host.num_chunks == plan.num_chunks, what
            between = 2 * n // p * (p // per_host - 1)
            within = (plan.num_chunks * on_host.chunk_nbytes + n) // per_host * (per_host - 1)
        else:
            within, between = 0, (p - 1) * n if plan.sum == "one-shot" else 2 * n * (p - 1) // p
        assert plan.sent_nbytes == within + between, what
        assert plan.sent_between_hosts_nbytes(per_host, 1) == between, what


# --- engines and the network ---------------------------------------------------------------------------------------


def counted(rank, world_size, num_steps, configs):
    """Trains with a bucket of NUMEL elements. Returns for each of `configs`: the sum, the number of chunks, the largest
    error of an element, the bytes of a step as planned, and the bytes that the engine's statistics and the operating
    system count in `num_steps` steps."""
    # Multiples of the world size, because an exact sum is divided by it beforehand.
    values = world_size * (torch.arange(NUMEL, dtype=torch.float32) % 15 - 7)
    gradient, mean = values * (rank + 1), values * (world_size + 1) / 2
    found = []
    for config in configs:
        ddp = DistributedDataParallel(Gradients((NUMEL,)), bucket_cap_mb=10)
        comm = fusedcomm.attach(ddp, config, quiet=True)
        synchronize(ddp, [gradient], steps=2)
        dist.barrier()
        before, over_tcp = comm.stats(), tcp_nbytes_sent()
        (seen,) = synchronize(ddp, [gradient], steps=num_steps)
        dist.barrier()
        after, over_tcp = comm.stats(), over_tcp and tcp_nbytes_sent() - over_tcp
        dist.barrier()  # a rank that detaches closes its end of the sockets
        (row,) = comm.plan().buckets
        found.append(
            {
                "sum": row.sum,
                "chunks": row.num_chunks,
                "scratch": comm.plan().scratch_nbytes,
                "off": (seen - mean).abs().max().item(),
                "planned": comm.plan().sent_nbytes,
                "sent": after.sent_nbytes - before.sent_nbytes,
                "over TCP": over_tcp,
                "between hosts": after.sent_between_hosts_nbytes - before.sent_between_hosts_nbytes,
            }
        )
        comm.detach()
    return found


def configs_of(per_host: int) -> dict[tuple[str, str, str], Config]:
    """By sum, wire and the wire within a host: configurations with four chunks of a bucket, of which three are under
    way."""
    if per_host == 1:
        return {
            (sum, wire, wire): _config(sum, wire, Chunks(message_nbytes(wire) // 4, 3)) for sum, wire in SUMS_OF_WIRES
        }
    found = {}
    for wire, local_wire in (("fp32", "fp32"), ("int8", "fp32"), ("fp16", "bf16"), ("fp8", "bf16"), ("int4", "bf16")):
        nbytes, hosts = max(map(message_nbytes, (wire, local_wire))) // 4, TwoLevels([[0, 1], [2, 3]], local_wire)
        found["two-shot", wire, local_wire] = _config("two-shot", wire, Chunks(nbytes), hosts)
    return found


@pytest.mark.parametrize(("world_size", "per_host"), [(2, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("third", range(3))
def test_the_network_carries_the_bytes_of_the_formula(ranks, subtests, third, world_size, per_host):
    num_steps, configs = 2, dict(list(configs_of(per_host).items())[third::3])
    of_ranks = ranks.run(counted, num_steps, list(configs.values()), world_size=world_size)
    for (sum, wire, local_wire), *on_ranks in zip(configs, *of_ranks, strict=True):
        with subtests.test(sum=sum, wire=wire, local_wire=local_wire):
            sent, between = formula(sum, wire, world_size, per_host, local_wire)
            for seen in on_ranks:
                assert seen["sum"] == sum and seen["chunks"] == (1 if sum == "exact" else 4)
                assert seen["sent"] == num_steps * sent and seen["planned"] == sent
                if seen["over TCP"] is not None:  # this kernel counts the bytes of a socket
                    assert seen["sent"] <= seen["over TCP"] < 1.03 * seen["sent"]
                # Without two levels, all ranks share this host.
                assert seen["between hosts"] == (num_steps * between if per_host > 1 else 0)
                assert seen["off"] == 0 or wire in WITH_SCALES
                if per_host == 1 and sum not in ("exact", "direct"):  # every rank's chunk, or what is sent and received
                    num_chunks = 3 * (world_size if sum == "one-shot" else 2)
                    assert seen["scratch"] == pytest.approx(num_chunks * message_nbytes(wire) / 4, rel=0.1)
