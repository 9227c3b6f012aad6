"""The engine from end to end: real ranks over gloo, gradients from DDP's reducer, results that are known exactly."""

import pickle

import pytest
import reference
import torch
import torch.distributed as dist
from models import Gradients, beside_the_users_own_sums, constant, integers, mean_of_integers, synchronize
from ranks import Ranks
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm import env
from fusedcomm.config import Blocks, Chunks, Config, Feedback, LocalOptions, TwoLevels
from fusedcomm.native import _C
from fusedcomm.tools.tcp_counter import tcp_nbytes_sent

CODEC_WIRES = ("fp32", "bf16", "fp16", "int8", "fp8", "int4")
TWO_BY_TWO = [[0, 1], [2, 3]]
SHAPES = ((1,), (7,), (17, 13), (4099,), (64, 64), (3, 5, 7), (20011,))

# --- results that are exactly predictable ---------------------------------------------------------------------------

ONE_LEVEL = [
    ("fp32", {}),
    ("fp32", {"sum": "two-shot"}),
    ("bf16", {}),
    ("bf16", {"sum": "two-shot"}),
    ("bf16", {"sum": "direct"}),
    ("bf16", {"sum": "one-shot"}),
    ("bf16", {"wires": {"1d": "fp32"}}),
    ("fp16", {}),
    ("fp16", {"sum": "direct", "predivide": 4.0}),
    ("fp16", {"sum": "two-shot", "predivide": 0.5}),
]
TWO_LEVELS = [
    ("fp32", {"hosts": TwoLevels(TWO_BY_TWO, "fp32")}),
    ("bf16", {"hosts": TWO_BY_TWO}),
    ("bf16", {"hosts": TwoLevels([[0, 2], [1, 3]], "fp32"), "sum": "two-shot"}),
    ("bf16", {"hosts": [[0, 2], [1, 3]], "wires": {"1d": "fp32"}}),
    ("fp16", {"hosts": TwoLevels(TWO_BY_TWO, "fp16"), "predivide": 2.0}),
]


def exact_means(rank, world_size, wire, kwargs, dtype):
    ddp = DistributedDataParallel(Gradients(*SHAPES, dtype=dtype), bucket_cap_mb=0.02)
    comm = fusedcomm.attach(ddp, Config(wire, **kwargs))
    seen = synchronize(ddp, [integers(rank, shape, dtype) for shape in SHAPES], steps=3)
    exact = [torch.equal(s, mean_of_integers(world_size, shape, dtype)) for s, shape in zip(seen, SHAPES, strict=True)]
    return all(exact), {row.sum for row in comm.plan().buckets}


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("world_size", "wire", "kwargs"),
    [*((world_size, *case) for case in ONE_LEVEL for world_size in (2, 4)), *((4, *case) for case in TWO_LEVELS)],
    ids=str,
)
def test_means_are_exact_where_the_wire_can_carry_them(ranks, world_size, dtype, wire, kwargs):
    for exact, sums in ranks.run(exact_means, wire, kwargs, dtype, world_size=world_size):
        assert exact and ("two-shot" in sums or "hosts" not in kwargs)


def gradient_and_mean(rank, world_size, wire, rotate, numel, sum):
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * (rank + 1)
    ddp = DistributedDataParallel(Gradients((numel,)))
    fusedcomm.attach(ddp, Config(wire, sum, wires={"1d": wire}, blocks=Blocks(rotate=rotate)))
    return gradient, synchronize(ddp, [gradient])[0]


@pytest.mark.sampled
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("numel", [1, 127, 128, 129, 5003, 300007])
@pytest.mark.parametrize("sum", ["two-shot", "one-shot"])
@pytest.mark.parametrize(("wire", "rotate"), [*((wire, False) for wire in CODEC_WIRES), ("int8", True), ("int4", True)])
def test_every_rank_ends_with_the_bits_of_the_reference(ranks, wire, rotate, world_size, numel, sum):
    outcome = ranks.run(gradient_and_mean, wire, rotate, numel, sum, world_size=world_size)
    gradients, block = [gradient for gradient, _ in outcome], _C.default_block_numel(wire)
    expected = reference.all_reduce_mean(gradients, wire, sum, block=block, rotated=rotate)
    assert all(torch.equal(seen, expected) for _, seen in outcome)


def absorbed(rank, world_size, config, dtype):
    """The mean of 256 on rank 0 and 1 on the others. In bf16, 256 + 1 rounds to 256."""
    ddp = DistributedDataParallel(Gradients((20000,), dtype=dtype))
    fusedcomm.attach(ddp, config)
    (seen,) = synchronize(ddp, [torch.full((20000,), 256.0 if rank == 0 else 1.0, dtype=dtype)])
    return seen.unique().tolist()


def test_sums_are_accumulated_in_fp32(ranks):
    # (256 + 1 + 1) / 3 = 86 is exact in bf16. Rounding after each addition would give 256 / 3 → 85.5.
    for sum in ("two-shot", "one-shot", "auto"):
        assert ranks.run(absorbed, Config("bf16", sum=sum), torch.float32, world_size=3) == [[86.0]] * 3
    assert ranks.run(absorbed, Config("fp32"), torch.bfloat16, world_size=3) == [[86.0]] * 3


def scratch(rank, world_size, sums):
    taken = []
    for sum in sums:
        comm = fusedcomm.attach(
            DistributedDataParallel(Gradients((20000,))), Config("int8", sum=sum, chunks=Chunks(8192, in_flight=3))
        )
        taken.append(comm.plan().scratch_nbytes)
        comm.detach()
    return taken


@pytest.mark.parametrize(
    ("world_size", "sums"), [(2, {"auto": 2, "one-shot": 2, "two-shot": 2}), (3, {"one-shot": 3, "auto": 2})]
)
def test_a_workspace_holds_two_chunks_or_every_ranks_in_one_shot(ranks, world_size, sums):
    for taken in ranks.run(scratch, list(sums), world_size=world_size):
        assert taken == [pytest.approx(3 * 8192 * chunks, rel=0.1) for chunks in sums.values()]


# --- results do not depend on chunks, slots, threads, instruction set, or the run -----------------------------------

AT_ONCE = [
    *((wire, {"sum": "two-shot"}, world_size) for wire in CODEC_WIRES for world_size in (2, 3)),
    *((wire, {"hosts": TWO_BY_TWO}, 4) for wire in ("bf16", "int8", "int4")),
    *((wire, {}, 4) for wire in CODEC_WIRES),
    ("bf16", {"sum": "direct"}, 2),
    ("int4", {"feedback": Feedback(), "sum": "two-shot"}, 3),
]


def random_result(rank, world_size, wire, kwargs, local, forced_sync):
    shapes = ((301, 77), (1000,), (7,), (50021,))
    generator = torch.Generator().manual_seed(rank)
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    with pytest.MonkeyPatch.context() as patch:
        if forced_sync:
            patch.setenv(env.SYNC, "1")
        ddp = DistributedDataParallel(Gradients(*shapes))
        fusedcomm.attach(ddp, Config(wire, **kwargs), local=local)
        return torch.cat([seen.flatten() for seen in synchronize(ddp, gradients, steps=2)])


@pytest.mark.sampled
@pytest.mark.parametrize(("wire", "kwargs", "world_size"), AT_ONCE, ids=str)
def test_the_bits_do_not_depend_on_how_the_work_is_cut(ranks, wire, kwargs, world_size):
    results = [
        ranks.run(random_result, wire, {**kwargs, "chunks": chunks}, local, forced_sync, world_size=world_size)
        for chunks, local, forced_sync in (
            (Chunks(), LocalOptions(), False),
            (Chunks(), LocalOptions(), False),
            (Chunks(4096), LocalOptions(), False),
            (Chunks(12345, in_flight=1), LocalOptions(), True),
            (Chunks(12345, in_flight=2), LocalOptions(), False),
            (Chunks(12345, in_flight=3), LocalOptions(), True),
            (Chunks(65536), LocalOptions(codec_threads=3), False),
            (Chunks(in_flight=7), LocalOptions(isa="portable"), True),
            (Chunks(), LocalOptions(codec_threads=3), False),
        )
        # With error feedback the size of chunks matters: it decides which rank keeps the residual of a mean, and DDP's
        # second buckets make that rank another one.
        if "feedback" not in kwargs or chunks.nbytes is None
    ]
    assert all(torch.equal(seen, results[0][0]) for on_ranks in results for seen in on_ranks)


# --- exempt parameters ----------------------------------------------------------------------------------------------


def exempt_result(rank, world_size):
    shapes = ((5000,), (200, 300), (333,))
    generator = torch.Generator().manual_seed(rank)
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    ddp = DistributedDataParallel(Gradients(*shapes))
    comm = fusedcomm.attach(ddp, "int8")
    seen = synchronize(ddp, gradients)
    return gradients, seen, [row.num_chunks for row in comm.plan().buckets], comm.plan().exempt


def test_exempt_parameters_are_exact_and_travel_with_the_others(ranks):
    outcome = ranks.run(exempt_result, world_size=3)
    for index, exact in ((0, True), (1, False), (2, True)):
        in_rank_order = outcome[0][0][index] + outcome[1][0][index] + outcome[2][0][index]
        mean = in_rank_order * torch.tensor(1 / 3)
        for _, seen, _, exempt in outcome:
            assert torch.equal(seen[index], mean) == exact
            assert exempt == ("weights.0", "weights.2")
    # One bucket of one chunk: the exempt parameters need no message of their own.
    assert outcome[0][2] == [1]


# --- non-finite gradients -------------------------------------------------------------------------------------------


def nonfinite_result(rank, world_size, wire, kwargs):
    gradients = [torch.ones(70, 100), torch.ones(9000)]
    if rank == 1:
        gradients[0].view(-1)[17] = float("nan")
        gradients[1][5000] = float("inf")
        gradients[1][7000] = float("-inf")
    ddp = DistributedDataParallel(Gradients((70, 100), (9000,)))
    comm = fusedcomm.attach(ddp, Config(wire, wires={"1d": wire}, **kwargs))
    a, b = synchronize(ddp, gradients)
    far = torch.isfinite(a.view(-1)[1024:]).all() and torch.isfinite(b[:4000]).all()
    stats = comm.stats()
    return (a.view(-1)[17].item(), b[5000].item(), b[7000].item(), bool(far)), stats.nonfinite_by_parameter


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("world_size", "wire", "kwargs"),
    [
        *((2, wire, {"sum": "two-shot"}) for wire in CODEC_WIRES),
        *((4, wire, {"sum": sum}) for wire, sum in (("fp32", "exact"), ("bf16", "direct"), ("fp16", "direct"))),
        *((4, wire, {"hosts": TWO_BY_TWO, "chunks": Chunks(8192)}) for wire in ("fp8", "int4")),
    ],
    ids=str,
)
def test_nan_and_inf_on_one_rank_reach_every_rank_and_are_attributed(ranks, wire, kwargs, world_size):
    for rank, (values, counts) in enumerate(ranks.run(nonfinite_result, wire, kwargs, world_size=world_size)):
        nan, plus, minus, far = values
        assert nan != nan and plus == float("inf") and minus == float("-inf")
        assert far, "a non-finite element must not spread beyond its block"
        assert counts == ({"weights.0": 1, "weights.1": 2} if rank == 1 else {})


# --- shapes ---------------------------------------------------------------------------------------------------------


def shapes_result(rank, world_size, wire, hosts):
    shapes = ((0,), (1,), (3,), (0, 5), (127,), (2, 0), (65537,))
    ddp = DistributedDataParallel(Gradients(*shapes))
    fusedcomm.attach(ddp, Config(wire, sum="two-shot", wires={"1d": wire}, hosts=hosts))
    gradients = [torch.full(shape, float(2 * rank - 1)) for shape in shapes]
    return [seen.unique().tolist() for seen in synchronize(ddp, gradients, steps=3)]


@pytest.mark.sampled
@pytest.mark.parametrize("hosts", [None, TWO_BY_TWO], ids=str)
@pytest.mark.parametrize("wire", CODEC_WIRES)
def test_empty_single_and_odd_sized_parameters(ranks, wire, hosts):
    # Ranks hold -1, 1, 3, 5, so the mean is 2. A block of equal values is quantized without error, except in int4,
    # whose scale is rounded to bf16.
    mean = [constant(2.0, wire)]
    for on_rank in ranks.run(shapes_result, wire, hosts):
        assert on_rank == [[], mean, mean, [], mean, [], mean]


# --- the wire dtype as the process group and the sockets see it -----------------------------------------------------

HEADERS_NBYTES = 4096
"""More bytes than gloo's headers take for the few messages of a step."""


def recorded_step(rank, world_size, wire, kwargs, numel):
    ddp = DistributedDataParallel(Gradients((numel,)), init_sync=False)
    fusedcomm.attach(ddp, Config(wire, **kwargs))
    synchronize(ddp, [integers(rank, (numel,))], steps=3)  # DDP rebuilds the buckets here, which needs a broadcast
    dist.barrier()
    before, sent_before = len(flight_record()), tcp_nbytes_sent()
    synchronize(ddp, [integers(rank, (numel,))])
    sent_nbytes = tcp_nbytes_sent() - sent_before
    entries = flight_record()[before:]
    dist.barrier()
    return [(e["profiling_name"], e["input_dtypes"][0], e["input_sizes"][0][0]) for e in entries], sent_nbytes


def flight_record() -> list[dict]:
    return pickle.loads(torch._C._distributed_c10d._dump_fr_trace()).get("entries", [])


@pytest.fixture(scope="module")
def recording_ranks():
    """Two ranks on which torch's flight recorder records every collective of a gloo backend."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FR_BUFFER_SIZE", "100000")
        pool = Ranks(2)
    yield pool
    pool.close()


NUMEL = 1 << 16


@pytest.mark.sampled(by=lambda wire, kwargs, expected, nbytes: {"sum": kwargs.get("sum"), "in one": bool(expected)})
@pytest.mark.parametrize(
    ("wire", "kwargs", "expected", "nbytes"),
    [
        ("fp32", {}, [("gloo:all_reduce", "Float", NUMEL)], 4 * NUMEL),
        ("bf16", {"sum": "direct"}, [("gloo:all_reduce", "BFloat16", NUMEL)], 2 * NUMEL),
        ("fp16", {"sum": "direct"}, [("gloo:all_reduce", "Half", NUMEL)], 2 * NUMEL),
        # The flight recorder does not record messages. With two ranks, a two-shot sends half of a bucket twice, and a
        # one-shot sends all of it once.
        ("bf16", {"sum": "two-shot"}, [], 2 * NUMEL),
        ("int8", {"sum": "two-shot", "wires": {"1d": "int8"}}, [], NUMEL + 4 * NUMEL // 128),
        ("int4", {"sum": "two-shot", "wires": {"1d": "int4"}}, [], NUMEL // 2 + 2 * NUMEL // 32),
        ("bf16", {}, [], 2 * NUMEL),
        ("fp8", {"wires": {"1d": "fp8"}}, [], NUMEL + 4 * NUMEL // 128),
        ("int4", {"wires": {"1d": "int4"}}, [], NUMEL // 2 + 2 * NUMEL // 32),
    ],
)
def test_the_wire_that_was_asked_for_travels(recording_ranks, wire, kwargs, expected, nbytes):
    for entries, sent_nbytes in recording_ranks.run(recorded_step, wire, kwargs, NUMEL):
        assert entries == expected
        assert nbytes <= sent_nbytes < nbytes + HEADERS_NBYTES


# --- collectives of the user ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kwargs", [{}, {"hosts": TWO_BY_TWO}], ids=str)
def test_collectives_of_the_models_own_hooks_do_not_interleave_with_ours(ranks, kwargs):
    assert ranks.run(beside_the_users_own_sums, kwargs) == [(True, {6.0})] * 4
