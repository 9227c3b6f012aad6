"""When a DataParallel synchronizes gradients: the same passes as DDP, and those that DDP leaves out in silence."""

import pytest
import torch
from models import wrapped
from torch import nn
from torch.utils.checkpoint import checkpoint


def taken(module: nn.Linear) -> float:
    """The gradient, which is then gone."""
    value, module.weight.grad = module.weight.grad.item(), None
    return value


def synchronized_passes(rank, world_size, ours):
    """Whether the gradient is the mean after backward(), and what it is, in several orders of calls."""
    module = nn.Linear(1, 1, bias=False)
    model, x = wrapped(ours, module), torch.tensor([[float(rank + 1)]])

    seen = {}
    model(x).sum().backward()
    seen["forward and backward"] = taken(module)
    with model.no_sync():
        model(x).sum().backward()
    seen["both in no_sync"] = taken(module)
    with model.no_sync():
        output = model(x)
    output.sum().backward()
    seen["only the forward pass in no_sync"] = taken(module)
    output = model(x)
    with model.no_sync():
        output.sum().backward()
    seen["only backward() in no_sync"] = taken(module)
    with model.no_sync():
        module(x).sum().backward()
    seen["without the wrapper in no_sync"] = taken(module)
    with model.no_sync():
        model(x)
    module(x).sum().backward()
    seen["without the wrapper, after a forward pass in no_sync"] = taken(module)
    model.require_backward_grad_sync = False  # as some trainers do
    model(x).sum().backward()
    model.require_backward_grad_sync = True
    seen["require_backward_grad_sync"] = taken(module)
    return seen


def test_the_same_passes_are_synchronized_as_in_ddp(ranks):
    ours, theirs = (ranks.run(synchronized_passes, ours, world_size=2) for ours in (True, False))
    assert ours == theirs
    assert {name for name in ours[0] if ours[0][name] == ours[1][name]} == {
        "forward and backward",
        "only backward() in no_sync",
    }


def several_passes(rank, world_size):
    """The gradients after several backward passes; DDP synchronizes only the first of them."""
    module = nn.Linear(1, 1, bias=False)
    model = wrapped(True, module)
    x, found = torch.tensor([[float(rank + 1)]]), {}

    outputs = [model(factor * x) for factor in (1, 2, 4)]
    for output in outputs:
        output.sum().backward()
    found["three forward passes first"] = taken(module)
    outputs = [model(x), model(x)]
    (outputs[0] * outputs[1]).sum().backward()
    found["two in one backward pass"] = taken(module) / module.weight.item()
    output = model(x).sum()
    output.backward(retain_graph=True)
    output.backward()
    found["one graph twice"] = taken(module)
    kept = model(x)
    torch.autograd.grad(model(x).sum(), module.weight)
    kept.sum().backward()
    found["after autograd.grad"] = taken(module)
    return found


def test_every_pass_through_an_output_is_synchronized(ranks):
    for found in ranks.run(several_passes, world_size=2):
        assert found == {
            "three forward passes first": 10.5,
            "two in one backward pass": 5.0,
            "one graph twice": 3.0,
            "after autograd.grad": 1.5,
        }


def bypassing(rank, world_size, how):
    """Only rank 1 goes past its wrapper."""
    module = nn.Linear(1, 1, bias=False)
    model, x = wrapped(True, module), torch.ones(1, 1)
    model(x).sum().backward()
    if how == "checkpoint":  # the pass within the pass belongs to it
        model.module = nn.Sequential(module)
        model.module.forward = lambda x: checkpoint(module, x, use_reentrant=True)
        for _ in range(2):
            output = model(x.requires_grad_())
            model(x)
            output.sum().backward()
        return ""
    with pytest.raises(RuntimeError) as error:
        for _ in range(2):
            (module if rank == 1 else model)(x).sum().backward()
    return str(error.value)


def test_a_pass_that_bypasses_the_wrapper_is_an_error_on_every_rank(ranks):
    first, second = ranks.run(bypassing, "module", world_size=2)
    assert first == second and "rank 1 of 2" in first and "gradient of weight past the DataParallel" in first
    assert ranks.run(bypassing, "checkpoint", world_size=2) == ["", ""]
