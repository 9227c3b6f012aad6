"""DistributedOptimizer(weighted=…): averages weighted by what each rank did."""

import math

import pytest
import torch
from jobs import job
from weighted import TWO_PASSES, gradients_of, model, one_process, rows, sum_of_losses

import fusedcomm.horovod as hvd

NO_PASS = -1
DROPPED = [[[8, 40, 9], [2, 3, 1]], [[8, 40, 9], [2, NO_PASS, NO_PASS]]]
"""Counts by step, pass and rank. The last rank drops the first pass of these steps."""


def wrapped(module, **options):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(optimizer, module.named_parameters(), **options)


def check_trained(rank, size, weighted, compression):
    is_mean = weighted == "mean"
    steps = [*TWO_PASSES, *DROPPED][: 2 * size]
    if is_mean:
        steps = [[counts] for step in TWO_PASSES for counts in step if any(counts[:size])]
    counted = [[[max(count, 0) for count in counts[:size]] for counts in step] for step in steps]
    for step in () if is_mean else counted[len(TWO_PASSES) :]:
        step[0][size - 1] = 0
    exact = one_process(counted, size)
    with job():
        module = model()
        options = dict(backward_passes_per_step=1 if is_mean else 2, compression=getattr(hvd.Compression, compression))
        optimizer = wrapped(module, weighted=weighted, **options)
        for step, passes in enumerate(steps):
            optimizer.zero_grad()
            for number, counts in enumerate(passes):
                if (count := counts[rank]) == NO_PASS:
                    continue
                optimizer.weight = count
                loss = sum_of_losses(module, *rows(rank, step, number, max(count, 1)))
                (loss * math.nan if count == 0 else loss / count if weighted == "mean" else loss).backward()
                if not is_mean and number == 0 and rank == size - 1 and step >= len(TWO_PASSES):
                    optimizer.zero_grad()
            optimizer.synchronize()
            limit = 1e-6 if compression == "none" else 2e-3
            assert (gradients_of(module) - exact[step]).norm() <= limit * exact[step].norm(), step
        optimizer.zero_grad()
        optimizer.weight = 0
        (sum_of_losses(module, *rows(rank, 0, 0, 1)) * math.nan).backward()
        optimizer.synchronize()
        assert not gradients_of(module).any(), "no rank has a weight"


@pytest.mark.parametrize("weighted", ["mean", "sum"])
@pytest.mark.parametrize(("size", "compression"), [(1, "none"), (2, "fp16"), (3, "none")])
def test_gradients_are_those_of_one_process_with_all_tokens_but_of_dropped_passes(ranks, weighted, size, compression):
    ranks.run(check_trained, weighted, compression, world_size=size)


def check_thawed(rank, size, sets_again):
    with job():
        ours = model()
        first = next(ours.parameters()).requires_grad_(False)
        optimizer = wrapped(ours, weighted="sum")
        optimizer.weight = 2 + 3 * rank
        for step in range(4):
            if step == 1:  # its unit is not 1
                first.requires_grad_(True)
                if sets_again:
                    optimizer.weight = 2 + 3 * rank
            optimizer.zero_grad()
            sum_of_losses(ours, *rows(rank, step, 0, 2)).backward()
            optimizer.synchronize()
            if step:
                total = sum(sum_of_losses(ours, *rows(other, step, 0, 2)) for other in range(size))
                torch.testing.assert_close(first.grad, torch.autograd.grad(total / 7, [first])[0])
        assert optimizer.weight == 2 + 3 * rank


@pytest.mark.parametrize("sets_again", [True, False])
def test_a_thawed_parameter_is_weighted(ranks, sets_again):
    ranks.run(check_thawed, sets_again, world_size=2)
