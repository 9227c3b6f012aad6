"""Means weighted by what each rank did: Config(weighted=…) and comm.weight."""

import contextlib
import math
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from weighted import (
    BUCKETS,
    FRONTS,
    NUMEL,
    ONE_PASS,
    TWO_PASSES,
    Given,
    given,
    gradients_of,
    model,
    one_process,
    rows,
    sum_of_losses,
    wrapped,
)

import fusedcomm
from fusedcomm import Config


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


# ---- Join around DDP


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


def joined_twice(rank, world_size, attached):
    """A Join in which rank 0 has no input, then one of the other kind."""
    ddp = DistributedDataParallel(nn.Linear(3, 2), bucket_cap_mb=BUCKETS)
    comm = fusedcomm.attach(ddp, "fp32", quiet=True) if attached else None
    found = []
    for divides, nums in ((False, (0, 2)), (True, (2, 1)), (False, (1, 2))):
        with Join([ddp], divide_by_initial_world_size=divides):
            for step in range(nums[rank]):
                ddp.zero_grad()
                ddp(rows(rank, step, 0, 4)[0][:, :3]).square().mean().backward()
                found.append(gradients_of(ddp).clone())
    if comm is not None:
        comm.detach()
    return found


def test_one_join_after_another_divides_as_ddp_does(ranks):
    ours, theirs = (ranks.run(joined_twice, attached, world_size=2) for attached in (True, False))
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_with_weights_the_mean_under_join_is_of_the_ranks_with_data(ranks):
    config = Config("fp32", weighted="mean")
    for divides in (True, False):
        short, long = ranks.run(joined, (1, 3), True, config, divides, world_size=2)
        alone = ranks.run(joined, (0, 3), True, config, divides, world_size=2)[1]
        torch.testing.assert_close(long[1:3], alone[1:3], rtol=1e-6, atol=1e-7)
        assert torch.equal(short[0], long[0]) and torch.equal(short[1], long[3])


# ---- a rank whose data has ended


def ended(rank, world_size, front, nums):
    """The gradients of max(nums) steps. This rank has data for nums[rank] of them, then it goes on with any batch."""
    module = model()
    call, comm, _ = wrapped(front, module, Config("fp32", weighted="mean"))
    found = []
    for step in range(max(nums)):
        comm.weight = 4 if step < nums[rank] else 0
        module.zero_grad()
        (sum_of_losses(call, *rows(rank, min(step, nums[rank]), 0, 4)) / 4).backward()
        found.append(gradients_of(module).clone())
    return found


@pytest.mark.parametrize("front", ["reducer", "parallel"])
@pytest.mark.parametrize("nums", [(2, 5), (4, 0, 3)])
def test_a_rank_whose_data_has_ended_goes_on_with_weight_0(ranks, front, nums):
    expected = one_process([[[4 * (step < num) for num in nums]] for step in range(max(nums))], len(nums))
    for found in ranks.run(ended, front, nums, world_size=len(nums)):
        for gradients, exact in zip(found, expected, strict=True):
            assert (gradients - exact).norm() <= 1e-6 * exact.norm()
