"""When reducers refuse a step of an optimizer. Changed parameters are in tests/ddp/test_changed_parameters.py."""

import contextlib

import pytest
import torch
from models import Mlp, reducer_of
from torch import nn


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


def unchanged(rank, world_size):
    """What does not take parameters away: another head without gradients, a call with other tensors, and a
    module that loses a part."""
    model = Mlp()
    reducer = reducer_of(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(3, 10)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()

    model.head = nn.Linear(5, 2).requires_grad_(False)
    step()
    values = {name: p * 2 for name, p in model.named_parameters()}
    torch.func.functional_call(model, values, (x,)).sum().backward()
    optimizer.step()
    del model.layers[2:4]
    step()
    model.load_state_dict(model.state_dict())
    step()
    assert repr(reducer) == "<fusedcomm.GradReducer: wire fp32, 2 ranks, 8 parameters, 4 steps>"
    model.head.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"head\.weight is not the one"):
        step()


def test_other_changes_of_a_module_are_no_error(ranks):
    ranks.run(unchanged, world_size=2)
