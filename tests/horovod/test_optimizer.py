"""DistributedOptimizer trains, bit for bit, as one process does that has the gradients of all ranks."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable

import pytest
import torch
from jobs import job, raised, values
from sampling import few
from torch import nn

import fusedcomm.horovod as hvd

NUM_STEPS = 6
NEW_FROM = 3
"""The step from which there are new parameters."""


class Net(nn.Module):
    """Gradients are multiples of 12, which differ by rank and step. A rank uses one of the branches; in each step some
    rank does not use the tables, and the second one is used from step 1 on. `new` is thawed or added, if at all."""

    def __init__(self, is_sparse: bool = False) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.zeros(3))
        self.branches = nn.ParameterList([torch.zeros(2, 3) for _ in range(3)])
        self.never = nn.Parameter(torch.zeros(2))
        self.table = nn.Embedding(8, 3, sparse=is_sparse)
        self.new = nn.ModuleList([nn.Embedding(4, 3, sparse=is_sparse), nn.Linear(3, 1)])
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, rank: int, step: int) -> torch.Tensor:
        def times_numbers(tensor: torch.Tensor) -> torch.Tensor:
            return (tensor * values(rank, tuple(tensor.shape), salt=step) * 12).sum()

        loss = times_numbers(self.shared) + times_numbers(self.branches[(rank + step) % 3])
        loss = loss + times_numbers(self.new[1](values(rank, (2, 3), salt=step)))
        if (rank + step) % 3:
            indices = torch.tensor([1, rank, rank, step % 4])
            loss = loss + times_numbers(self.table(2 * indices))
            if step > 0:
                loss = loss + times_numbers(self.new[0](indices))
        return loss


def plain_step(optimizer: torch.optim.Optimizer, backward: Callable) -> None:
    optimizer.zero_grad()
    backward()
    optimizer.step()


def with_closure(optimizer: torch.optim.Optimizer, backward: Callable) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return backward()

    assert torch.is_tensor(optimizer.step(closure))


def clipped(optimizer: torch.optim.Optimizer, backward: Callable) -> None:
    is_ours = hasattr(optimizer, "skip_synchronize")
    optimizer.zero_grad()
    backward()
    if is_ours:
        optimizer.synchronize()
    nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 0.125)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optimizer.skip_synchronize() if is_ours else contextlib.nullcontext():
            optimizer.step()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.25)


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.25, momentum=0.5)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.125)


class OfTheScript(hvd.Compression.none):
    """A compressor of a script's own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.double(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(dtype)


@dataclasses.dataclass
class Training:
    """`options`: of DistributedOptimizer. `ways`: how there are new parameters; also without any. `in_lists`,
    `in_set`: whether it has groups, or a process set, that the model's parameters and the job decide."""

    options: dict
    ways: tuple[str, ...] = ("thawed", "added")
    make: Callable = momentum
    step: Callable = plain_step
    is_sparse: bool = False
    in_lists: bool = False
    in_set: bool = False
    sizes: tuple[int, ...] = (1, 2, 3, 4)


TRAININGS = {
    "plain": Training({}, ("thawed", "added", "from nothing")),
    "Adam": Training({}, make=adam),
    "sums": Training(dict(op=hvd.Sum)),
    "predivided": Training(dict(gradient_predivide_factor=4.0), ()),
    "in 1 group": Training(dict(groups=1)),
    "in 9 groups": Training(dict(groups=9), ()),
    "in groups, predivided": Training(dict(groups=2, gradient_predivide_factor=2.0), ()),
    "in lists": Training({}, in_lists=True),
    "three passes": Training(dict(backward_passes_per_step=3)),
    "a compressor of the script's own": Training(dict(compression=OfTheScript)),
    "fp16": Training(dict(compression=hvd.Compression.fp16)),
    "bf16, in groups": Training(dict(compression=hvd.Compression.bf16, groups=2), ()),
    "a closure": Training({}, (), step=with_closure),
    "clipped": Training({}, (), step=clipped),
    "a process set": Training({}, ("thawed",), in_set=True, sizes=(3, 4)),
    "sparse": Training({}, make=sgd, is_sparse=True),
    "sparse as dense": Training(dict(sparse_as_dense=True), (), make=sgd, is_sparse=True),
    "sparse in 1 group": Training(dict(groups=1), make=sgd, is_sparse=True),
    "sparse, two passes": Training(dict(backward_passes_per_step=2), make=sgd, is_sparse=True),
}


def trained(training: Training, way: str, ranks: list[int], share: float, fills: bool, wrap: Callable) -> Net:
    """A model trained with the gradients of `ranks`, times `share`. fills: parameters without a gradient get zeros."""
    net = Net(training.is_sparse)
    if way == "from nothing":
        net.requires_grad_(False)
    elif way == "thawed":
        net.new.requires_grad_(False)
    kept = list(net.new.parameters()) if way == "added" else []
    optimizer = wrap(training.make([each for each in net.parameters() if all(each is not one for one in kept)]), net)
    passes = training.options.get("backward_passes_per_step", 1)
    for step in range(NUM_STEPS):
        if step == NEW_FROM and way == "added":
            optimizer.add_param_group({"params": kept})
        elif step == NEW_FROM and way != "never":
            net.requires_grad_(True)

        def backward(step: int = step) -> torch.Tensor | None:
            if not net.shared.requires_grad:
                return None
            for each in range(passes * step, passes * (step + 1)):
                losses = [net(rank, each) * share for rank in ranks]
                for loss in losses:
                    loss.backward()
            if step < NEW_FROM and way == "added":  # the optimizer does not know them yet
                net.new.zero_grad()
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                if fills and parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            return losses[0]

        training.step(optimizer, backward)
    return net


def differing(ours: Net, alone: Net) -> list[str]:
    found = []
    for (name, mine), other in zip(ours.named_parameters(), alone.parameters(), strict=True):
        is_same = torch.equal(mine, other)
        gradients = [each.grad for each in (mine, other) if each.grad is not None]
        if gradients:
            is_same &= len(gradients) == 2 and gradients[0].layout == gradients[1].layout
            is_same &= torch.equal(gradients[0].to_dense(), gradients[-1].to_dense())
        found += [] if is_same else [name]
    return found


def wrapped(training: Training, some: hvd.ProcessSet, optimizer: torch.optim.Optimizer, net: Net):
    options = dict(training.options)
    if training.in_lists:
        options["groups"] = [[net.branches[0], *net.new[1].parameters()], [net.never]]
    if training.in_set:
        options["process_set"] = some
    named = net.named_parameters() if training.make is not adam else None
    found = hvd.DistributedOptimizer(optimizer, named, **options)
    assert isinstance(found, type(optimizer)) and type(found).__name__ == type(optimizer).__name__
    return found


def check_trainings(rank: int, size: int) -> dict[tuple[str, str], list[str]]:
    """The parameters that differ, by training and way."""
    some, wrong = hvd.ProcessSet({0, size - 1}), {}
    with job(process_sets=[some] if size > 2 else []):
        for name, training in TRAININGS.items():
            if size not in training.sizes:
                continue
            ranks = list(range(size))
            if training.in_set:
                ranks = some.ranks if some.included() else [rank]
            share = 1.0 if training.options.get("op") == hvd.Sum else 1 / len(ranks)
            # What is new does not depend on the number of ranks.
            for way in ("never", *(training.ways if size <= 2 or training.in_set else ())):
                ours = trained(training, way, [rank], 1.0, False, functools.partial(wrapped, training, some))
                alone = trained(training, way, ranks, share, len(ranks) > 1, lambda optimizer, net: optimizer)
                if names := differing(ours, alone):
                    wrong[name, way] = names
    return wrong


@pytest.mark.check
@pytest.mark.parametrize("size", few([1, 2, 3, 4], 1, 2, 3))
def test_it_trains_as_one_process_with_all_gradients(ranks, size):
    assert ranks.run(check_trainings, world_size=size) == [{}] * size


def check_kept_state(rank, size):
    with job():
        models, steps = [nn.Linear(3, 4), nn.Linear(3, 4)], []
        models[1].load_state_dict(models[0].state_dict())
        optimizers = [adam(model.parameters()) for model in models]

        def train(step: int) -> None:
            for model, optimizer in zip(models, optimizers, strict=True):
                model(values(0, (2, 3), salt=step)).square().sum().backward()
                optimizer.step()

        train(0)
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in optimizers]
        optimizers[0].register_step_post_hook(lambda *_: steps.append(1))
        optimizers[0] = hvd.DistributedOptimizer(optimizers[0], models[0].named_parameters())
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=step == 0)
            train(step)
            for scheduler in schedulers:
                scheduler.step()
        assert torch.equal(models[0].weight, models[1].weight) and torch.equal(models[0].bias, models[1].bias)
        assert len(steps) == 3, "a hook runs once in each step"
        other = hvd.DistributedOptimizer(adam(models[0].parameters()), models[0].named_parameters())
        other.load_state_dict(optimizers[0].state_dict())
        assert other.param_groups[0]["lr"] == optimizers[0].param_groups[0]["lr"] == 0.125 / 8


def test_the_optimizers_state_hooks_and_scheduler_go_on(ranks):
    ranks.run(check_kept_state, world_size=2)


def check_misused(rank, size):
    with job():
        net = Net()
        optimizer = hvd.DistributedOptimizer(sgd(net.parameters()), net.named_parameters(), backward_passes_per_step=2)
        for number in range(2):
            net(rank, number).backward()
        told = [raised(optimizer.zero_grad), raised(net(rank, 2).backward)]
        optimizer.synchronize()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            optimizer.step()
        told.append(("warning", str(seen[0].message)))
        optimizer.zero_grad()
        net(rank, 0).backward()
        optimizer.step()  # a pass is missing, and the gradients are reduced
        everyone = hvd.allgather(net.shared.detach().reshape(1, -1))
        assert torch.equal(everyone[0], everyone[1]) and everyone[0].any()
        return told


def test_calls_in_a_wrong_order_are_told(ranks):
    for told in ranks.run(check_misused, world_size=2):
        kinds = ["AssertionError", "AssertionError", "warning"]
        words = ["zero_grad()", "backward_passes_per_step", "skip_synchronize"]
        assert [kind for kind, _ in told] == kinds
        assert [word for word, (_, said) in zip(words, told, strict=True) if word not in said] == []
