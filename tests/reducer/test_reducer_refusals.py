"""How ranks with a GradReducer fail together in a backward pass: with one text, on every rank, long before the timeout.
What is refused earlier is in tests/refusals."""

import pytest
import torch
from models import Gradients, integers, mean_of_integers, reducer_of, refusal
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.check  # they wait until the watches have asked all ranks

SHAPES = ((4000,), (30, 40), (9,))


def run_into(rank, world_size, case):
    """Returns the error of the pass, the error of the next one, and a gradient with a new reducer."""
    model = Gradients(*SHAPES)
    reducer = reducer_of(model, bucket_mib=25 if "in one bucket" in case else 0.001)
    gradients = [integers(rank, shape) for shape in SHAPES]

    def raises(gradient):
        raise ValueError("the user's own error")

    def step():
        if case == "missing" or (case == "missing on rank 1" and rank == 1):
            return (model.weights[2] * gradients[2]).sum().backward()
        if case == "interrupted on rank 1" and rank == 1:
            model.weights[0].register_hook(raises)
        if case.startswith("frozen on rank 1"):
            model.weights[0].requires_grad_(rank != 1)
        return model(gradients).backward()

    first = refusal(step)
    second = refusal(lambda: model(gradients).backward())
    reducer.detach()
    model = Gradients(*SHAPES)
    reducer_of(model, bucket_mib=0.001)
    model(gradients).backward()
    return first, second, model.weights[1].grad


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("missing", ["the backward pass brought no gradient for weights.1, weights.0", "find_unused_parameters=True"]),
        ("missing on rank 1", ["rank 1 of 3: the backward pass brought no gradient for weights.1, weights.0"]),
        ("frozen on rank 1", ["requires_grad of weights.0 was True on rank 0 and False on rank 1"]),
        ("frozen on rank 1, in one bucket", ["requires_grad of weights.0 was True on rank 0 and False on rank 1"]),
    ],
)
def test_a_pass_that_cannot_go_on_fails_with_one_text_on_every_rank(ranks, case, told):
    outcome = ranks.run(run_into, case, world_size=3)
    for first, second, gradient in outcome:
        assert all(text in first for text in told), first
        assert second.split(": ", 1)[1] == first.split(": ", 1)[1]
        assert torch.allclose(gradient, mean_of_integers(3, (30, 40)), atol=1e-5)
    if "rank 1" in case:
        assert len({first for first, _, _ in outcome}) == 1


def test_if_a_rank_raises_in_its_backward_pass_the_others_do_not_wait_for_it(ranks):
    outcome = ranks.run(run_into, "interrupted on rank 1", world_size=3)
    assert "the user's own error" in outcome[1][0]
    for rank, (first, second, gradient) in enumerate(outcome):
        told = "rank 1 of 3: its backward pass ended with an error"
        assert told in second and (rank == 1 or told in first)
        assert torch.allclose(gradient, mean_of_integers(3, (30, 40)), atol=1e-5)


class Shared(nn.Module):
    """One layer in two reentrant checkpoints: autograd adds up its gradient twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.layer = nn.Linear(10, 10)

    def forward(self, x, use_reentrant):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=use_reentrant)
        return x.sum()


def shared(rank, world_size):
    model = Shared()
    reducer = reducer_of(model)
    x = torch.full((2, 10), float(rank + 1))
    model(x, False).backward()
    mean = model.layer.weight.grad.clone()
    error = refusal(lambda: model(x, True).backward())
    reducer.detach()
    return mean, error


def test_a_parameter_in_two_reentrant_checkpoints_is_refused(ranks):
    (mean, error), (others, others_error) = ranks.run(shared, world_size=2)
    assert torch.equal(mean, others)
    for text in (error, others_error):
        assert "layer." in text and "has arrived twice" in text and "use_reentrant=False" in text
