"""GradReducer(every=k): of k backward passes the last is synchronized."""

import pytest
import torch
from models import Branches, Gradients, Mlp, integers, reducer_of
from torch import nn
from torch.utils.checkpoint import checkpoint

SHAPES = ((300,), (20, 30))


def given(rank, number):
    """A pass's gradients: signed integers, so sums and halves are exact in fp32."""
    return [(number + 1) * integers(rank, shape) for shape in SHAPES]


def own_sum(rank, numbers):
    return [sum(parts) for parts in zip(*(given(rank, n) for n in numbers), strict=True)]


def mean_of(world_size, numbers):
    """The mean over the ranks of the sum of these passes' gradients."""
    sums = (own_sum(rank, numbers) for rank in range(world_size))
    return [sum(parts) / world_size for parts in zip(*sums, strict=True)]


def gradients_of(model):
    return [weight.grad.clone() for weight in model.weights]


def accumulated(rank, world_size, every, num_steps):
    model = Gradients(*SHAPES)
    reducer = reducer_of(model, every=every)
    seen = []
    for step in range(num_steps):
        model.zero_grad()
        for micro in range(every):
            model(given(rank, every * step + micro)).backward()
            seen.append(gradients_of(model))
    return seen, reducer.stats().steps


@pytest.mark.parametrize("every", [1, 2, 3])
def test_the_last_of_every_k_passes_gives_the_mean_of_their_sum(ranks, every):
    num_steps = 4
    for rank, (seen, steps) in enumerate(ranks.run(accumulated, every, num_steps, world_size=2)):
        assert steps == num_steps
        for number, found in enumerate(seen):
            so_far = range(number - number % every, number + 1)
            is_last = number % every == every - 1
            wanted = mean_of(2, so_far) if is_last else own_sum(rank, so_far)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), number


def with_no_sync(rank, world_size):
    """Passes: n = within no_sync(), p = plain. every=2, so each second p is synchronized, whatever stands between."""
    model = Gradients(*SHAPES)
    reducer = reducer_of(model, every=2)
    outcome, since = [], []
    for number, kind in enumerate("pnpnppnnpp"):
        since.append(number)
        if kind == "n":
            with reducer.no_sync():
                model(given(rank, number)).backward()
        else:
            model(given(rank, number)).backward()
        found = gradients_of(model)
        if all(torch.equal(a, b) for a, b in zip(found, own_sum(rank, since), strict=True)):
            outcome.append("own")
        elif all(torch.equal(a, b) for a, b in zip(found, mean_of(world_size, since), strict=True)):
            outcome.append("mean")
            model.zero_grad()
            since = []
        else:
            outcome.append("wrong")
    return outcome, reducer.stats().steps


def test_passes_within_no_sync_are_not_counted(ranks):
    for outcome, steps in ranks.run(with_no_sync, world_size=2):
        #                     p      n      p       n      p      p       n      n      p      p
        assert outcome == ["own", "own", "mean", "own", "own", "mean", "own", "own", "own", "mean"]
        assert steps == 3


def same_as_no_sync(rank, world_size, kind):
    """The gradients of a step with every=3, and with no_sync() around the first two passes."""

    def train(every):
        torch.manual_seed(0)
        model = Branches() if kind == "unused" else Checkpointed() if kind == "reentrant" else Mlp()
        reducer = reducer_of(model, "bf16", every=3 if every else 1, find_unused_parameters=kind == "unused")
        seen = []
        for step in range(3):
            model.zero_grad()
            for micro in range(3):
                x = torch.randn(4, 10, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
                x.requires_grad_(kind == "reentrant")
                if every or micro == 2:
                    model(x).square().sum().backward()
                else:
                    with reducer.no_sync():
                        model(x).square().sum().backward()
            seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        reducer.detach()
        return seen

    return train(True), train(False)


class Checkpointed(nn.Module):
    """All parameters are within reentrant checkpoints, so only their own backward passes bring gradients."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(10, 12), nn.Linear(12, 7)

    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=True)
        return checkpoint(self.second, x, use_reentrant=True)


@pytest.mark.parametrize("kind", ["plain", "unused", "reentrant"])
def test_it_does_what_no_sync_does(ranks, kind):
    outcome = ranks.run(same_as_no_sync, kind, world_size=2)
    for ours, reference in outcome:
        for a, b, c in zip(sum(ours, []), sum(reference, []), sum(outcome[0][0], []), strict=True):
            assert (a is None) == (b is None) and (a is None or (torch.equal(a, b) and torch.equal(a, c)))
        assert any(a is not None and a.abs().max() > 0 for a in sum(ours, []))


def after_an_error(rank, world_size):
    """A pass that only adds up fails on every rank, and is made again."""
    model = Gradients(*SHAPES)
    reducer = reducer_of(model, every=2)

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise LookupError("a user's error")

    # The failing node is the last one, so a gradient has arrived before.
    first = (model.weights[1] * given(rank, 0)[1]).sum()
    loss = first + Failing.apply(model.weights[0]).sum()
    with pytest.raises(LookupError, match="a user's error"):
        loss.backward()
    outcome = []
    for number in range(4):
        if number % 2 == 0:
            model.zero_grad()
        model(given(rank, number)).backward()
        outcome.append(gradients_of(model))
    return outcome, reducer.stats().steps


def test_a_pass_that_fails_before_anything_is_sent_is_not_counted(ranks):
    for rank, (seen, steps) in enumerate(ranks.run(after_an_error, world_size=2)):
        assert steps == 2
        for number, found in enumerate(seen):
            wanted = mean_of(2, [number - 1, number]) if number % 2 else own_sum(rank, [number])
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), number
