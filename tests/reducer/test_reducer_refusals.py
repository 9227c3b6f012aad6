"""What GradReducer refuses, and how ranks fail together: with one text, on every rank, long before the timeout."""

import os
import signal

import pytest
import torch
from models import Branches, Gradients, Mlp, integers, mean_of_integers, reducer_of
from ranks import RankError
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusedcomm


def error_of(call, *kinds):
    with pytest.raises(kinds or RuntimeError) as error:
        call()
    return f"{type(error.value).__name__}: {error.value}"


# ---- arguments


def refusals(rank, world_size):
    model = Mlp()
    result = model.layers[0].weight * 2
    integer = [("a", torch.zeros(3, dtype=torch.int64))]
    twice = [("a", nn.Parameter(torch.zeros(3))), ("a", nn.Parameter(torch.zeros(4)))]
    elsewhere = [("a", model.layers[0].weight), ("b", nn.Parameter(torch.zeros(3, device="meta")))]
    attempts = {
        "ddp": lambda: reducer_of(DistributedDataParallel(Mlp())),
        "parameters": lambda: reducer_of(model.parameters()),
        "number": lambda: reducer_of(3),
        "no tensor": lambda: reducer_of([("a", 3)]),
        "none": lambda: reducer_of(integer),
        "same name": lambda: reducer_of(twice),
        "not a leaf": lambda: reducer_of([("a", result)]),
        "devices": lambda: reducer_of(elsewhere),
        "wire": lambda: reducer_of(model, "int9"),
        "off": lambda: reducer_of(model, "off"),
        "bucket_mib": lambda: reducer_of(model, bucket_mib=0),
        "bucket_mib of auto": lambda: reducer_of(model, "auto", bucket_mib=-1),
        "fast": lambda: reducer_of(model, bucket_mib="fast"),
        "every": lambda: reducer_of(model, every=0),
        "half": lambda: reducer_of(model, every=1.5),
        "unused": lambda: reducer_of(model, find_unused_parameters=1),
        "pattern": lambda: reducer_of(model, fusedcomm.Config(wires={"layer.*": "fp32"})),
    }
    found = {name: error_of(call, TypeError, ValueError, RuntimeError) for name, call in attempts.items()}
    reducer_of(model).detach()  # nothing has been left behind
    return found


def test_arguments_are_refused_with_the_reason(ranks):
    for found in ranks.run(refusals, world_size=2):
        assert found["ddp"].startswith("TypeError") and "ddp.module" in found["ddp"]
        for name in ("parameters", "number", "no tensor"):
            assert found[name].startswith("TypeError") and "named_parameters()" in found[name]
        assert "no parameters that could have gradients" in found["none"]
        assert "two parameters with the name 'a'" in found["same name"]
        assert "'a' is the result of a computation" in found["not a leaf"]
        assert found["devices"].startswith("RuntimeError") and "['cpu', 'meta']" in found["devices"]
        assert "'int9'" in found["wire"] and "'off'" in found["off"]
        for name, value in (("bucket_mib", "0"), ("bucket_mib of auto", "-1"), ("fast", "'fast'")):
            assert f"bucket_mib={value} is not possible: use a number of MiB greater than 0" in found[name]
        assert "every=0 is not possible" in found["every"] and "every=1.5 is not possible" in found["half"]
        assert "find_unused_parameters=1" in found["unused"]
        assert "'layer.*'" in found["pattern"]


def taken(rank, world_size):
    first, second, third = Mlp(), Mlp(), Mlp()
    reducer = reducer_of(first)
    errors = [error_of(lambda: reducer_of(first), ValueError)]
    errors.append(error_of(lambda: reducer_of([("mine", first.layers[0].weight)]), ValueError))
    ddp = DistributedDataParallel(second)
    errors.append(error_of(lambda: reducer_of(second), ValueError))
    reducer.detach()
    reducer_of(first)
    del ddp
    reducer_of(third)
    ddp = DistributedDataParallel(third)
    errors.append(error_of(lambda: ddp(torch.ones(2, 10)).sum().backward()))
    return errors


def test_a_parameter_has_one_synchronizer(ranks):
    for again, named, in_ddp, later in ranks.run(taken, world_size=2):
        assert "a fusedcomm.GradReducer already synchronizes the parameter 'layers.0.weight'" in again
        assert "already synchronizes the parameter 'mine'" in named
        assert "a DistributedDataParallel already synchronizes the parameter 'layers.0.weight'" in in_ddp
        assert "a DistributedDataParallel synchronizes the parameter layers." in later and "too" in later


def on_one_rank_only(rank, world_size):
    """Rank 1's parameters are taken; rank 0 would wait for it."""
    model = Mlp()
    ddp = DistributedDataParallel(Mlp())
    return error_of(lambda: reducer_of(ddp.module if rank == 1 else model), RuntimeError, ValueError)


def test_a_refusal_on_one_rank_is_raised_on_all(ranks):
    for error in ranks.run(on_one_rank_only, world_size=2):
        assert "a DistributedDataParallel already synchronizes the parameter 'layers.0.weight'" in error


def different_parameters(rank, world_size, kind):
    shapes = [(50, 2), (3,)]
    if kind == "shape":
        shapes[1] = (3 + rank,)
    model = Gradients(*shapes, dtype=torch.float64 if kind == "dtype" and rank else torch.float32)
    if kind == "strides" and rank:
        model.weights[0] = nn.Parameter(torch.zeros(2, 50).t())
    if kind == "name":
        model = nn.ModuleDict({f"of_rank_{rank}": model})
    kwargs = {
        "bucket_mib": {"bucket_mib": 1 + rank},
        "auto wire": {"config": "fp32" if rank else "auto"},
        "every": {"every": 1 + rank},
    }
    return error_of(lambda: reducer_of(model, **kwargs.get(kind, {})))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("shape", "parameters.list[1][1][0] is 3 on rank 0 and 4 on rank 1"),
        ("dtype", "float64"),
        ("strides", "reducer.strides.weights.0"),
        ("name", "of_rank_1"),
        ("bucket_mib", "reducer.bucket_mib is 1 on rank 0 and 2 on rank 1"),
        ("auto wire", "wire is 'auto' on rank 0 and 'fp32' on rank 1"),
        ("every", "reducer.every is 1 on rank 0 and 2 on rank 1"),
    ],
)
def test_ranks_with_different_parameters_are_told_which(ranks, kind, told):
    errors = ranks.run(different_parameters, kind, world_size=2)
    assert errors[0] == errors[1] and "the ranks do not agree" in errors[0] and told in errors[0]


# ---- in the backward pass


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 3, sparse=True)

    def forward(self, x):
        return self.embedding(x).sum()


def sparse(rank, world_size):
    model = Embedded()
    reducer = reducer_of(model.named_parameters())
    error = error_of(lambda: model(torch.ones(2, dtype=torch.int64)).backward())
    reducer.detach()
    return error


def test_a_sparse_gradient_needs_the_module(ranks):
    for error in ranks.run(sparse, world_size=2):
        assert "the gradient of embedding.weight is sparse" in error and "must be given the module" in error


SHAPES = ((4000,), (30, 40), (9,))


def run_into(rank, world_size, case):
    """Returns the error of the pass, the error of the next one, and a gradient with a new reducer."""
    model = Gradients(*SHAPES)
    reducer = reducer_of(model, bucket_mib=0.001)
    gradients = [integers(rank, shape) for shape in SHAPES]

    def raises(gradient):
        raise ValueError("the user's own error")

    def step():
        if case == "missing" or (case == "missing on rank 1" and rank == 1):
            return (model.weights[2] * gradients[2]).sum().backward()
        if case == "interrupted on rank 1" and rank == 1:
            model.weights[0].register_hook(raises)
        if case == "frozen on rank 1":
            model.weights[0].requires_grad_(rank != 1)
        return model(gradients).backward()

    first = error_of(step, RuntimeError, ValueError)
    second = error_of(lambda: model(gradients).backward())
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
    error = error_of(lambda: model(x, True).backward())
    reducer.detach()
    return mean, error


def test_a_parameter_in_two_reentrant_checkpoints_is_refused(ranks):
    (mean, error), (others, others_error) = ranks.run(shared, world_size=2)
    assert torch.equal(mean, others)
    for text in (error, others_error):
        assert "layer." in text and "has arrived twice" in text and "use_reentrant=False" in text


class Nested(nn.Module):
    """Its parameters are in reentrant checkpoints, except `first`; one of them is not used."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.layer = nn.Linear(10, 10)
        self.unused = nn.Linear(10, 10)

    def forward(self, x):
        return checkpoint(self.layer, self.first(x), use_reentrant=True).sum()


def nested(rank, world_size, find_unused):
    model = Nested()
    reducer_of(model, find_unused_parameters=find_unused)
    x = torch.full((2, 10), float(rank + 1))
    if not find_unused:
        return error_of(lambda: model(x).backward())
    model(x).backward()
    return model.first.weight.grad, model.layer.weight.grad, model.unused.weight.grad


def test_the_end_of_an_inner_backward_pass_is_not_taken_for_the_end(ranks):
    for error in ranks.run(nested, False, world_size=2):
        assert "brought no gradient for unused.bias, unused.weight" in error
    (first, layer, unused), (others_first, others_layer, _) = ranks.run(nested, True, world_size=2)
    assert unused is None and torch.equal(first, others_first) and torch.equal(layer, others_layer)


def dies(rank, world_size):
    model = Gradients((4000,), (30, 40))
    reducer_of(model, "bf16")
    gradients = [integers(rank, (4000,)), integers(rank, (30, 40))]
    model(gradients).backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: model(gradients).backward())


def test_a_rank_that_dies_is_named(ranks):
    outcome = ranks.outcomes(dies, world_size=3, lost=1)
    for rank in (0, 2):
        kind, error = outcome[rank]
        assert kind == "value" and f"rank {rank} of 3" in error and "rank 1" in error, error


def other_dtype(rank, world_size):
    model = Gradients((40,), dtype=torch.bfloat16)
    weight = model.weights[0]
    if not hasattr(weight, "grad_dtype"):
        return None
    weight.grad_dtype = torch.float32
    reducer_of(model)
    return error_of(lambda: (weight.float() * torch.ones(40)).sum().backward())


def test_a_gradient_of_another_dtype_than_its_parameter_is_refused(ranks):
    for error in ranks.run(other_dtype, world_size=2):
        assert error is None or "the gradient of weights.0 is Float and the parameter is BFloat16" in error


def without_a_group():
    return fusedcomm.GradReducer(Mlp())


def test_without_a_process_group_it_says_what_to_call():
    with pytest.raises(RuntimeError, match="init_process_group"):
        without_a_group()


def unused_is_allowed(rank, world_size):
    model = Branches()
    reducer_of(model, find_unused_parameters=False)
    model(torch.ones(1, 10)).sum().backward()


def test_unused_parameters_without_the_option_are_named(ranks):
    with pytest.raises(RankError, match="brought no gradient for never.bias, never.weight"):
        ranks.run(unused_is_allowed, world_size=2)
