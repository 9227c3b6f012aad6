"""What reducers refuse: steps with gradients that are not means, and parameters that are no longer theirs."""

import contextlib
import copy

import pytest
import torch
from models import Mlp, reducer_of
from torch import nn

import fusedcomm


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


# ---- parameters that are no longer the reducer's


def assign(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def replace(model: nn.Module) -> None:
    inner = getattr(model, "module", model)
    inner.layers[2] = copy.deepcopy(inner.layers[2])


def parametrize(model: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(getattr(model, "module", model).layers[0], "weight", nn.Identity())


def assign_frozen(model: nn.Module) -> None:
    model.requires_grad_(False)
    assign(model)
    model.requires_grad_(True)


CHANGES = {
    "double": (lambda model: model.double(), "gradient of layers.0.weight no longer comes to the reducer"),
    "there and back": (lambda model: model.half().float(), "gradient of layers.0.weight no longer comes"),
    "parametrized": (parametrize, "gradient of layers.0.weight no longer comes to the reducer"),
    "assign": (assign, "layers.0.weight is not the one that the reducer was given"),
    "assigned while frozen": (assign_frozen, "layers.0.weight is not the one that the reducer was given"),
    "a module": (replace, "layers.2.weight is not the one that the reducer was given"),
}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.to(self.layers[0].weight.dtype))


def changed(rank, world_size, name, ours, is_everywhere):
    """The error of the first step after a change of rank 1, or of all ranks."""
    model = Layers()
    if ours == "DataParallel":
        model = fusedcomm.DataParallel(model, config="fp32", quiet=True)
        kept = model
    else:
        kept = reducer_of(model)
    x = torch.ones(3, 4) * (rank + 1)
    model(x).sum().backward()
    if rank == 1 or is_everywhere:
        CHANGES[name][0](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    other.step()  # another model's optimizer is left alone
    with pytest.raises(RuntimeError) as error:
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
    del kept
    return str(error.value)


@pytest.mark.parametrize("is_everywhere", [True, False])
@pytest.mark.parametrize("ours", ["DataParallel", "GradReducer"])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.sampled
def test_changed_parameters_are_an_error_of_the_next_step_on_every_rank(ranks, name, ours, is_everywhere):
    first, second = ranks.run(changed, name, ours, is_everywhere, world_size=2)
    expected, instead = CHANGES[name][1], "ake the GradReducer or DataParallel again"
    if (name, ours) == ("a module", "GradReducer"):  # the gradients of the others have told it
        expected, instead = "brought no gradient for layers.2.bias, layers.2.weight", "make a new GradReducer"
    for text in (first, second):
        assert expected in text and instead in text
    assert "rank 1 of 2" in second and ("rank 0 of 2" if is_everywhere else "rank 1 of 2") in first


def unchanged(rank, world_size):
    """What does not take parameters away: another head without gradients, a call with other tensors, and a
    module that loses a part."""
    model = Layers()
    reducer = reducer_of(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(3, 4)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()

    model.head = nn.Linear(2, 2).requires_grad_(False)
    step()
    values = {name: p * 2 for name, p in model.named_parameters()}
    torch.func.functional_call(model, values, (x,)).sum().backward()
    optimizer.step()
    del model.layers[2]
    step()
    model.load_state_dict(model.state_dict())
    step()
    assert repr(reducer) == "<fusedcomm.GradReducer: wire fp32, 2 ranks, 4 parameters, 4 steps>"
    model.head.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"head\.weight is not the one"):
        step()


def test_other_changes_of_a_module_are_no_error(ranks):
    ranks.run(unchanged, world_size=2)
