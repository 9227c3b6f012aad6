"""Means weighted by what each rank did: Config(weighted=…) and comm.weight."""

import contextlib
import copy
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm import Config

FRONTS = ["ddp", "reducer", "parallel", "fsdp", "hsdp"]
BUCKETS = 1 / 4096


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))


def rows(rank, step, number, count):
    generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    return torch.randn(count, 6, generator=generator), torch.randn(count, 3, generator=generator)


def sum_of_losses(module, x, y):
    return (module(x) - y).square().sum()


def wrapped(front, module, config):
    """(what is called, the handle, what holds back synchronization)"""
    if front == "ddp":
        ddp = DistributedDataParallel(module, bucket_cap_mb=BUCKETS)
        return ddp, fusedcomm.attach(ddp, config, quiet=True), ddp.no_sync
    if front == "reducer":
        reducer = fusedcomm.GradReducer(module, config, bucket_mib=BUCKETS, quiet=True)
        return module, reducer, reducer.no_sync
    if front == "parallel":
        parallel = fusedcomm.DataParallel(module, config=config, bucket_cap_mb=BUCKETS, quiet=True)
        return parallel, parallel.comm, parallel.no_sync
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    if front == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replica", "shard"))
    for layer in (module[0], module[2], module):
        fully_shard(layer, mesh=mesh)
    return module, fusedcomm.attach(module, config, quiet=True), None


def gradients_of(module):
    whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in module.parameters()]
    return torch.cat([gradient.flatten() for gradient in whole])


def backward(front, call, comm, no_sync, counts, rank, step, weighted):
    """One step; counts[pass][rank] rows. A rank without rows computes NaN."""
    for number, of_ranks in enumerate(counts):
        count = of_ranks[rank]
        comm.weight = torch.tensor(count) if number % 2 else count
        with contextlib.nullcontext() if number + 1 == len(counts) else no_sync():
            loss = sum_of_losses(call, *rows(rank, step, number, max(count, 1)))
            if count == 0:
                loss = loss * math.nan
            elif weighted == "mean":
                loss = loss / count
            loss.backward()


def weighted_steps(rank, world_size, front, steps, weighted, wire):
    """The gradients after each step; steps[step][pass][rank] rows."""
    module = model()
    call, comm, no_sync = wrapped(front, module, Config(wire, weighted=weighted))
    found = []
    for step, counts in enumerate(steps):
        module.zero_grad()
        backward(front, call, comm, no_sync, counts, rank, step, weighted)
        found.append(gradients_of(module).clone())
    return found


def one_process(steps, world_size):
    """The gradients of one process that has all rows, in float64."""
    found = []
    for step, counts in enumerate(steps):
        module, total = model().double(), sum(map(sum, counts))
        for number, of_ranks in enumerate(counts):
            for rank, count in enumerate(of_ranks):
                if count:
                    x, y = rows(rank, step, number, count)
                    (sum_of_losses(module, x.double(), y.double()) / total).backward()
        found.append(gradients_of(module))
    return found


ONE_PASS = [[[1000, 1, 7, 30]], [[0, 12, 1000, 3]], [[5, 1, 0, 0]]]
TWO_PASSES = [[[9, 1, 4, 2], [0, 100, 1, 3]], [[2, 2, 2, 2], [1, 0, 5, 9]], [[3, 0, 1, 1]]]


CASES = [(front, adds_up, size) for front in FRONTS[:3] for adds_up in (False, True) for size in (2, 3, 4)]
CASES += [("fsdp", False, size) for size in (2, 3, 4)] + [("hsdp", False, 4)]


@pytest.mark.parametrize(("front", "adds_up", "world_size"), CASES)
@pytest.mark.parametrize("weighted", ["mean", "sum"])
@pytest.mark.sampled(by=lambda front, adds_up, world_size, weighted: {"kind": (front, adds_up), "weighted": weighted})
def test_gradients_are_those_of_one_process_with_all_tokens(ranks, front, weighted, adds_up, world_size):
    steps = [[counts[:world_size] for counts in step] for step in (TWO_PASSES if adds_up else ONE_PASS)]
    expected = one_process(steps, world_size)
    for found in ranks.run(weighted_steps, front, steps, weighted, "fp32", world_size=world_size):
        for gradients, exact in zip(found, expected, strict=True):
            assert (gradients - exact).norm() <= 1e-6 * exact.norm()


WIRES = [("bf16", 0.005), ("fp16", 0.002), ("int8", 0.02), ("fp8", 0.07), ("int4", 0.25)]


@pytest.mark.parametrize(("wire", "error"), WIRES)
def test_other_wires_are_within_their_error(ranks, wire, error):
    steps = [[counts[:2] for counts in step] for step in ONE_PASS]
    expected = one_process(steps, 2)
    (found, others) = ranks.run(weighted_steps, "ddp", steps, "mean", wire, world_size=2)
    for gradients, same, exact in zip(found, others, expected, strict=True):
        assert torch.equal(gradients, same)
        assert (gradients - exact).norm() <= error * exact.norm()


SUMS = {"int8": {"sum": "two-shot"}, "int4": {"sum": "one-shot"}}


def equal_weights(rank, world_size, front, wire, weight):
    found = []
    sums = {} if front == "fsdp" else SUMS.get(wire, {})
    for weighted in (None, "mean"):
        module = model()
        call, comm, _ = wrapped(front, module, Config(wire, weighted=weighted, **sums))
        for step in range(3):
            module.zero_grad()
            if weighted:
                comm.weight = weight
            (sum_of_losses(call, *rows(rank, step, 0, 5)) / 5).backward()
            found.append(gradients_of(module).clone())
        comm.detach()
    return [torch.equal(a, b) for a, b in zip(found[:3], found[3:], strict=True)]


@pytest.mark.parametrize("front", FRONTS[:4])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.sampled
def test_equal_weights_change_no_bit(ranks, front, wire):
    assert ranks.run(equal_weights, front, wire, 7, world_size=2) == [[True] * 3] * 2


class Given(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self, numel):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, gradient):
        return self.weight @ gradient


def given(rank, numel, step=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank))


NUMEL = 1 << 13


def simulated(rank, world_size, config, weights):
    ddp = DistributedDataParallel(Given(NUMEL))
    comm = fusedcomm.attach(ddp, config, quiet=True)
    comm.weight = weights[rank]
    ddp(given(rank, NUMEL)).backward()
    return ddp.module.weight.grad


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int4"])
@pytest.mark.parametrize("weighted", ["mean", "sum"])
@pytest.mark.sampled
def test_simulate_has_the_bits_of_the_first_pass(ranks, wire, weighted):
    weights = [1000.0, 1.0, 0.0]
    config = Config(wire, wires={"1d": wire}, weighted=weighted)
    expected = fusedcomm.simulate([given(rank, NUMEL) for rank in range(3)], config, weights=weights)
    for found in ranks.run(simulated, config, weights, world_size=3):
        assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="needs weights"):
        fusedcomm.simulate([given(rank, NUMEL) for rank in range(3)], config)
    with pytest.raises(ValueError, match="3 finite numbers, 0 or more"):
        fusedcomm.simulate([given(rank, NUMEL) for rank in range(3)], config, weights=[1, -1, 1])


def test_a_rank_of_small_weight_keeps_its_small_numbers():
    # The weight is applied in fp32, before rounding: each rank's error has the size of its own share.
    config = Config("int4", sum="one-shot", wires={"1d": "int4"}, weighted="mean")
    gradients, zeros = [given(rank, NUMEL) for rank in range(2)], torch.zeros(NUMEL)
    for one in ([gradients[0], zeros], [zeros, gradients[1]]):
        mean = fusedcomm.simulate(one, config, weights=[1000, 1])
        share = (1000 * one[0] + one[1]) / 1001
        assert (mean - share).norm() < 0.15 * share.norm()


# ---- zero


def all_zero(rank, world_size, wire):
    ddp = DistributedDataParallel(Given(NUMEL))
    config = Config(wire, wires={"1d": wire}, weighted="mean")
    comm = fusedcomm.attach(ddp, config, quiet=True)
    found, said = [], []
    for step, weight in enumerate([0, 0, 3, 0, 0]):
        comm.weight = weight
        ddp.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddp(given(rank, NUMEL, step) * (math.nan if weight == 0 else 1)).backward()
        found.append(float(ddp.module.weight.grad.norm()))
        said += [str(each.message) for each in caught if "weights of all ranks" in str(each.message)]
    return found, len(said)


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_gradients_are_zero_if_all_weights_are_with_one_notice(ranks, wire):
    outcomes = ranks.run(all_zero, wire, world_size=2)
    for norms, _ in outcomes:
        assert [norm == 0 for norm in norms] == [True, True, False, True, True]
    assert [num_said for _, num_said in outcomes] == [1, 0]


def fed_back(rank, world_size, weights):
    """The sum of the means of constant gradients, beside the exact one, in units of a step's error."""
    ddp = DistributedDataParallel(Given(NUMEL))
    config = Config("int4", sum="two-shot", wires={"1d": "int4"}, feedback=fusedcomm.Feedback(), weighted="mean")
    comm = fusedcomm.attach(ddp, config, quiet=True)
    total, exact, errors, residuals = torch.zeros(NUMEL), torch.zeros(NUMEL), [], []
    for of_ranks in weights:
        comm.weight = of_ranks[rank]
        ddp.zero_grad()
        ddp(given(rank, NUMEL)).backward()
        total += ddp.module.weight.grad
        mean = sum(w * given(r, NUMEL) for r, w in enumerate(of_ranks)) / max(sum(of_ranks), 1)
        exact += mean
        errors.append(float((total - exact).norm() / given(0, NUMEL).norm()))
        (residual,) = comm.state_dict()["residuals"].values()
        residuals.append(float(residual.norm() / given(0, NUMEL).norm()))
    return errors, residuals


def test_changing_weights_do_not_blow_residuals_up(ranks):
    weights = [(1, 1000), (1000, 1), (1, 1), (0, 1000), (1000, 0), (500, 501)] * 6
    for errors, residuals in ranks.run(fed_back, weights, world_size=2):
        # Nothing is lost: the sum of all means is off by about one step's rounding, however many steps there are.
        assert max(errors) < 0.6 and max(residuals) < 0.6


def kept(rank, world_size):
    ddp = DistributedDataParallel(Given(NUMEL))
    config = Config("int4", sum="two-shot", wires={"1d": "int4"}, feedback=fusedcomm.Feedback(), weighted="mean")
    comm = fusedcomm.attach(ddp, config, quiet=True)
    found = []
    for weight in (1, rank):
        comm.weight = weight
        ddp(given(rank, NUMEL)).backward()
        (residual,) = comm.session.synchronizer.residuals().values()
        found.append(residual.clone())
    return found


def test_a_rank_without_weight_keeps_what_it_has_left_out(ranks):
    (first, second), (other_first, other_second) = ranks.run(kept, world_size=2)
    own = slice(NUMEL // 2, None)  # not the half whose mean rank 0 encodes
    assert torch.equal(first[own], second[own]) and not torch.equal(other_first, other_second)


# ---- Join, shadow_pass() and join()


def joined(rank, world_size, nums, attached, config, divides):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(3, 2), bucket_cap_mb=BUCKETS)
    comm = fusedcomm.attach(ddp, config, quiet=True) if attached else None
    found = []
    with Join([ddp], divide_by_initial_world_size=divides):
        for step in range(nums[rank]):
            x, _ = rows(rank, step, 0, 4)
            ddp.zero_grad()
            if isinstance(config, Config):
                comm.weight = 4 * rank + 2
            ddp(x[:, :3]).square().mean().backward()
            found.append(gradients_of(ddp).clone())
    ddp.zero_grad()
    if isinstance(config, Config):
        comm.weight = 1
    ddp(rows(rank, 99, 0, 4)[0][:, :3]).square().mean().backward()
    return [*found, gradients_of(ddp).clone()]


@pytest.mark.parametrize("nums", [(2, 4), (4, 1), (0, 3), (1, 0, 3)])
@pytest.mark.parametrize("divides", [True, False])
@pytest.mark.sampled
def test_join_divides_as_ddp_does(ranks, nums, divides):
    size = len(nums)
    runs = [("fp32", True), (None, False)]
    ours, theirs = (ranks.run(joined, nums, ours, config, divides, world_size=size) for config, ours in runs)
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_with_weights_the_mean_under_join_is_of_the_ranks_with_data(ranks):
    config = Config("fp32", weighted="mean")
    for divides in (True, False):
        short, long = ranks.run(joined, (1, 3), True, config, divides, world_size=2)
        alone = ranks.run(joined, (0, 3), True, config, divides, world_size=2)[1]
        torch.testing.assert_close(long[1:3], alone[1:3], rtol=1e-6, atol=1e-7)
        assert torch.equal(short[0], long[0]) and torch.equal(short[1], long[3])


def shadowed(rank, world_size):
    module = nn.Linear(2, 1, bias=False)
    reducer = fusedcomm.GradReducer(module, Config("fp32", weighted="mean"), quiet=True)
    if rank == 0:
        reducer.shadow_pass()
    else:
        reducer.weight = 5
        module(torch.tensor([[2.0, -6.0]])).sum().backward()
    first = None if rank == 0 else module.weight.grad.tolist()
    module.weight.grad = None
    parallel_module = nn.Linear(2, 1, bias=False)
    parallel = fusedcomm.DataParallel(parallel_module, config=Config("fp32", weighted="mean"), quiet=True)
    with parallel.join(divide_by_initial_world_size=False):
        for _ in range(rank):
            parallel.comm.weight = 3
            parallel(torch.tensor([[2.0, -6.0]])).sum().backward()
    return first, rank and parallel_module.weight.grad.tolist()


def test_a_rank_that_sends_zeros_has_no_weight(ranks):
    assert ranks.run(shadowed, world_size=2)[1] == ([[2.0, -6.0]], [[2.0, -6.0]])


# ---- beside other options


def with_options(rank, world_size):
    """Loss scale, norm, verification and measurement of weighted means."""
    counts = (100, 3)
    module = model()
    checks = fusedcomm.Checks(verify_every=1, measure_every=1)
    ddp = DistributedDataParallel(module)
    comm = fusedcomm.attach(ddp, Config("int8", sum="two-shot", weighted="mean", checks=checks), quiet=True)
    found = []
    for step in range(3):
        comm.weight = counts[rank]
        module.zero_grad()
        (sum_of_losses(ddp, *rows(rank, step, 0, counts[rank])) / counts[rank]).backward()
        norm = comm.grad_norm()
        found.append(float(norm / gradients_of(module).norm() - 1))
    stats = comm.stats()
    errors = [each.relative_error for each in stats.verified]
    comm.detach()
    return found, errors, str(stats)


def test_norm_verification_and_measurement_are_of_weighted_means(ranks):
    for norms, errors, _ in ranks.run(with_options, world_size=2):
        assert max(map(abs, norms)) < 1e-6
        assert errors and max(errors) < 0.02


def scaled(rank, world_size):
    module = model()
    ddp = DistributedDataParallel(module)
    comm = fusedcomm.attach(ddp, Config("fp32", weighted="sum"), quiet=True)
    scaler = fusedcomm.GradScaler(comm, "cpu", init_scale=1024.0)
    comm.weight = 5 + rank
    scaler.scale(sum_of_losses(ddp, *rows(rank, 0, 0, 5 + rank))).backward()
    return gradients_of(module)


def test_a_loss_scale_leaves_weighted_means(ranks):
    (expected,) = one_process([[[5, 6]]], 2)
    for found in ranks.run(scaled, world_size=2):
        assert (found - expected).norm() <= 1e-6 * expected.norm()


class Odd(nn.Module):
    """A float64 parameter and a sparse one, which no wire carries."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(5, 2, sparse=True)
        self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, row):
        return self.rows(row).sum() * row.sum() + (self.wide * row.double().sum()).sum()


def odd(rank, world_size, weights):
    ddp = DistributedDataParallel(Odd())
    comm = fusedcomm.attach(ddp, Config("bf16", weighted="mean"), quiet=True)
    for _ in range(2):
        ddp.zero_grad()
        comm.weight = weights[rank]
        ddp(torch.tensor([rank + 1])).backward()
    return ddp.module.rows.weight.grad.to_dense()[:, 0].tolist(), ddp.module.wide.grad.tolist()


def test_gradients_that_no_wire_carries_are_weighted(ranks):
    for sparse, double in ranks.run(odd, (1, 3), world_size=2):
        assert sparse == pytest.approx([0, 0.25, 1.5, 0, 0]) and double == pytest.approx([1.75] * 3)
    for sparse, double in ranks.run(odd, (4, 0), world_size=2):
        assert sparse == pytest.approx([0, 1, 0, 0, 0]) and double == pytest.approx([1.0] * 3)


def unused(rank, world_size, front):
    """find_unused_parameters, on one rank or on both, and static_graph."""
    module = model()
    if front == "ddp":
        call = DistributedDataParallel(module, static_graph=True, bucket_cap_mb=BUCKETS)
        comm = fusedcomm.attach(call, Config("fp32", weighted="sum"), quiet=True)
    else:
        config = Config("fp32", weighted="sum")
        comm = fusedcomm.GradReducer(module, config, bucket_mib=BUCKETS, find_unused_parameters=True, quiet=True)
        call = module
    found = []
    for step in range(3):
        module.zero_grad()
        comm.weight = 3 + rank
        sum_of_losses(call, *rows(rank, step, 0, 3 + rank)).backward()
        found.append(gradients_of(module).clone())
    return found


@pytest.mark.parametrize("front", ["ddp", "reducer"])
def test_static_graph_and_unused_parameters(ranks, front):
    expected = one_process([[[3, 4]]] * 3, 2)
    for found in ranks.run(unused, front, world_size=2):
        for gradients, exact in zip(found, expected, strict=True):
            assert (gradients - exact).norm() <= 1e-6 * exact.norm()


def every_second(rank, world_size):
    module = model()
    reducer = fusedcomm.GradReducer(module, Config("fp32", weighted="mean"), every=2, quiet=True)
    found = []
    for step, counts in enumerate(TWO_PASSES[:2]):
        module.zero_grad()
        for number, of_ranks in enumerate(counts):
            reducer.weight = count = max(of_ranks[rank], 1)
            (sum_of_losses(module, *rows(rank, step, number, count)) / count).backward()
        found.append(gradients_of(module).clone())
    reducer.detach()
    module.zero_grad()
    sum_of_losses(module, *rows(rank, 9, 0, 1)).backward()
    alone = model()
    sum_of_losses(alone, *rows(rank, 9, 0, 1)).backward()
    return found, torch.equal(gradients_of(module), gradients_of(alone))


def test_weights_add_up_with_every_and_leave_nothing_behind(ranks):
    steps = [[[max(count, 1) for count in counts[:2]] for counts in step] for step in TWO_PASSES[:2]]
    expected = one_process(steps, 2)
    for found, is_as_before in ranks.run(every_second, world_size=2):
        assert is_as_before
        for gradients, exact in zip(found, expected, strict=True):
            assert (gradients - exact).norm() <= 1e-6 * exact.norm()


def traced(rank, world_size, path):
    call, comm, _ = wrapped("ddp", model(), Config("int8", weighted="mean"))
    comm.weight = 1 + rank
    with comm.trace(path):
        sum_of_losses(call, *rows(rank, 0, 0, 2)).backward()
    copied = copy.deepcopy(comm)
    with pytest.raises(RuntimeError, match="is a copy"):
        copied.weight = 1
    return comm.stats().buckets, copied.weight


def test_the_message_is_in_traces_and_is_no_bucket(ranks, tmp_path):
    path = tmp_path / "trace.json"
    assert ranks.run(traced, str(path), world_size=2) == [(1, None)] * 2
    assert "weights" in path.read_text()


# ---- bad input

BAD = {
    "negative": (lambda: -3, "has set comm.weight to -3"),
    "nan": (lambda: math.nan, "has set comm.weight to nan"),
    "infinite": (lambda: torch.tensor(math.inf), "has set comm.weight to inf"),
    "two": (lambda: torch.ones(2), "has set comm.weight to a tensor of shape (2,)"),
    "missing": (None, "has not set comm.weight"),
    "late": (None, "within a backward pass whose first bucket had left"),
}


def bad(rank, world_size, name, front):
    module = model()
    call, comm, _ = wrapped(front, module, Config("fp32", weighted="mean"))
    value, _ = BAD[name]

    def set_between_layers(_, inputs, output):
        if rank == 1 and name == "late" and step == 1:
            output.register_hook(lambda _: setattr(comm, "weight", 2))

    module[1].register_forward_hook(set_between_layers)
    for step in range(3):
        is_kept = name == "late" and step == 2  # rank 1 has set it too early, or too late
        if not is_kept and (rank != 1 or name != "missing"):
            comm.weight = 1
        if rank == 1 and value is not None and step == 1:
            comm.weight = value()
        try:
            sum_of_losses(call, *rows(rank, 0, 0, 3)).backward()
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("front", ["ddp", "reducer", "fsdp"])
@pytest.mark.parametrize("name", list(BAD))
@pytest.mark.sampled
def test_a_weight_that_is_none_is_an_error_of_every_rank(ranks, name, front):
    texts = ranks.run(bad, name, front, world_size=2)
    for rank, text in enumerate(texts):
        assert "rank 1 " in text and "Give comm.weight a finite number" in text
        if rank == 1 or name in ("missing", "late"):
            assert BAD[name][1] in text


def refused(rank, world_size):
    texts = []
    for config in ("fp32", "off", "auto"):
        ddp = DistributedDataParallel(model())
        comm = fusedcomm.attach(ddp, config, quiet=True)
        with pytest.raises(RuntimeError, match="comm.weight would do nothing"):
            comm.weight = 1
        comm.detach()
    ddp = DistributedDataParallel(model())
    comm = fusedcomm.attach(ddp, Config("fp32", weighted="mean"), quiet=True)
    for value in ("3", None, True, 1j):
        with pytest.raises(TypeError, match="use a number or a tensor"):
            comm.weight = value
    comm.detach()
    with pytest.raises(RuntimeError, match="detached"):
        comm.weight = 1
    with pytest.raises(ValueError, match="weighted='median' is not possible|weighted"):
        Config("fp32", weighted="median")
    with pytest.raises(ValueError, match="a search also tries DDP's own all-reduce"):
        fusedcomm.Auto(base=Config(weighted="mean"))
    with pytest.raises(ValueError, match="a registered hook has no handle"):
        fusedcomm.CommState(Config(weighted="mean"))
    module = model()
    call, comm, _ = wrapped("fsdp", module, Config("fp32", weighted="mean"))
    comm.weight = 1
    module.set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError, match="adds up gradients of several passes"):
        call(torch.ones(1, 6))
    comm.detach()
    call(torch.ones(1, 6))
    return texts


def test_what_cannot_be_weighted_is_refused(ranks):
    ranks.run(refused, world_size=2)
