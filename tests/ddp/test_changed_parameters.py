"""Parameters that are converted or replaced after DDP was made: DDP then synchronizes nothing, in silence, and
fusedcomm says so."""

import copy

import pytest
import torch
from models import Gradients, error_of, integers, mean_of_integers, synchronize, synchronized
from torch.nn.parallel import DistributedDataParallel

import fusedcomm

SHAPES = ((80, 64), (7,))


def convert(ddp):
    ddp.to(torch.bfloat16)


def convert_one(ddp):
    ddp.module.weights[1].data = ddp.module.weights[1].data.double()


def convert_and_convert_back(ddp):
    ddp.half().float()


def load_by_assignment(ddp):
    ddp.load_state_dict({name: value.clone() for name, value in ddp.state_dict().items()}, assign=True)


def replace_one(ddp):
    ddp.module.weights[0] = torch.nn.Parameter(torch.zeros(SHAPES[0]))


def replace_a_module(ddp):
    ddp.module.weights = Gradients(*SHAPES).weights


CHANGES = [
    (convert, ["'weights.0' was float32 and is bfloat16; 'weights.1' was float32 and is bfloat16. Make a new"]),
    (convert_one, ["any more: 'weights.1' was float32 and is float64. Make a new"]),
    (convert_and_convert_back, ["'weights.0' was converted and converted back; 'weights.1' was"]),
    (load_by_assignment, ["'weights.0' is another tensor; 'weights.1' is another tensor", "assign=False"]),
    (replace_one, ["any more: 'weights.0' is another tensor. Make a new"]),
    (replace_a_module, ["'weights.0' is another tensor; 'weights.1' is another tensor"]),
]


def gradients_of(rank):
    return [integers(rank, shape) for shape in SHAPES]


def changed(rank, world_size, change, wire):
    """The errors of two steps after the change, and of an attempt to attach to the changed module."""
    ddp = DistributedDataParallel(Gradients(*SHAPES))
    comm = fusedcomm.attach(ddp, wire, quiet=True)
    synchronize(ddp, gradients_of(rank), steps=2)
    change(ddp)
    with torch.no_grad():
        ddp(gradients_of(rank))  # no step: nothing is to be synchronized
    texts = []
    for _ in range(2):
        texts.append(error_of(RuntimeError, ddp, gradients_of(rank)))
    comm.detach()
    ddp(gradients_of(rank)).backward()  # as plain DDP does
    return *texts, error_of(RuntimeError, fusedcomm.attach, ddp, wire, quiet=True)


@pytest.mark.parametrize(("change", "words"), CHANGES, ids=lambda value: getattr(value, "__name__", "words"))
def test_the_next_step_names_parameters_that_ddp_no_longer_synchronizes(ranks, change, words):
    for first, second, attaching in ranks.run(changed, change, "int8", world_size=2):
        assert first == second and first.startswith("fusedcomm: parameters have changed since fusedcomm was attached")
        assert [word for word in words if word not in first] == [], first
        name = "'weights.1'" if change is convert_one else "'weights.0'"
        assert "DDP does not synchronize the gradients of" in attaching and name in attaching


def test_a_search_for_the_wire_names_them_too(ranks):
    for first, *_ in ranks.run(changed, load_by_assignment, "auto", world_size=2):
        assert "'weights.0' is another tensor" in first


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
    load_by_assignment(call)
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
