"""The engine from end to end: real ranks over gloo, gradients from DDP's reducer, means that are known to the bit."""

import dataclasses
import random
import time
from collections.abc import Iterator, Sequence

import pytest
import reference
import torch
import torch.distributed as dist
from models import (
    Gradients,
    integers,
    mean_of_integers,
    normal,
    synchronize,
)
from ranks import Ranks
from sampling import few
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm import env
from fusedcomm.config import WIRES, Chunks, Config, LocalOptions, TwoLevels
from fusedcomm.native import _C
from fusedcomm.session import session

TWO_BY_TWO = [[0, 1], [2, 3]]
INTERLEAVED = [[0, 2], [1, 3]]


@pytest.fixture(scope="module")
def six_ranks():
    pool = Ranks(6)
    yield pool
    pool.close()


@dataclasses.dataclass(frozen=True)
class Case:
    """What is summed, and how. `wires`: of each parameter."""

    config: Config
    shapes: tuple[tuple[int, ...], ...]
    wires: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    local: LocalOptions = LocalOptions()
    is_synchronous: bool = False
    over_streams: bool = False


class OverStreams(session.CpuPath):
    """Connects by StreamTransport, which serves NCCL, on gloo. Each collective ends before the next begins."""

    def connect(self, process_group, device, store):
        self.codec = "portable"
        native = _C.CpuDevice(isa="auto", codec_threads=1, forced_sync=True)
        return native, _C.StreamTransport(process_group._get_backend(device), device, nccl=_C.TORCHS_CUDA)


def means(rank, world_size, cases, gradients_of):
    """For each case: the means that this rank ends with, and the kinds of sums of its buckets."""
    found = []
    for case in cases:
        with pytest.MonkeyPatch.context() as patch:
            if case.is_synchronous:
                patch.setenv(env.SYNC, "1")
            if case.over_streams:
                patch.setattr(session, "CpuPath", OverStreams)
            ddp = DistributedDataParallel(Gradients(*case.shapes, dtype=case.dtype), bucket_cap_mb=0.25)
            comm = fusedcomm.attach(ddp, case.config, local=case.local)
            seen = synchronize(ddp, gradients_of(rank, case), steps=2)  # DDP rebuilds buckets
            found.append((seen, {row.sum for row in comm.plan().buckets}))
            comm.detach()
    return found


# --- the bits of the reference --------------------------------------------------------------------------------------

ONE_LEVEL = [(world_size, None) for world_size in (1, 2, 3, 4)]
TWO_LEVELS = [(4, TWO_BY_TWO), (4, [[0, 3], [1, 2]])]
SIX_RANKS = [(6, [[0, 1], [2, 3], [4, 5]]), (6, [[0, 1, 2], [3, 4, 5]])]
CHUNKS = [Chunks(), Chunks(4096), Chunks(12345, in_flight=1), Chunks(12345, in_flight=3), Chunks(in_flight=7)]
LOCAL = [LocalOptions(), LocalOptions(codec_threads=3), LocalOptions(isa="portable")]


def drawn(wires: Sequence[str], world_size: int, hosts: list[list[int]] | None, seed: int) -> Iterator[Case]:
    """Yields a case of every wire, and all else by chance."""
    chance = random.Random(f"{wires} {hosts or world_size} {seed}")
    for wire in wires:
        numel = chance.choice([1, 127, 128, 129, 5003, 40009])
        options = {"sum": chance.choice(["two-shot", "one-shot"]), "hosts": None}
        if hosts is not None:
            local_wire = "fp32" if wire == "fp32" else chance.choice(["fp32", "bf16", "fp16"])
            options = {"sum": "two-shot", "hosts": TwoLevels(hosts, local_wire)}
        config = Config(
            wire,
            wires={"1d": wire},
            chunks=chance.choice(CHUNKS),
            **options,
        )
        yield Case(
            config,
            ((0,), (numel,), (2, 0)),  # parameters without elements are no part of any message
            (wire,) * 3,
            local=chance.choice(LOCAL),
            is_synchronous=chance.random() < 0.3,
        )


def with_wires_of_their_own(hosts: list[list[int]] | None) -> Iterator[Case]:
    """Parameters are of whole vectors, so that they have no holes between them, in whatever order they lie."""
    shapes, wires = ((304, 77), (50, 40), (1000, 20), (1000,)), ("int8", "bf16", "int4", "fp32")
    of_parameters = {f"weights.{index}": wire for index, wire in enumerate(wires)}
    exempt = ((5000,), (200, 300), (336,))
    for chunks in (Chunks(), Chunks(6000, in_flight=2)):
        options = {"sum": "two-shot", "hosts": hosts, "chunks": chunks}
        yield Case(Config("fp8", wires=of_parameters, **options), shapes, wires)
        yield Case(Config("int8", **options), exempt, ("fp32", "int8", "fp32"))


OVER_STREAMS = Case(
    Config("int8", "two-shot", wires={"1d": "int8"}, chunks=Chunks(12345), hosts=INTERLEAVED),
    ((50021,),),
    ("int8",),
    over_streams=True,
)


def normals(rank: int, case: Case) -> list[torch.Tensor]:
    return [normal(rank, index, shape) for index, shape in enumerate(case.shapes)]


def expected(world_size: int, case: Case, index: int) -> torch.Tensor:
    """The mean of the parameter `index`, by the reference."""
    config, wire = case.config, case.wires[index]
    groups = [[rank] for rank in range(world_size)] if config.hosts is None else config.groups
    return reference.all_reduce_mean(
        [normals(rank, case)[index].flatten() for group in groups for rank in group],
        wire,
        config.sum,
        block=_C.default_block_numel(wire),
        ranks_per_host=len(groups[0]),
        local_wire="fp32" if wire == "fp32" else config.local_wire,
    ).view(case.shapes[index])


def check_bits(pool: Ranks, subtests, world_size: int, cases: list[Case]) -> None:
    of_ranks = pool.run(means, cases, normals, world_size=world_size)
    for case, *on_ranks in zip(cases, *of_ranks, strict=True):
        with subtests.test(case=str(case)):
            wanted = [expected(world_size, case, index) for index in range(len(case.shapes))]
            for seen, _ in on_ranks:
                assert all(torch.equal(mean, exact) for mean, exact in zip(seen, wanted, strict=True))


@pytest.mark.parametrize(("world_size", "hosts"), ONE_LEVEL + TWO_LEVELS, ids=str)
@pytest.mark.parametrize("wires", [WIRES[:4], WIRES[4:]], ids=str)
@pytest.mark.parametrize("seed", few(range(5), 0))
def test_every_rank_ends_with_the_bits_of_the_reference(ranks, subtests, seed, wires, world_size, hosts):
    """They depend neither on how the work is cut, nor on threads or the instruction set."""
    check_bits(ranks, subtests, world_size, list(drawn(wires, world_size, hosts, seed)))


@pytest.mark.check
@pytest.mark.parametrize(("world_size", "hosts"), SIX_RANKS, ids=str)
def test_so_it_is_of_six_ranks(six_ranks, subtests, world_size, hosts):
    check_bits(six_ranks, subtests, world_size, list(drawn(WIRES, world_size, hosts, 0)))


@pytest.mark.parametrize(("world_size", "hosts"), [(3, None), (4, INTERLEAVED)], ids=str)
def test_so_it_is_of_parameters_with_wires_of_their_own(ranks, subtests, world_size, hosts):
    check_bits(ranks, subtests, world_size, list(with_wires_of_their_own(hosts)))


def test_so_it_is_over_the_transport_for_streams(ranks, subtests):
    check_bits(ranks, subtests, 4, [OVER_STREAMS])


def in_a_subgroup(rank, world_size, case):
    """The hosts' ranks are those in the group."""
    members = [1, 2, 4, 5]
    group = dist.new_group(members)
    if rank not in members:
        return None
    ddp = DistributedDataParallel(Gradients(*case.shapes), process_group=group)
    comm = fusedcomm.attach(ddp, case.config)
    return synchronize(ddp, normals(members.index(rank), case), steps=2), comm.plan().hosts.groups


@pytest.mark.check
def test_hosts_are_of_the_ranks_of_ddps_own_group(six_ranks):
    case = dataclasses.replace(OVER_STREAMS, over_streams=False)
    for of_rank in filter(None, six_ranks.run(in_a_subgroup, case)):
        (seen,), groups = of_rank
        assert groups == ((0, 2), (1, 3)) and torch.equal(seen, expected(4, case, 0))


# --- sums whose order of addition the transport chooses, of values that they add without rounding -------------------

EXACT = {
    "fp32": [{}, {"sum": "two-shot"}, {"hosts": TwoLevels(TWO_BY_TWO, "fp32")}],
    "bf16": [{}, {"sum": "direct"}, {"hosts": TWO_BY_TWO}, {"hosts": INTERLEAVED, "wires": {"1d": "fp32"}}],
    "fp16": [{}, {"sum": "direct"}, {"hosts": TwoLevels(TWO_BY_TWO, "fp16")}],
}
SHAPES = ((1,), (0,), (7,), (17, 13), (4099,), (64, 64), (3, 5, 7), (0, 5), (20011,))


def all_integers(rank: int, case: Case) -> list[torch.Tensor]:
    return [integers(rank, shape, case.dtype) for shape in case.shapes]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wire", EXACT)
def test_means_are_exact_where_the_wire_can_carry_them(ranks, subtests, wire, dtype, world_size):
    every = [options for options in EXACT[wire] if world_size == 4 or "hosts" not in options]
    cases = [Case(Config(wire, **options), SHAPES, dtype=dtype) for options in every]
    of_ranks = ranks.run(means, cases, all_integers, world_size=world_size)
    for case, *on_ranks in zip(cases, *of_ranks, strict=True):
        with subtests.test(case=str(case)):
            wanted = [mean_of_integers(world_size, shape, case.dtype) for shape in SHAPES]
            for seen, sums in on_ranks:
                assert all(torch.equal(mean, exact) for mean, exact in zip(seen, wanted, strict=True))
                assert sums <= {case.config.sum} or case.config.sum == "auto"


def one_large(rank: int, case: Case) -> list[torch.Tensor]:
    """256 on rank 0 and 1 on the others. In bf16, 256 + 1 rounds to 256."""
    return [torch.full(shape, 256.0 if rank == 0 else 1.0, dtype=case.dtype) for shape in case.shapes]


def test_an_exact_sum_of_bf16_gradients_is_accumulated_in_fp32(ranks):
    # (256 + 1 + 1) / 3 = 86 is exact in bf16. Rounding after each addition would give 256 / 3 → 85.5.
    case = Case(Config("fp32"), ((20000,),), dtype=torch.bfloat16)
    for (((mean,), _),) in ranks.run(means, [case], one_large, world_size=3):
        assert mean.unique().tolist() == [86.0]


# --- non-finite gradients -------------------------------------------------------------------------------------------

NOT_FINITE = [
    *((2, Config(wire, "two-shot", wires={"1d": wire})) for wire in WIRES),
    *((4, Config(wire, sum)) for wire, sum in (("fp32", "exact"), ("bf16", "direct"), ("fp16", "direct"))),
    *((4, Config(wire, wires={"1d": wire}, hosts=TWO_BY_TWO, chunks=Chunks(8192))) for wire in ("fp8", "int4")),
]


def not_finite(rank, world_size, configs):
    gradients = [torch.ones(70, 100), torch.ones(9000)]
    if rank == 1:
        gradients[0].view(-1)[17] = float("nan")
        gradients[1][5000] = float("inf")
        gradients[1][7000] = float("-inf")
    found = []
    for config in configs:
        ddp = DistributedDataParallel(Gradients((70, 100), (9000,)))
        comm = fusedcomm.attach(ddp, config)
        a, b = synchronize(ddp, gradients)
        far = torch.isfinite(a.view(-1)[1024:]).all() and torch.isfinite(b[:4000]).all()
        values = str((a.view(-1)[17].item(), b[5000].item(), b[7000].item()))
        found.append((values, bool(far), comm.stats().nonfinite_by_parameter))
        comm.detach()
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_nan_and_inf_on_one_rank_reach_every_rank_and_are_attributed(ranks, subtests, world_size):
    configs = [config for size, config in NOT_FINITE if size == world_size]
    for rank, found in enumerate(ranks.run(not_finite, configs, world_size=world_size)):
        for config, (values, far, counts) in zip(configs, found, strict=True):
            with subtests.test(rank=rank, config=str(config)):
                assert values == "(nan, inf, -inf)"
                assert far, "a non-finite element must not spread beyond its block"
                assert counts == ({"weights.0": 1, "weights.1": 2} if rank == 1 else {})


# --- order ----------------------------------------------------------------------------------------------------------


class Mixed(torch.nn.Module):
    """A model whose backward pass has buckets of four kinds: summed on two levels, summed in place over all ranks,
    float64, and sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 8, sparse=True)
        self.small = torch.nn.Parameter(torch.zeros(10))
        self.in_double = torch.nn.Parameter(torch.zeros(20, dtype=torch.float64))
        self.large = torch.nn.Parameter(torch.zeros(200, 300))

    def forward(self, rows: torch.Tensor, value: float) -> torch.Tensor:
        dense = (self.large.sum() + self.small.sum() + self.in_double.sum().float()) * value
        return dense + self.embedding(rows).sum() * value


def mixed_buckets(rank, world_size):
    model = Mixed()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    comm = fusedcomm.attach(ddp, Config("int8", chunks=Chunks(4096), hosts=INTERLEAVED))
    for step in range(6):
        ddp.zero_grad(set_to_none=True)
        time.sleep(0.003 * ((rank * 5 + step) % 3))
        ddp(torch.tensor([rank, 7]), float(rank)).backward()
    embedded = model.embedding.weight.grad.to_dense()[:, 0]
    dense = [p.grad.unique().tolist() for p in (model.large, model.small, model.in_double)]
    return dense, embedded[[0, 1, 2, 3, 7]].tolist(), [row.sum for row in comm.plan().buckets]


def test_buckets_on_one_level_and_on_two_in_one_backward_pass(ranks):
    for dense, embedded, sums in ranks.run(mixed_buckets):
        assert dense == [[1.5], [1.5], [1.5]]
        assert embedded == [0.0, 0.25, 0.5, 0.75, 1.5]
        assert {"two-shot", "exact"} <= set(sums)
