"""GradReducer(every=k): of k backward passes the last is synchronized. In steps of k passes: tests/test_like_ddp.py."""

import pytest
import torch
from models import Gradients, integers, reducer_of

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
