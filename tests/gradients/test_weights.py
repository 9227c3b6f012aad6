"""Means weighted by what each rank did: Config(weighted=…) and comm.weight."""

import contextlib
import math
import warnings

import pytest
import torch
from models import Gradients, normal, synchronize
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from weighted import BUCKETS, TWO_PASSES, check_close, gradients_of, model, one_process, rows, sum_of_losses, wrapped

import fusedcomm
from fusedcomm import Config
from fusedcomm.config import Feedback

SHAPE = (1 << 13,)


def backward(call, comm, no_sync, counts, rank, step, weighted):
    """One step; counts[pass][rank] rows. A rank without rows computes NaN."""
    for number, of_ranks in enumerate(counts):
        count = of_ranks[rank]
        if weighted:
            comm.weight = torch.tensor(count) if number % 2 else count
        with contextlib.nullcontext() if number + 1 == len(counts) else no_sync():
            loss = sum_of_losses(call, *rows(rank, step, number, max(count, 1)))
            if count == 0:
                loss = loss * math.nan  # a rank of weight 0 changes nothing, whatever it computes
            elif weighted != "sum":
                loss = loss / count
            loss.backward()


def weighted_steps(rank, world_size, front, steps, config):
    """(the gradients after each step, whether detach() leaves nothing behind); steps[step][pass][rank] rows."""
    module = model()
    call, comm, no_sync = wrapped(front, module, config)
    found = []
    for step, counts in enumerate(steps):
        module.zero_grad()
        backward(call, comm, no_sync, counts, rank, step, config.weighted)
        found.append(gradients_of(module).clone())
    comm.detach()
    alone = model()
    module.zero_grad()
    for each in (call, alone):
        sum_of_losses(each, *rows(0, 99, 0, 4)).backward()
    return found, torch.allclose(gradients_of(module), gradients_of(alone), rtol=1e-5, atol=1e-5)


ONE_PASS = [[[1000, 1, 7, 30]], [[0, 12, 1000, 3]], [[5, 1, 0, 0]]]
STEPS = {False: ONE_PASS, True: TWO_PASSES}

ADD_UP = ("hook", "reducer", "DataParallel")
ONLY_ONCE = ("hook", "hook, static graph", "reducer", "reducer, unused", "DataParallel", "FSDP2", "HSDP")
ONLY_ONCE += ("FSDP2, own parameters", "HSDP, own parameters")  # which come before those of the first layer
CASES = [
    (front, adds_up, size, weighted)
    for fronts, adds_up, kinds in ((ONLY_ONCE, False, ("mean", "sum")), (ADD_UP, True, ("sum",)))
    for front in fronts
    for size in ((4,) if front.startswith("HSDP") else (2, 3, 4))
    for weighted in kinds
]


@pytest.mark.parametrize(("front", "adds_up", "world_size", "weighted"), CASES)
@pytest.mark.sampled(by=lambda front, adds_up, world_size, weighted: {"kind": (front, adds_up), "weighted": weighted})
def test_gradients_are_those_of_one_process_with_all_tokens(ranks, front, weighted, adds_up, world_size):
    steps = STEPS[adds_up]
    config = Config("fp32", weighted=weighted)
    for found, is_as_before in ranks.run(weighted_steps, front, steps, config, world_size=world_size):
        assert is_as_before
        for gradients, exact in zip(found, one_process(steps, world_size), strict=True):
            check_close(gradients, exact)


SUMS = {"int8": {"sum": "two-shot"}, "int4": {"sum": "one-shot"}}


@pytest.mark.parametrize("front", ["hook", "reducer", "DataParallel", "FSDP2"])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.sampled
def test_equal_weights_change_no_bit(ranks, front, wire):
    """From the second pass on: in the first one no rank knows that all weights are 5."""
    sums = {} if front == "FSDP2" else SUMS.get(wire, {})
    configs = [Config(wire, weighted=weighted, **sums) for weighted in (None, "mean")]
    plain, equal = (ranks.run(weighted_steps, front, [[[5, 5]]] * 3, config, world_size=2) for config in configs)
    for (ours, *_), (theirs, *_) in zip(equal, plain, strict=True):
        assert all(map(torch.equal, ours[1:], theirs[1:]))
        check_close(ours[0], theirs[0], {"bf16": 0.01, "int8": 0.02, "int4": 0.3}.get(wire, 1e-6))


def given(rank):
    return normal(rank, 0, SHAPE)


def with_codes(config):
    """A model whose gradient is given, and its handle."""
    ddp = DistributedDataParallel(Gradients(SHAPE))
    return ddp, fusedcomm.attach(ddp, config, quiet=True)


def simulated(rank, world_size, config, weights):
    ddp, comm = with_codes(config)
    comm.weight = weights[rank]
    return [synchronize(ddp, [given(rank)])[0].clone() for _ in range(2)][1]


@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16", "fp8", "int4"])
@pytest.mark.parametrize("weighted", ["mean", "sum"])
@pytest.mark.sampled
def test_simulate_has_the_bits_of_passes_with_steady_weights(ranks, wire, weighted):
    weights = [1000.0, 1.0, 0.0]
    config, gradients = Config(wire, wires={"1d": wire}, weighted=weighted), [given(rank) for rank in range(3)]
    expected = fusedcomm.simulate(gradients, config, weights=weights)
    for found in ranks.run(simulated, config, weights, world_size=3):
        assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="3 finite numbers, 0 or more"):
        fusedcomm.simulate(gradients, config, weights=[1, -1, 1])


def test_a_rank_of_small_weight_keeps_its_small_numbers():
    # The weight is applied in fp32, before rounding: each rank's error has the size of its own share.
    config = Config("int4", sum="one-shot", wires={"1d": "int4"}, weighted="mean")
    zeros = torch.zeros(SHAPE)
    for one in ([given(0), zeros], [zeros, given(1)]):
        mean = fusedcomm.simulate(one, config, weights=[1000, 1])
        check_close(mean, (1000 * one[0] + one[1]) / 1001, 0.15)


# ---- zero


def all_zero(rank, world_size, wire):
    ddp, comm = with_codes(Config(wire, wires={"1d": wire}, weighted="mean"))
    found, said = [], []
    for weight in (0, 0, 3, 0, 0):
        comm.weight = weight
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (gradient,) = synchronize(ddp, [given(rank) * (math.nan if weight == 0 else 1)])
        found.append(bool((gradient == 0).all()))
        said += [str(each.message) for each in caught if "weights of all ranks" in str(each.message)]
    return found, len(said)


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_gradients_are_zero_if_all_weights_are_with_one_notice(ranks, wire):
    zeros = [True, True, False, True, True]
    assert ranks.run(all_zero, wire, world_size=2) == [(zeros, 1), (zeros, 0)]


def fed_back(rank, world_size, weights):
    """The sum of the means of constant gradients, beside the exact one, in units of a step's error."""
    ddp, comm = with_codes(Config("int4", "two-shot", wires={"1d": "int4"}, feedback=Feedback(), weighted="mean"))
    total, exact, sizes = torch.zeros(SHAPE), torch.zeros(SHAPE), []
    own = slice(SHAPE[0] // 2, None) if rank == 0 else slice(SHAPE[0] // 2)  # not the half whose mean this rank encodes
    residual = None
    for of_ranks in weights:
        comm.weight = of_ranks[rank]
        before = residual
        total += synchronize(ddp, [given(rank)])[0]
        exact += sum(w * given(r) for r, w in enumerate(of_ranks)) / sum(of_ranks)
        (residual,) = (each.clone() for each in comm.session.synchronizer.residuals().values())
        if before is not None:
            assert torch.equal(residual[own], before[own]) == (of_ranks[rank] == 0)
        sizes += [float(each.norm() / given(1).norm()) for each in (total - exact, residual)]
    return max(sizes)


def test_a_rank_without_weight_keeps_its_residuals_and_changing_weights_do_not_blow_them_up(ranks):
    weights = [(1, 1000), (1000, 1), (1, 1), (0, 1000), (1000, 0), (500, 501)] * 6
    # The sum of all means is off by about one step's rounding, however many steps there are.
    assert max(ranks.run(fed_back, weights, world_size=2)) < 0.6


# ---- Join around DDP


def joined(rank, world_size, joins, attached, config):
    """Gradients of the steps within each of `joins`, (whether it divides by all ranks, each rank's number of steps),
    and of one behind them."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(3, 2), bucket_cap_mb=BUCKETS)
    comm = fusedcomm.attach(ddp, config, quiet=True) if attached else None
    found = []

    def go(step):
        ddp.zero_grad()
        if config.weighted:
            comm.weight = 4 * rank + 2
        ddp(rows(rank, step, 0, 4)[0][:, :3]).square().mean().backward()
        found.append(gradients_of(ddp).clone())

    for divides, nums in joins:
        with Join([ddp], divide_by_initial_world_size=divides):
            for step in range(nums[rank]):
                go(step)
    go(99)
    return found


@pytest.mark.parametrize("nums", [[(2, 4), (4, 1), (0, 3)], [(1, 0, 3)]], ids=str)
def test_joins_one_after_another_divide_as_ddp_does(ranks, nums):
    joins = [(divides, each) for each in nums for divides in (True, False, True)]
    ours, theirs = (ranks.run(joined, joins, ours, Config("fp32"), world_size=len(nums[0])) for ours in (True, False))
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_with_weights_the_mean_under_join_is_of_the_ranks_with_data(ranks):
    config = Config("fp32", weighted="mean")
    for divides in (True, False):
        short, long = ranks.run(joined, [(divides, (1, 3))], True, config, world_size=2)
        alone = ranks.run(joined, [(divides, (0, 3))], True, config, world_size=2)[1]
        torch.testing.assert_close(long[1:3], alone[1:3], rtol=1e-6, atol=1e-7)
        assert torch.equal(short[0], long[0]) and torch.equal(short[1], long[3])
