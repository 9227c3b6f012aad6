"""DistributedOptimizer(weighted=…): averages weighted by what each rank did."""

import math

import pytest
import torch
from jobs import job, raised

import fusedcomm.horovod as hvd


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def rows(rank, step, number, count):
    generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    return torch.randn(count, 6, generator=generator)


# By step, pass and rank.
COUNTS = [[[1000, 1, 7], [3, 0, 40]], [[0, 12, 3], [2, 2, 2]], [[5, 0, 0], [1, 9, 0]]]


def check_trained(rank, size, weighted, compression):
    with job():
        ours, alone = model(), model().double()
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            ours.named_parameters(),
            weighted=weighted,
            backward_passes_per_step=2,
            compression=getattr(hvd.Compression, compression),
        )
        for step, passes in enumerate(COUNTS):
            optimizer.zero_grad()
            alone.zero_grad()
            total = sum(sum(counts[:size]) for counts in passes)
            for number, counts in enumerate(passes):
                for each in range(size):
                    if counts[each]:
                        (alone(rows(each, step, number, counts[each]).double()).square().sum() / total).backward()
                optimizer.weight = count = counts[rank]
                loss = ours(rows(rank, step, number, max(count, 1))).square().sum()
                (loss * math.nan if count == 0 else loss / count if weighted == "mean" else loss).backward()
            optimizer.synchronize()
            found, exact = (torch.cat([p.grad.flatten() for p in each.parameters()]) for each in (ours, alone))
            limit = 1e-6 if compression == "none" else 2e-3
            assert (found - exact).norm() <= limit * exact.norm()


@pytest.mark.parametrize("weighted", ["mean", "sum"])
@pytest.mark.parametrize(("size", "compression"), [(1, "none"), (2, "fp16"), (3, "none")])
@pytest.mark.sampled
def test_gradients_are_those_of_one_process_with_all_tokens(ranks, weighted, size, compression):
    ranks.run(check_trained, weighted, compression, world_size=size)


DROPS = {
    "None": lambda optimizer, ours: optimizer.zero_grad(),
    "zeros": lambda optimizer, ours: optimizer.zero_grad(set_to_none=False),
    "by data": lambda optimizer, ours: [p.grad.data.zero_() for p in ours.parameters()],
}


def check_dropped(rank, size, weighted):
    """The last rank drops its first pass, and in every second step has no other one."""
    with job():
        ours, last = model(), size - 1
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(
            optimizer, ours.named_parameters(), weighted=weighted, backward_passes_per_step=2
        )
        for step, (drop, has_another) in enumerate((drop, another) for drop in DROPS for another in (True, False)):
            alone, total = model().double(), 0
            for number, count in enumerate((40, 3)):
                for each in range(size):
                    if each != last or (number == 1 and has_another):
                        alone(rows(each, step, number, count).double()).square().sum().backward()
                        total += count
                if rank == last and number == 1 and not has_another:
                    continue
                optimizer.weight = count
                loss = ours(rows(rank, step, number, count)).square().sum()
                (loss / count if weighted == "mean" else loss).backward()
                if rank == last and number == 0:
                    DROPS[drop](optimizer, ours)
            optimizer.synchronize()
            for found, exact in zip(ours.parameters(), alone.parameters(), strict=True):
                right = torch.zeros_like(found) if total == 0 else exact.grad / total
                assert total == 0 and found.grad is None or torch.allclose(found.grad, right.float(), rtol=1e-4), drop
            optimizer.zero_grad()


@pytest.mark.parametrize("weighted", ["mean", "sum"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_dropped_pass_counts_nothing(ranks, weighted, size):
    ranks.run(check_dropped, weighted, world_size=size)


def check_bad(rank, size):
    with job():
        ours = model()
        make = torch.optim.SGD(ours.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(make, ours.named_parameters(), weighted="mean")
        for value in (None, -1, math.inf, torch.ones(2)):
            optimizer.zero_grad()
            if rank != 1:
                optimizer.weight = 1
            elif value is not None:
                optimizer.weight = value
            ours(rows(rank, 0, 0, 2)).sum().backward()
            kind, said = raised(optimizer.synchronize)
            assert kind == "RuntimeError" and "rank 1 has" in said and "Give optimizer.weight" in said
        assert raised(lambda: setattr(optimizer, "weight", "3"))[0] == "TypeError"
        plain = hvd.DistributedOptimizer(torch.optim.SGD(model().parameters(), lr=0.1))
        assert "would do nothing" in raised(lambda: setattr(plain, "weight", 3))[1]
        for how in ({"weighted": "mean", "op": hvd.Sum}, {"weighted": "median"}):
            kind, said = raised(hvd.DistributedOptimizer, torch.optim.SGD(model().parameters(), lr=0.1), **how)
            assert kind == "ValueError" and "use 'mean' or 'sum'" in said


def test_a_weight_that_is_none_is_an_error_of_every_rank(ranks):
    ranks.run(check_bad, world_size=2)


def check_thawed(rank, size, sets_again):
    with job():
        ours = model()
        first = next(ours.parameters()).requires_grad_(False)
        make = torch.optim.SGD(ours.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(make, ours.named_parameters(), weighted="sum")
        optimizer.weight = 2 + 3 * rank
        for step in range(4):
            if step == 1:  # its unit is not 1
                first.requires_grad_(True)
                if sets_again:
                    optimizer.weight = 2 + 3 * rank
            optimizer.zero_grad()
            ours(rows(rank, step, 0, 2)).sum().backward()
            optimizer.synchronize()
            if step:
                (alone,) = torch.autograd.grad(sum(ours(rows(r, step, 0, 2)).sum() for r in range(size)) / 7, [first])
                torch.testing.assert_close(first.grad, alone)
        assert optimizer.weight == 2 + 3 * rank


@pytest.mark.parametrize("sets_again", [True, False])
def test_a_thawed_parameter_is_weighted(ranks, sets_again):
    ranks.run(check_thawed, sets_again, world_size=2)
