"""Sums on two levels: real ranks over gloo, some of which pretend to share a host; results that are known exactly."""

import os
import signal
import time

import pytest
import reference
import torch
import torch.distributed as dist
from models import Gradients, on_host, synchronize
from ranks import Ranks
from torch.nn.parallel import DistributedDataParallel
from traces import read

import fusedcomm
from fusedcomm import chunks
from fusedcomm.config import Blocks, Chunks, Config, Feedback, TwoLevels
from fusedcomm.devices.cpu import CpuPath
from fusedcomm.native import _C
from fusedcomm.session import session
from fusedcomm.trace import document as trace

TWO_BY_TWO = [[0, 1], [2, 3]]
INTERLEAVED = [[0, 2], [1, 3]]


@pytest.fixture(scope="module")
def six_ranks():
    pool = Ranks(6)
    yield pool
    pool.close()


def in_order_of_hosts(of_ranks: list, hosts: list[list[int]]) -> list:
    return [of_ranks[rank] for group in hosts for rank in group]


# --- results that are exactly predictable ---------------------------------------------------------------------------


def result(rank, world_size, wire, kwargs, shapes, local=None):
    generator = torch.Generator().manual_seed(rank)
    gradients = [torch.randn(shape, generator=generator) * (rank + 1) for shape in shapes]
    ddp = DistributedDataParallel(Gradients(*shapes))
    fusedcomm.attach(ddp, Config(wire, **kwargs), local=local)
    seen = synchronize(ddp, gradients, steps=2)
    return torch.cat([g.flatten() for g in gradients]), torch.cat([s.flatten() for s in seen])


def check_against_reference(outcome, hosts, wire, rotated=False, local_wire="bf16", exempt_mask=None):
    gradients = in_order_of_hosts([gradient for gradient, _ in outcome], hosts)
    expected = reference.all_reduce_mean(
        gradients,
        wire,
        block=_C.default_block_numel(wire),
        rotated=rotated,
        ranks_per_host=len(hosts[0]),
        local_wire=local_wire,
        exempt_mask=exempt_mask,
    )
    config = Config(wire, "two-shot", blocks=Blocks(rotate=rotated), hosts=TwoLevels(hosts, local_wire))
    simulated = fusedcomm.simulate([gradient for gradient, _ in outcome], config, exempt_mask=exempt_mask)
    assert torch.equal(simulated, expected)
    for _, seen in outcome:
        assert torch.equal(seen, expected)


WIRES = [
    ("bf16", False, "bf16"),
    ("fp16", False, "fp32"),
    ("int8", False, "bf16"),
    ("fp8", False, "bf16"),
    ("fp8", False, "fp16"),
    ("int4", True, "bf16"),
    ("int4", False, "fp32"),
]


@pytest.mark.sampled
@pytest.mark.parametrize("hosts", [TWO_BY_TWO, [[0, 3], [1, 2]]], ids=str)
@pytest.mark.parametrize("numel", [1, 129, 40009, 300007])
@pytest.mark.parametrize(("wire", "rotate", "local_wire"), WIRES)
def test_every_rank_ends_with_the_bits_of_the_reference(ranks, wire, rotate, local_wire, hosts, numel):
    kwargs = {
        "sum": "two-shot",
        "wires": {"1d": wire},
        "blocks": Blocks(rotate=rotate),
        "hosts": TwoLevels(hosts, local_wire),
    }
    check_against_reference(ranks.run(result, wire, kwargs, ((numel,),)), hosts, wire, rotate, local_wire)


@pytest.mark.sampled
@pytest.mark.parametrize("hosts", [[[0, 1], [2, 3], [4, 5]], [[0, 1, 2], [3, 4, 5]]], ids=["3x2", "2x3"])
@pytest.mark.parametrize(("wire", "rotate", "local_wire"), WIRES[::3])
def test_six_ranks(six_ranks, hosts, wire, rotate, local_wire):
    kwargs = {
        "wires": {"1d": wire},
        "blocks": Blocks(rotate=rotate),
        "chunks": Chunks(50000),
        "hosts": TwoLevels(hosts, local_wire),
    }
    check_against_reference(six_ranks.run(result, wire, kwargs, ((100003,),)), hosts, wire, rotate, local_wire)


def test_exempt_parameters_are_summed_host_by_host_in_fp32(ranks):
    shapes = ((5000,), (200, 300), (336,))  # multiples of a vector: there are no holes, in whatever order they lie
    mask = torch.cat([torch.full((torch.Size(shape).numel(),), len(shape) == 1) for shape in shapes])
    for kwargs in ({}, {"chunks": Chunks(8192)}):
        outcome = ranks.run(result, "int8", {"hosts": TWO_BY_TWO, **kwargs}, shapes)
        check_against_reference(outcome, TWO_BY_TWO, "int8", exempt_mask=mask)


def test_parameters_with_wires_of_their_own(ranks):
    shapes = ((304, 77), (50, 40), (1000, 20), (1000,))  # no holes, as above
    wires = ("int8", "bf16", "int4", "fp32")
    own = {"hosts": TWO_BY_TWO, "wires": {f"weights.{index}": wire for index, wire in enumerate(wires)}}
    results = [
        ranks.run(result, "fp8", {**own, **kwargs}, shapes) for kwargs in ({}, {"chunks": Chunks(6000, in_flight=2)})
    ]
    for outcome in results:
        begin = 0
        for shape, wire in zip(shapes, wires, strict=True):
            numel = torch.Size(shape).numel()
            part = [(gradient[begin:][:numel], seen[begin:][:numel]) for gradient, seen in outcome]
            check_against_reference(part, TWO_BY_TWO, wire, local_wire="fp32" if wire == "fp32" else "bf16")
            begin += numel


def over_the_other_transport(rank, world_size, *args):
    """Runs result() over StreamTransport, which serves NCCL, on gloo. Each collective ends before the next begins."""
    from fusedcomm.session import session

    class Path(session.CpuPath):
        def connect(self, process_group, device, store):
            self.codec = "portable"
            native = _C.CpuDevice(isa="auto", codec_threads=1, forced_sync=True)
            return native, _C.StreamTransport(process_group._get_backend(device), device)

    own, session.CpuPath = session.CpuPath, Path
    try:
        return result(rank, world_size, *args)
    finally:
        session.CpuPath = own


def test_the_transport_for_streams_has_the_same_channels(ranks):
    kwargs = {"wires": {"1d": "int8"}, "chunks": Chunks(12345), "hosts": INTERLEAVED}
    outcome = ranks.run(over_the_other_transport, "int8", kwargs, ((50021,),))
    check_against_reference(outcome, INTERLEAVED, "int8")


def on_both_devices(rank, world_size, kwargs):
    generator = torch.Generator().manual_seed(rank)
    shapes = ((301, 77), (1000,), (50021,))
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    results = []
    for device in ("cpu", "cuda"):
        ddp = DistributedDataParallel(Gradients(*shapes).to(device), bucket_cap_mb=0.05)
        comm = fusedcomm.attach(ddp, Config(sum="two-shot", hosts=TWO_BY_TWO, **kwargs))
        seen = synchronize(ddp, [gradient.to(device) for gradient in gradients], steps=2)
        results.append(torch.cat([gradient.flatten() for gradient in seen]).cpu())
        comm.detach()
    return results


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU that this torch can use")
@pytest.mark.parametrize(
    "kwargs", [{"wire": "bf16"}, {"wire": "int8"}, {"wire": "int4", "blocks": Blocks(rotate=True)}], ids=str
)
def test_on_cuda_the_bits_are_those_of_the_cpu(ranks, kwargs):
    for cpu, gpu in ranks.run(on_both_devices, kwargs, backend="cpu:gloo,cuda:nccl"):
        assert torch.equal(cpu, gpu)


# --- residuals --------------------------------------------------------------------------------------------------


def delivered_and_left_out(rank, world_size, wire, kwargs, num_steps, reload):
    """Returns three lists, with one entry for each parameter: the float64 sum of this rank's gradients, the float64 sum
    of the means that it received, and the residuals at the end."""
    shapes = ((40, 100), (900,), (30, 101))
    ddp = DistributedDataParallel(Gradients(*shapes), bucket_cap_mb=0.02)
    hosts = TwoLevels(TWO_BY_TWO, "fp32")
    comm = fusedcomm.attach(
        ddp, Config(wire, "two-shot", wires={"1d": wire}, feedback=Feedback(), hosts=hosts, **kwargs)
    )
    given = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    seen = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    generator = torch.Generator().manual_seed(rank)
    for step in range(num_steps):
        gradients = [torch.randn(shape, generator=generator) for shape in shapes]
        for total, gradient in zip(given, gradients, strict=True):
            total += gradient
        for total, mean in zip(seen, synchronize(ddp, gradients), strict=True):
            total += mean
        if reload and step == 3:
            comm.load_state_dict(comm.state_dict(consolidated=reload == "consolidated"))
    residuals = comm.state_dict()["residuals"]
    return given, seen, [residuals[f"weights.{index}"] for index in range(len(shapes))]


@pytest.mark.sampled
@pytest.mark.parametrize("reload", [None, "own", "consolidated"])
@pytest.mark.parametrize(
    ("wire", "kwargs"),
    [
        ("int8", {}),
        ("int4", {"blocks": Blocks(rotate=True), "chunks": Chunks(4096)}),
        ("int4", {}),
    ],
    ids=str,
)
def test_what_was_delivered_and_what_is_left_out_are_all_there_was(ranks, wire, kwargs, reload):
    """Σ means · ranks + Σ residuals = Σ gradients, because nothing else is rounded: sums inside a host are in fp32."""
    outcome = ranks.run(delivered_and_left_out, wire, kwargs, 8, reload)
    for index in range(3):
        given = sum(of_rank[0][index] for of_rank in outcome).flatten()
        left_out = sum(of_rank[2][index].double() for of_rank in outcome)
        delivered = outcome[0][1][index].flatten() * len(outcome)
        assert (given - delivered - left_out).norm() < 1e-5 * given.norm()
        # The equation does not hold without the residuals.
        assert left_out.norm() > 1e-3 * given.norm()


@pytest.mark.sampled(by=lambda format: {})
@pytest.mark.parametrize("format", ["fp32", "bf16"])
def test_residuals_of_every_format_keep_a_constant_gradient_from_getting_lost(ranks, format):
    outcome = ranks.run(mean_of_many_steps, Feedback(format))
    plain = ranks.run(mean_of_many_steps, None)
    expected = sum(gradient for gradient, _ in outcome) / len(outcome)
    fed_back, lost = ((seen[0][1] - expected).norm().item() for seen in (outcome, plain))
    assert fed_back < 0.2 * lost


def mean_of_many_steps(rank, world_size, feedback, num_steps=20):
    gradient = torch.randn(20000, generator=torch.Generator().manual_seed(rank))
    ddp = DistributedDataParallel(Gradients((20000,)))
    fusedcomm.attach(ddp, Config("int4", "two-shot", wires={"1d": "int4"}, feedback=feedback, hosts=TWO_BY_TWO))
    return gradient, sum(synchronize(ddp, [gradient])[0] for _ in range(num_steps)) / num_steps


# --- order, and ranks that are lost ---------------------------------------------------------------------------------


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
    comm = fusedcomm.attach(
        ddp,
        Config("int8", chunks=Chunks(4096), measure_every=2, hosts=INTERLEAVED),
    )
    for step in range(6):
        ddp.zero_grad(set_to_none=True)
        time.sleep(0.003 * ((rank * 5 + step) % 3))
        ddp(torch.tensor([rank, 7]), float(rank)).backward()
    embedded = model.embedding.weight.grad.to_dense()[:, 0]
    dense = [p.grad.unique().tolist() for p in (model.large, model.small, model.in_double)]
    return dense, embedded[[0, 1, 2, 3, 7]].tolist(), [row.sum for row in comm.plan().buckets], comm.stats()


def test_buckets_on_one_level_and_on_two_in_one_backward_pass(ranks):
    for dense, embedded, sums, stats in ranks.run(mixed_buckets):
        assert dense == [[1.5], [1.5], [1.5]]
        assert embedded == [0.0, 0.25, 0.5, 0.75, 1.5]
        assert {"two-shot", "exact"} <= set(sums)
        assert all(error < 0.01 for error in stats.quantization_error.values()) and stats.quantization_error


def train_until_error(rank, world_size, lost):
    """Trains. In the fourth step one rank is killed in the middle of its backward pass. Returns a rank's error, None if
    there is none, and the seconds that the rank waited."""
    ddp = DistributedDataParallel(Gradients((400, 300), (500, 600)), bucket_cap_mb=0.3)
    comm = fusedcomm.attach(ddp, Config("int8", sum="two-shot", chunks=Chunks(16384), hosts=TWO_BY_TWO))
    gradients = [torch.ones(400, 300), torch.ones(500, 600)]
    synchronize(ddp, gradients, steps=3)
    if rank == lost:
        ddp.module.weights[0].register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
    started = time.monotonic()
    try:
        synchronize(ddp, gradients)
    except RuntimeError as error:
        waited = time.monotonic() - started
        comm.detach()
        return str(error), waited
    return None, time.monotonic() - started


@pytest.mark.sampled(by=lambda lost: {})
@pytest.mark.parametrize("lost", [0, 3])
def test_a_rank_lost_in_mid_step_is_an_error_on_every_survivor(ranks, lost):
    outcome = ranks.outcomes(train_until_error, lost, lost=lost)
    for rank in {*range(4)} - {lost}:
        kind, value = outcome[rank]
        assert kind == "value", value
        error, waited = value
        assert error is not None and f"fusedcomm: rank {rank} of 4" in error
        assert "bucket" in error and "restart the job" in error
        assert waited < 15


# --- hosts ----------------------------------------------------------------------------------------------------------


def attached(rank, world_size, kwargs):
    """Attaches and takes a step. Returns (the error's type, its text) or (None, the plan's text, the plan's hosts)."""
    ddp = DistributedDataParallel(Gradients((5000,)))
    try:
        comm = fusedcomm.attach(ddp, Config(**{"wire": "int8", "wires": {"1d": "int8"}, **kwargs}))
    except (RuntimeError, ValueError) as error:
        return type(error).__name__, str(error)
    (seen,) = synchronize(ddp, [torch.full((5000,), float(rank))])
    assert seen.unique().tolist() == [(world_size - 1) / 2]
    plan = comm.plan()
    return None, str(plan), plan.hosts and plan.hosts.groups


@pytest.mark.parametrize(
    ("kwargs", "world_size", "text"),
    [
        ({"hosts": [[0, 1]]}, 4, "rank(s) [2, 3] are missing"),
        ({"hosts": [[0, 1], [2, 5]]}, 4, "rank(s) [3] are missing"),
        ({"hosts": [[0, 1], [2, 3]]}, 3, "rank(s) [3] do not exist"),
        ({"hosts": 3}, 4, "hosts=3 ranks on each host are not possible with 4 ranks"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_on_every_rank(ranks, kwargs, world_size, text):
    for kind, error in ranks.run(attached, kwargs, world_size=world_size):
        assert kind == "ValueError" and text in error


def test_an_fp32_wire_is_not_rounded_on_its_way():
    with pytest.raises(ValueError, match="local_wire='bf16' would round what wire='fp32' does not"):
        Config(wire="fp32", hosts=TwoLevels("auto", "bf16"))
    assert Config(wire="fp32", hosts=TwoLevels("auto", "fp32")).groups == "auto"
    assert Config(wire="fp32", hosts="auto").local_wire == "fp32"
    assert Config(wire="int8", hosts="auto").local_wire == "bf16"


def in_a_subgroup(rank, world_size):
    members = [1, 2, 4, 5]
    group = dist.new_group(members)
    if rank not in members:
        return None
    ddp = DistributedDataParallel(Gradients((30000,)), process_group=group)
    comm = fusedcomm.attach(ddp, Config("int8", wires={"1d": "int8"}, hosts=INTERLEAVED))  # ranks in the group
    gradient = torch.randn(30000, generator=torch.Generator().manual_seed(rank))
    (seen,) = synchronize(ddp, [gradient], steps=2)
    return gradient, seen, comm.plan().hosts.groups


def test_hosts_are_of_the_ranks_of_ddps_own_group(six_ranks):
    outcome = [of_rank for of_rank in six_ranks.run(in_a_subgroup) if of_rank is not None]
    assert all(groups == ((0, 2), (1, 3)) for _, _, groups in outcome)
    check_against_reference([(gradient, seen) for gradient, seen, _ in outcome], INTERLEAVED, "int8")


def named(rank, world_size, names):
    with on_host(names[rank]):
        return attached(rank, world_size, {"hosts": "auto"})


def test_hosts_are_found_by_their_names(six_ranks):
    for kind, text, groups in six_ranks.run(named, ["b", "a", "c", "b", "a", "c"]):
        assert kind is None and groups == ((0, 3), (1, 4), (2, 5))
        assert "3 hosts × 2 ranks, bf16 inside a host" in text.splitlines()[0] and "MiB go to other hosts" in text


def needing_two_levels(rank, world_size, names):
    with on_host(names[rank]):
        return attached(rank, world_size, {"hosts": TwoLevels()})


def test_hosts_with_different_numbers_of_ranks_are_refused_only_if_two_levels_are_needed(six_ranks):
    for kind, text in six_ranks.run(needing_two_levels, ["a", "a", "b"], world_size=3):
        assert kind == "ValueError" and "host a has 2 ranks, host b 1" in text
    for kind, text, groups in six_ranks.run(named, ["a", "a", "b"], world_size=3):
        assert kind is None and groups is None
        reason = "host a has 2 ranks, host b 1, and two need as many on every host (hosts='auto')"
        assert f"sums have one level, not two: {reason}" in text


def by_default(rank, world_size, names, kwargs):
    with on_host(names[rank]):
        ddp = DistributedDataParallel(Gradients((300, 100)))
        comm = fusedcomm.attach(ddp, Config(**kwargs))
    (seen,) = synchronize(ddp, [torch.full((300, 100), float(rank))], steps=3)
    plan, stats = comm.plan(), comm.stats()
    (row,) = plan.buckets
    assert stats.sent_nbytes == 3 * row.sent_nbytes
    if kwargs.get("hosts", "auto") is not None:
        assert stats.sent_between_hosts_nbytes == 3 * row.sent_between_hosts_nbytes
    share = stats.sent_between_hosts_nbytes / stats.sent_nbytes
    return str(plan), seen.unique().tolist(), row.sum, share


TWICE = ["a", "b", "a", "b"]
ONE_LEVEL = "sums have one level, not two: "


@pytest.mark.parametrize(
    ("names", "kwargs", "levels", "sum_", "share"),
    [
        # A rank sends as many bytes to its host's other rank before and after, and to the other host between.
        (TWICE, {}, "2 hosts × 2 ranks, bf16 inside a host", "two-shot", 1 / 3),
        (TWICE, {"wire": "fp16"}, "2 hosts × 2 ranks, fp16 inside a host", "two-shot", 1 / 3),
        (TWICE, {"wire": "fp32"}, ONE_LEVEL + "wire='fp32' keeps the bits of DDP's own all-reduce", "exact", 1),
        (TWICE, {"sum": "direct"}, ONE_LEVEL + "sum='direct' has one", "direct", 1),
        # A ring goes on at every rank's neighbour: host by host it leaves a host once.
        (list("aabb"), {"wire": "fp32"}, ONE_LEVEL + "wire='fp32' keeps the bits of DDP's own", "exact", 1 / 2),
        (list("aaab"), {"wire": "fp32"}, ONE_LEVEL + "host a has 3 ranks, host b 1", "exact", (1 / 3, 1 / 3, 1 / 3, 1)),
        # Two of the three other ranks are on the other host.
        (TWICE, {"sum": "one-shot"}, ONE_LEVEL + "sum='one-shot' has one", "one-shot", 2 / 3),
        (TWICE, {"sum": "two-shot", "hosts": None}, "sum two-shot, 4 ranks", "two-shot", 2 / 3),
        (["a"] * 4, {}, ONE_LEVEL + "all 4 ranks are on one host", "two-shot", 0),
        (["a"] * 4, {"sum": "direct"}, ONE_LEVEL + "all 4 ranks are on one host", "direct", 0),
        (["a"] * 4, {"hosts": None}, "sum auto, 4 ranks", "two-shot", 0),
        (list("abcd"), {}, ONE_LEVEL + "every host has one rank", "two-shot", 1),
        (list("aabc"), {}, ONE_LEVEL + "host a has 2 ranks, host b 1", "two-shot", (2 / 3, 2 / 3, 1, 1)),
    ],
    ids=str,
)
def test_by_default_sums_have_two_levels_where_they_can_and_the_plan_says_why_not(
    ranks, names, kwargs, levels, sum_, share
):
    shares = share if isinstance(share, tuple) else (share,) * 4
    for (text, values, used, sent_between), share in zip(ranks.run(by_default, names, kwargs), shares, strict=True):
        assert levels in text and values == [1.5] and used == sum_
        assert sent_between == pytest.approx(share, rel=0.01)
        assert (ONE_LEVEL in text) == (ONE_LEVEL in levels)


def with_a_path_for_one_level(rank, world_size, names):
    """Attaches through a path that has to be made again for two levels, as on cuda. Returns how often it was made."""
    made = []

    class Path(CpuPath):
        has_two_levels = False

        def __init__(self, *args) -> None:
            super().__init__(*args)
            made.append(self)

    with on_host(names[rank]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "CpuPath", Path)
        ddp = DistributedDataParallel(Gradients((5000,)))
        fusedcomm.attach(ddp, Config("int8", wires={"1d": "int8"}))
    return len(made), synchronize(ddp, [torch.full((5000,), float(rank))])[0].unique().tolist()


def test_what_two_levels_need_is_prepared_only_where_sums_have_them(ranks):
    assert ranks.run(with_a_path_for_one_level, TWICE) == [(2, [1.5])] * 4
    assert ranks.run(with_a_path_for_one_level, ["a"] * 4) == [(1, [1.5])] * 4


def moved_to_one_host(rank, world_size, kwargs):
    """_update_process_group from four ranks on two hosts to the two of one host."""
    with on_host(TWICE[rank]):
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        ddp = DistributedDataParallel(Gradients((6000,)))
        comm = fusedcomm.attach(ddp, Config("int8", wires={"1d": "int8"}, **kwargs))
        gradient = torch.full((6000,), float(rank))
        before, of_two_hosts = synchronize(ddp, [gradient], steps=3)[0].unique().tolist(), str(comm.plan())
        ddp._update_process_group(groups[rank % 2])
        after = synchronize(ddp, [gradient], steps=3)[0].unique().tolist()
        return before, of_two_hosts, after, str(comm.plan()), comm.stats().sent_between_hosts_nbytes


@pytest.mark.sampled
@pytest.mark.parametrize("kwargs", [{}, {"feedback": Feedback()}], ids=str)
def test_levels_follow_the_process_group(ranks, kwargs):
    for rank, (before, of_two_hosts, after, of_one_host, between) in enumerate(ranks.run(moved_to_one_host, kwargs)):
        assert before == [1.5] and "2 hosts × 2 ranks" in of_two_hosts
        assert after == [1.0 + rank % 2] and ONE_LEVEL + "all 2 ranks are on one host" in of_one_host and between == 0


@pytest.mark.parametrize(
    ("hosts", "world_size", "reason"),
    [
        ([[0], [1], [2]], 3, "every host has one rank"),
        ([[0, 1, 2, 3]], 4, "all 4 ranks are on one host"),
        ("auto", 4, "all 4 ranks are on one host"),
        ("auto", 1, "there is one rank"),
    ],
    ids=str,
)
def test_one_host_or_one_rank_on_each_is_one_level_and_the_plan_says_so(ranks, hosts, world_size, reason):
    for kind, text, _ in ranks.run(attached, {"hosts": hosts}, world_size=world_size):
        assert kind is None and f"sums have one level, not two: {reason}" in text


def attached_by_torchrun(rank, world_size, ranks_on_host, kwargs):
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_on_host)
    try:
        return attached(rank, world_size, kwargs)[1]
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


@pytest.mark.parametrize(
    ("ranks_on_host", "kwargs", "advised"),
    [
        (2, {"sum": "two-shot", "hosts": None}, True),
        (2, {"sum": "two-shot"}, False),
        (1, {"sum": "two-shot", "hosts": None}, False),
        (4, {"sum": "two-shot", "hosts": None}, False),
        (2, {"sum": "two-shot", "hosts": TWO_BY_TWO}, False),
        (2, {"wire": "bf16", "sum": "direct"}, False),
    ],
    ids=str,
)
def test_ranks_that_share_hosts_are_told_of_sums_on_two_levels(ranks, ranks_on_host, kwargs, advised):
    for text in ranks.run(attached_by_torchrun, ranks_on_host, kwargs):
        assert ('with hosts="auto"' in text and "send 1/2 of that" in text) == advised


def other_hosts(rank, world_size):
    ddp = DistributedDataParallel(Gradients((5,)))
    try:
        fusedcomm.attach(ddp, Config(hosts=TWO_BY_TWO if rank else INTERLEAVED))
    except RuntimeError as error:
        return str(error)


def test_ranks_that_do_not_agree_about_hosts_are_named(ranks):
    errors = ranks.run(other_hosts)
    assert len(set(errors)) == 1 and "config.hosts.groups[0][1] is 2 on rank 0 and 1 on rank 1" in errors[0]


def through_state(rank, world_size):
    state = fusedcomm.CommState(
        Config("int8", sum="two-shot", wires={"1d": "int8"}, hosts=TwoLevels(TWO_BY_TWO, "fp32"))
    )
    ddp = DistributedDataParallel(Gradients((5000,)))
    ddp.register_comm_hook(state, fusedcomm.comm_hook)
    return synchronize(ddp, [torch.full((5000,), float(rank))], steps=3)[0].unique().tolist()


def test_a_comm_state_has_hosts_too(ranks):
    assert ranks.run(through_state) == [[1.5]] * 4


# --- what is seen ---------------------------------------------------------------------------------------------------


def traced(rank, world_size, path):
    ddp = DistributedDataParallel(Gradients((300, 50), (4000,)))
    comm = fusedcomm.attach(ddp, Config("int8", sum="two-shot", chunks=Chunks(8192), hosts=TWO_BY_TWO))
    with comm.trace(path):
        synchronize(ddp, [torch.ones(300, 50), torch.ones(4000)])


def test_a_trace_shows_the_stages_of_both_levels_in_order(ranks, tmp_path):
    ranks.run(traced, str(tmp_path / "{rank}.json"))
    for rank in range(4):
        chunks = {}
        for event in read(trace.path_for(tmp_path / "{rank}.json", rank)):
            if event["args"]["stage"] not in ("bucket", "exposed"):  # the stages of a chunk
                chunks.setdefault((event["args"]["bucket"], event["args"]["chunk"]), []).append(event)
        assert len(chunks) > 1
        for events in chunks.values():
            events.sort(key=lambda event: event["ts"])
            stages = [(event["args"]["stage"], event["track"]) for event in events]
            assert stages == [
                ("pack", "pack"),
                ("local all-to-all", "local wire"),
                ("local reduce", "local reduce"),
                ("all-to-all", "wire"),
                ("reduce", "reduce"),
                ("all-gather", "wire"),
                ("local all-gather", "local wire"),
                ("unpack", "unpack"),
            ]


# --- workspaces -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("local_wire", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks_per_host", [2, 8])
@pytest.mark.parametrize("num_hosts", [2, 3, 16])
def test_a_workspace_holds_both_messages_of_any_chunk(wire, local_wire, ranks_per_host, num_hosts):
    world_size = ranks_per_host * num_hosts
    others = {"head": "bf16", "tail": "int8"}
    for chunk_nbytes in (4096, 12345, 1 << 20):
        hosts = TwoLevels("auto", "fp32" if wire == "fp32" else local_wire)
        config = Config(wire=wire, wires=others, chunks=Chunks(chunk_nbytes), hosts=hosts)
        native = chunks.native(config, world_size, ranks_per_host=ranks_per_host)
        workspace = _C.workspace_nbytes(native, world_size)
        for exact in (0, 3, 5001):
            for lossy in ([0, 0, 0], [5000, 0, 7], [123457, 1, 0], [0, 70001, 5], [999999, 100, 31]):
                numels = enumerate(lossy[: len(config.numbered_wires)])
                slices = [(exact, _C.EXACT_WIRE), *((numel, number) for number, numel in numels)]
                plan = _C.plan_bucket(native, world_size, torch.empty(0), slices)
                if plan.sum != "two-shot":
                    continue
                assert plan.layout.chunk_nbytes <= workspace
                (local, *_) = _C.host_layouts(plan.layouts, config.local_wire, ranks_per_host)
                assert local.part_stride * ranks_per_host <= workspace
                assert local.num_chunks == plan.layout.num_chunks


# --- without ranks --------------------------------------------------------------------------------------------------


def test_a_simulation_takes_a_number_of_ranks_on_each_host():
    grads = [torch.randn(5003, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    by_number = fusedcomm.simulate(grads, Config("int4", hosts=2))
    assert torch.equal(by_number, fusedcomm.simulate(grads, Config("int4", hosts=TWO_BY_TWO)))
    assert not torch.equal(by_number, fusedcomm.simulate(grads, Config("int4", hosts=INTERLEAVED)))
    for one_level in (1, 4, [[0], [1], [2], [3]]):
        assert torch.equal(
            fusedcomm.simulate(grads, Config("int4", hosts=one_level)), fusedcomm.simulate(grads, "int4")
        )
    assert torch.equal(fusedcomm.simulate(grads, Config("int4")), fusedcomm.simulate(grads, Config("int4", hosts=None)))
    refused = ((3, "hosts=3 ranks on each host"), (TwoLevels(), "in one process"), ([[0, 1], [2]], r"has 2 ranks"))
    for hosts, text in refused:
        with pytest.raises(ValueError, match=text):
            fusedcomm.simulate(grads, Config("int4", hosts=hosts))
