"""Parameters that are converted or replaced after a front end was given them. DDP then synchronizes nothing, in
silence; fusedcomm says so on every rank."""

import copy

import pytest
import torch
from front_ends import FRONT_ENDS, end
from models import Gradients, error_of, integers, mean_of_integers, synchronize, synchronized
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedcomm

SHAPES = ((80, 64), (7,))


def gradients_of(rank):
    return [integers(rank, shape) for shape in SHAPES]


class Layers(nn.Module):
    """Takes parameters of any dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(getattr(layer, "weight", x).dtype))
        return x


def parametrize(model: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(model.layers[0], "weight", nn.Identity())


def assign(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def assign_frozen(model: nn.Module) -> None:
    model.requires_grad_(False)
    assign(model)
    model.requires_grad_(True)


def replace_a_module(model: nn.Module) -> None:
    model.layers[2] = copy.deepcopy(model.layers[2])


NO_LONGER = "gradient of layers.0.weight no longer comes to the reducer"
ANOTHER = "is not the one that the reducer was given"
NO_GRADIENT = "brought no gradient for layers.2."
CHANGES = {
    # What the hook says, what GradReducer and DataParallel say, and where another one, what GradReducer says.
    "converted": (nn.Module.double, "'layers.0.weight' was float32 and is float64; 'layers.0.bias' was", NO_LONGER),
    "and back": (
        lambda model: model.half().float(),
        "'layers.0.weight' was converted and converted back; 'la",
        NO_LONGER,
    ),
    "one converted": (
        lambda model: model.layers[2].double(),
        "any more: 'layers.2.weight' was float32 and is float64; 'layers.2.bias' was",
        "gradient of layers.2.weight no longer comes to the reducer",
    ),
    "parametrized": (parametrize, "any more: 'layers.0.weight' was converted", NO_LONGER),
    "assigned": (assign, "'layers.0.weight' is another tensor; 'layers.0.bias' is", f"layers.0.weight {ANOTHER}"),
    "assigned while frozen": (assign_frozen, "'layers.0.weight' is another tensor", f"layers.0.weight {ANOTHER}"),
    "a module": (
        replace_a_module,
        "'layers.2.weight' is another tensor; 'layers.2.bias' is another",
        f"layers.2.weight {ANOTHER}",
        NO_GRADIENT,
    ),
}


def changed(rank, world_size, front_end, config, name, is_everywhere):
    """The error of the first step after a change of rank 1, or of all ranks, and of attaching to the changed module."""
    model = Layers()
    forward, comm = FRONT_ENDS[front_end].make(model, config)
    x = torch.ones(3, 4) * (rank + 1)
    forward(x).sum().backward()
    if rank == 1 or is_everywhere:
        CHANGES[name][0](model)
    optimizer = torch.optim.SGD(forward.parameters(), lr=0.1)
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    other.step()  # another model's optimizer is left alone
    if front_end == "hook":
        with torch.no_grad():
            forward(x)  # no step: nothing is to be synchronized

    def steps():
        for _ in range(2):
            forward(x).sum().backward()
            optimizer.step()

    texts = [error_of(RuntimeError, steps)]
    if front_end == "hook":
        texts.append(error_of(RuntimeError, steps))
        end(comm)
        forward(x).sum().backward()  # as plain DDP does
        texts.append(error_of(RuntimeError, fusedcomm.attach, forward, config, quiet=True))
    return texts


@pytest.mark.parametrize("name", CHANGES)
def test_the_next_step_names_parameters_that_ddp_no_longer_synchronizes(ranks, name):
    for config in ("int8", "auto") if name == "assigned" else ("int8",):
        for first, second, attaching in ranks.run(changed, "hook", config, name, True, world_size=2):
            assert first == second and first.startswith(
                "fusedcomm: parameters have changed since fusedcomm was attached"
            )
            assert CHANGES[name][1] in first and "assign=False" in first
            assert "DDP does not synchronize the gradients of" in attaching and "'layers." in attaching


@pytest.mark.parametrize("is_everywhere", [True, False])
@pytest.mark.parametrize("front_end", ["DataParallel", "reducer"])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.sampled
def test_they_are_an_error_of_the_next_step_on_every_rank(ranks, name, front_end, is_everywhere):
    (first,), (second,) = ranks.run(changed, front_end, "fp32", name, is_everywhere, world_size=2)
    _, _, expected, *of_reducer = CHANGES[name]
    instead = "ake the GradReducer or DataParallel again"
    if of_reducer and front_end == "reducer":  # the gradients of the others have told it
        (expected,), instead = of_reducer, "make a new GradReducer"
    for text in (first, second):
        assert expected in text and instead in text
    assert "rank 1 of 2" in second and ("rank 0 of 2" if is_everywhere else "rank 1 of 2") in first


def in_other_places(rank, world_size):
    """Steps after changes that leave DDP the tensors it has."""
    ddp = DistributedDataParallel(Gradients(*SHAPES))
    fusedcomm.attach(ddp, "fp32", quiet=True)
    seen = [synchronize(ddp, gradients_of(rank))]
    ddp.load_state_dict(copy.deepcopy(ddp.state_dict()))
    seen.append(synchronize(ddp, gradients_of(rank)))
    ddp.module.weights = torch.nn.ParameterList(list(ddp.module.weights))  # another module with the same parameters
    seen.append(synchronize(ddp, gradients_of(rank)))
    for weight in ddp.module.weights:
        weight.data = weight.data.clone()
    return [*seen, synchronize(ddp, gradients_of(rank))]


def test_the_same_tensors_in_other_places_are_trained_on(ranks):
    means = [mean_of_integers(2, shape) for shape in SHAPES]
    for seen in ranks.run(in_other_places, world_size=2):
        assert all(torch.equal(a, b) for step in seen for a, b in zip(step, means, strict=True))


def called_with_others(rank, world_size, front_end, kind):
    """A step, a call with parameters that are there for that call alone, a step, and parameters that stay."""
    call, _ = synchronized(front_end, Gradients(*SHAPES))
    before = synchronize(call, gradients_of(rank))
    for weight in call.parameters():
        weight.grad = None
    others = {name: p.detach() + 3 for name, p in call.named_parameters()}
    if kind == "steps":  # as meta-learning has them: the gradient goes through them
        others = {name: p * 2 + 3 for name, p in call.named_parameters()}
    elif kind != "averages":
        make = torch.nn.Parameter if kind == "parameters" else torch.Tensor.requires_grad_
        others = {name: make(p) for name, p in others.items()}
    with torch.set_grad_enabled(kind != "averages"):
        loss = torch.func.functional_call(call, others, (gradients_of(rank),))
    assert loss == sum(3 * each.sum() for each in gradients_of(rank))
    own = [torch.zeros(shape) for shape in SHAPES]
    if kind != "averages":
        loss.backward()
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in call.parameters()]
        if kind != "steps":
            assert all(map(torch.equal, gradients_of(rank), (p.grad for p in others.values())))
    for weight in call.parameters():
        weight.grad = None
    after = synchronize(call, gradients_of(rank))
    assign(call)
    return before, own, after, error_of(RuntimeError, call, gradients_of(rank))


@pytest.mark.parametrize("kind", ["averages", "tensors", "parameters", "steps"])
@pytest.mark.parametrize("front_end", ["hook", "DataParallel"])
def test_parameters_that_are_there_for_one_call_are_the_callers(ranks, front_end, kind):
    means = [mean_of_integers(2, shape) for shape in SHAPES]
    through = [2 * mean if kind == "steps" else torch.zeros_like(mean) for mean in means]
    for before, own, after, text in ranks.run(called_with_others, front_end, kind, world_size=2):
        for found, right in zip((before, own, after), (means, through, means), strict=True):
            assert all(map(torch.equal, found, right))
        assert "weights.0" in text


def frozen_and_replaced(rank, world_size):
    """A frozen parameter, which DDP does not synchronize, is converted: nothing to say until it is thawed."""
    model = Gradients(*SHAPES)
    model.weights[0].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    fusedcomm.attach(ddp, "fp32", quiet=True)
    model.weights[0] = torch.nn.Parameter(torch.zeros(SHAPES[0]), requires_grad=False)
    ddp(gradients_of(rank)).backward()
    return model.weights[1].grad


def test_a_frozen_parameter_may_be_replaced(ranks):
    for seen in ranks.run(frozen_and_replaced, world_size=2):
        assert torch.equal(seen, mean_of_integers(2, SHAPES[1]))


def compilations(rank, world_size):
    """The number of torch.compile's frames after each of five steps."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
    fusedcomm.attach(ddp, "int8", quiet=True)
    compiled = torch.compile(ddp, backend="eager")
    frames = []
    for _ in range(5):
        compiled(torch.ones(2, 8)).sum().backward()
        frames.append(counters["frames"]["total"])
    return frames, [reason for reason in counters["graph_break"] if "Synchronizer" in reason]


def test_torch_compile_does_not_look_into_the_check(ranks):
    for frames, breaks in ranks.run(compilations, world_size=2):
        assert frames[2] == frames[-1] and breaks == []
