"""Every sum's list of steps: what the ranks end with if they do just that, and the bytes that it takes.

The lists are walked here by ranks that keep, in place of bytes, whose gradients each piece of a message is made of.
"""

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from models import Gradients, synchronise
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import SUMS, Config
from fusedcomm.native import _C
from fusedcomm.tools.tcp_counter import tcp_nbytes_sent

FP32, BF16 = torch.empty(0), torch.empty(0, dtype=torch.bfloat16)

# --- plans of every sum ---------------------------------------------------------------------------------------------


def plans() -> Iterator[tuple["_C.BucketPlan", int, int, str]]:
    """Of every sum, with world size, ranks on a host and what it is."""
    for world_size in (1, 2, 3, 4, 6, 8, 12):
        for per_host in (1, 2, 3, 4):
            if world_size % per_host or (per_host > 1 and world_size == per_host):
                continue
            for sum, wire, exact, like in choices(per_host):
                others = {"head": "bf16", "tail": "int4"} if sum not in ("exact", "direct") else {}
                config = Config(wire=wire, sum=sum, chunk_nbytes=5000, wire_for=others)
                native = config.native(world_size, ranks_per_host=per_host)
                for lossy in (1, 5003, 70001):
                    numels = [lossy, 0, 700][: len(config.wires)]
                    plan = _C.plan_bucket(native, world_size, like, exact, numels)
                    yield plan, world_size, per_host, f"{sum} {wire} {world_size} ranks {per_host} {exact} {numels}"


def choices(per_host: int) -> Iterator[tuple[str, str, int, torch.Tensor]]:
    """(sum, wire, exempt elements, gradients of that dtype)"""
    sums = ("exact", "direct", "two-shot", "one-shot") if per_host == 1 else ("two-shot",)
    assert set(sums) <= set(SUMS) and (per_host > 1 or {"auto", *sums} == set(SUMS))
    for sum in sums:
        wires = {"exact": ("fp32",), "direct": ("bf16", "fp16")}.get(sum, ("fp32", "bf16", "int8", "int4"))
        for wire in wires:
            for exact in (0,) if sum == "direct" else (0, 3, 4099):
                for like in (FP32, BF16):
                    yield sum, wire, exact, like


ALL = list(plans())


def test_there_are_plans_of_every_sum_on_one_level_and_on_two():
    assert {(plan.sum, bool(plan.host_layouts), plan.in_place) for plan, *_ in ALL} == {
        ("exact", False, True),
        ("exact", False, False),
        ("direct", False, False),
        ("two-shot", False, False),
        ("two-shot", True, False),
        ("one-shot", False, False),
    }


# --- ranks that do what the steps say -------------------------------------------------------------------------------


class Ranks:
    """Of `world_size` ranks, those of a host one after the other: what their buffers hold. A message is a list of
    pieces, one for each part of a chunk; a piece counts the ranks whose gradients have been added to it."""

    def __init__(self, plan: "_C.BucketPlan", world_size: int, per_host: int) -> None:
        self.world_size, self.per_host = world_size, per_host
        num_pieces = plan.layout.num_parts
        self.buffers = [{"gradients": [Counter({rank: 1})] * num_pieces} for rank in range(world_size)]
        self.sent_nbytes, self.between_hosts_nbytes = [0] * world_size, [0] * world_size

    def group(self, rank: int, channel: str) -> list[int]:
        first = rank - rank % self.per_host
        if channel.startswith("local"):
            return list(range(first, first + self.per_host))
        if channel.startswith("cross"):
            return list(range(rank % self.per_host, self.world_size, self.per_host))
        return list(range(self.world_size))

    def do(self, step: "_C.Step") -> None:
        read = [dict(buffers)[step.reads] for buffers in self.buffers]  # KeyError: it has not been written
        for rank, buffers in enumerate(self.buffers):
            if step.is_collective:
                group = self.group(rank, step.channel)
                assert len(group) == step.num_ranks
                written = self.received(step, rank, group, read)
            else:
                written = added(step, read[rank])
            # A message is read once; gradients that are sent from where they are stay.
            del buffers[step.reads]
            buffers[step.writes] = written

    def received(self, step: "_C.Step", rank: int, group: list[int], read: list) -> list:
        own, n = group.index(rank), len(group)
        if step.operation == "all-reduce":
            self.sent_nbytes[rank] += Fraction(2 * step.nbytes * (n - 1), n)  # round a ring
            return [sum(pieces, Counter()) for pieces in zip(*(read[peer] for peer in group), strict=True)]
        if step.operation == "all-gather":
            self.count(rank, group, step.nbytes // n)
            return [piece for peer in group for piece in read[peer]]
        assert step.operation == "all-to-all" and step.nbytes % n == 0
        self.count(rank, group, step.nbytes // n)
        return [piece for peer in group for piece in parts(read[peer], n)[own]]

    def count(self, rank: int, group: list[int], nbytes: int) -> None:
        """Of what a rank sends to each of the others."""
        for peer in group:
            self.sent_nbytes[rank] += nbytes if peer != rank else 0
            self.between_hosts_nbytes[rank] += nbytes if peer // self.per_host != rank // self.per_host else 0


def parts(message: list, count: int) -> list[list]:
    assert len(message) % count == 0
    length = len(message) // count
    return [message[i * length : (i + 1) * length] for i in range(count)]


def added(step: "_C.Step", message: list) -> list:
    """By the codec: the parts, or whole messages, of `num_ranks` ranks."""
    if step.operation in ("local reduce", "reduce", "sum"):
        return [sum(pieces, Counter()) for pieces in zip(*parts(message, step.num_ranks), strict=True)]
    assert step.operation in ("scale", "pack", "unpack") and step.num_ranks == 1
    return message


def test_every_rank_ends_with_every_ranks_gradients_once():
    for plan, world_size, per_host, what in ALL:
        ranks = Ranks(plan, world_size, per_host)
        for step in plan.steps:
            ranks.do(step)
        everybodys = [Counter(range(world_size))] * plan.layout.num_parts
        for buffers in ranks.buffers:
            assert buffers == {"gradients": everybodys}, what


def test_the_bytes_of_a_plan_are_those_that_its_ranks_send_each_other():
    for plan, world_size, per_host, what in ALL:
        ranks = Ranks(plan, world_size, per_host)
        for step in plan.steps:
            ranks.do(step)
        for sent_nbytes, between_nbytes in zip(ranks.sent_nbytes, ranks.between_hosts_nbytes, strict=True):
            assert plan.sent_nbytes == int(plan.num_chunks * sent_nbytes), what
            if per_host > 1 and plan.sum == "two-shot":
                assert plan.sent_between_hosts_nbytes(per_host) == plan.num_chunks * between_nbytes, what
        assert plan.sent_nbytes == sum(step.sent_nbytes(plan.num_chunks) for step in plan.steps), what


def test_messages_are_those_of_the_layouts():
    for plan, world_size, per_host, what in ALL:
        for step in plan.steps:
            layout = plan.host_layouts[0] if step.in_local_wire else plan.layout
            if plan.in_place:
                expected = 4 * layout.lossy_numel
            elif step.channel.startswith("cross") or (step.operation == "reduce" and per_host > 1):
                expected = layout.chunk_nbytes // per_host
            elif step.operation == "all-gather" and plan.sum == "one-shot":
                expected = world_size * layout.chunk_nbytes
            else:
                expected = layout.chunk_nbytes
            assert step.nbytes == expected, (what, step.stage)


def test_a_leg_after_the_first_begins_with_a_collective_or_is_the_unpack():
    """What it waits for is work of the codec or, of a sum that has no more to send, the collective before."""
    for plan, _, _, what in ALL:
        steps = plan.steps
        assert not steps[0].begins_leg and not steps[0].is_collective, what
        for before, step in zip(steps, steps[1:], strict=False):
            if step.begins_leg and step.is_collective:
                assert not before.is_collective, what
            elif step.begins_leg:
                assert step is steps[-1] and step.stage == "unpack", what


def test_a_channel_carries_one_collective_of_a_chunk():
    for plan, _, _, what in ALL:
        channels = [step.channel for step in plan.steps if step.is_collective]
        assert len(channels) == len(set(channels)) > 0, what


def test_stages_are_what_traces_call_them():
    for plan, _, _, what in ALL:
        for step in plan.steps:
            if step.is_collective:
                local = "local " if step.channel.startswith("local") else ""
                assert step.stage == local + step.operation, what
            else:
                assert step.stage == {"scale": "pack", "sum": "unpack"}.get(step.operation, step.operation), what


# --- the network ----------------------------------------------------------------------------------------------------

SHAPES = ((512, 512), (1 << 15,))


def counted(rank, world_size, kwargs, num_steps):
    """Bytes over TCP in one step, as the kernel counts them, and as the plan and the statistics add them up."""
    ddp = DistributedDataParallel(Gradients(*SHAPES))
    comm = fusedcomm.attach(ddp, **kwargs)
    gradients = [torch.ones(shape) for shape in SHAPES]
    synchronise(ddp, gradients, steps=3)
    dist.barrier()
    before, stats_before = tcp_nbytes_sent(), comm.stats().sent_nbytes
    synchronise(ddp, gradients, steps=num_steps)
    dist.barrier()
    over_tcp = (tcp_nbytes_sent() - before) / num_steps
    dist.barrier()  # a rank that leaves closes its end of our sockets
    return over_tcp, comm.plan().sent_nbytes, comm.stats().sent_nbytes - stats_before


@pytest.mark.skipif(tcp_nbytes_sent() is None, reason="this kernel does not count the bytes of a socket")
@pytest.mark.parametrize(
    "kwargs",
    [
        {"wire": "fp32", "sum": "exact"},
        {"wire": "bf16", "sum": "direct"},
        {"wire": "bf16", "sum": "one-shot", "exempt": ("1d",)},
        {"wire": "int8", "sum": "one-shot"},
        {"wire": "fp16", "sum": "two-shot"},
        {"wire": "int4", "sum": "two-shot"},
        {"wire": "int8", "sum": "two-shot", "hosts": [[0, 1], [2, 3]]},
    ],
    ids=str,
)
def test_the_network_carries_the_bytes_of_the_steps(ranks, kwargs):
    num_steps = 5
    for over_tcp, planned, in_stats in ranks.run(counted, kwargs, num_steps, world_size=4):
        assert over_tcp == pytest.approx(planned, rel=0.03)
        assert in_stats == num_steps * planned
