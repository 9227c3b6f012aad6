"""An optimizer that steps within the backward pass would use gradients that are not means yet."""

import contextlib

import pytest
import torch
from models import Mlp, reducer_of


def step_in_backward(rank, world_size, how):
    torch.manual_seed(1)
    model, other = Mlp(), Mlp()
    reducer = reducer_of(model)
    optimizer = torch.optim.SGD((other if how == "another model's" else model).parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    last = next(model.parameters())
    last.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    if how == "detached":
        reducer.detach()
    with reducer.no_sync() if how == "no_sync" else contextlib.nullcontext():
        loss = model(torch.ones(2, 10) * (rank + 1)).sum()
        if how == "refused":
            with pytest.raises(RuntimeError, match=r"SGD\.step\(\) was called within a backward pass"):
                loss.backward()
            assert all(map(torch.equal, before, model.parameters()))
        else:
            loss.backward()
            stepped = not all(map(torch.equal, before, model.parameters()))
            assert stepped == (how != "another model's")


@pytest.mark.parametrize("how", ["refused", "no_sync", "detached", "another model's"])
def test_a_step_before_the_means_are_there_is_refused(ranks, how):
    ranks.run(step_in_backward, how, world_size=2)
