"""Parameters that are thawed, or added, after DistributedOptimizer was made are reduced like all others."""

import pytest
import torch
from jobs import job, raised, values
from torch import nn

import fusedcomm.horovod as hvd

NEW_FROM = 4
"""The step from which there are new parameters."""
NUM_STEPS = 16


class Halves(hvd.Compression.none):
    """A compressor of a script's own."""


HOW = {
    "plain": {},
    "sums": dict(op=hvd.Sum),
    "in 1 group": dict(groups=1),
    "in a list": dict(groups=[[]]),
    "two passes": dict(backward_passes_per_step=2),
    "own compressor": dict(compression=Halves),
    "exact wire": dict(compression=hvd.Compression.int8),
}


class Model(nn.Module):
    """`new` is thawed or added. Its table's gradient is sparse if `is_sparse`."""

    def __init__(self, is_sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.old = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(2)])
        self.new = nn.ModuleList([nn.Embedding(4, 3, sparse=is_sparse), nn.Linear(3, 1)])

    def forward(self, rank: int, step: int) -> torch.Tensor:
        inputs = values(rank, (3,), salt=step) * self.old[0] + self.old[1]
        row = self.new[0](torch.tensor((rank + step) % 4))
        bias = self.new[1].bias.sum()
        return (inputs * row).square().sum() + ((inputs * self.new[1].weight[0]).sum() + bias).square()


def begin(model: nn.Module, way: str) -> list[nn.Parameter]:
    """What the optimizer is made with."""
    model.double()
    if way == "added":
        return list(model.old.parameters())
    model.new.requires_grad_(way == "always")
    return list(model.parameters())


def renew(model: nn.Module, optimizer: torch.optim.Optimizer, way: str) -> None:
    if way == "added":
        optimizer.add_param_group({"params": list(model.new.parameters())})
    model.new.requires_grad_(True)


def train(model, optimizer, way, ranks, steps, passes=1, share=1.0, is_own=True) -> None:
    for step in steps:
        if step == NEW_FROM and way != "always":
            renew(model, optimizer, way)
        optimizer.zero_grad()
        for i in range(passes):
            for rank in ranks:
                (model(rank, passes * step + i) * share).backward()
        if step < NEW_FROM:  # the optimizer does not know them yet
            model.new.zero_grad()
        optimizer.step()


def wanted(way: str, size: int, how: dict, is_sparse: bool) -> Model:
    """The model as one process trains it with all ranks' gradients."""
    model = Model(is_sparse)
    optimizer = torch.optim.SGD(begin(model, way), 2.0**-10)
    share = 1.0 if how.get("op") == hvd.Sum else 1 / size
    train(model, optimizer, way, range(size), range(NUM_STEPS), how.get("backward_passes_per_step", 1), share)
    return model


def check_new(rank, size, way, name, is_sparse):
    how = dict(HOW[name])
    with job():
        model = Model(is_sparse)
        given = begin(model, way)
        if "groups" in how and isinstance(how["groups"], list):
            how["groups"] = [[model.old[0], model.new[1].weight, model.new[1].bias]]
        named = model.named_parameters() if way == "thawed" else None
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(given, 2.0**-10), named, **how)
        passes = how.get("backward_passes_per_step", 1)
        train(model, optimizer, way, [rank], range(NUM_STEPS), passes)
        for (which, mine), other in zip(
            model.named_parameters(), wanted(way, size, how, is_sparse).parameters(), strict=True
        ):
            torch.testing.assert_close(mine, other, msg=lambda text, which=which: f"{which}: {text}")


@pytest.mark.sampled
@pytest.mark.parametrize("way", ["thawed", "added"])
@pytest.mark.parametrize("name", HOW)
def test_new_parameters_are_reduced(ranks, name, way):
    ranks.run(check_new, way, name, False, world_size=2)


@pytest.mark.sampled
@pytest.mark.parametrize("way", ["thawed", "added"])
@pytest.mark.parametrize("name", ["plain", "in 1 group", "two passes"])
def test_new_sparse_gradients_are_reduced(ranks, name, way):
    ranks.run(check_new, way, name, True, world_size=2)


def check_everything_frozen(rank, size):
    with job():
        model = Model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 2.0**-10), model.named_parameters())
        frozen = Model().requires_grad_(False)
        late = hvd.DistributedOptimizer(torch.optim.SGD(frozen.parameters(), 2.0**-10), frozen.named_parameters())
        late.step()
        frozen.requires_grad_(True)
        for each, own in ((model, optimizer), (frozen, late)):
            for step in range(3):
                own.zero_grad()
                each(rank, step).backward()
                own.step()
        for mine, other in zip(frozen.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, other)


def test_a_model_may_be_thawed_from_nothing(ranks):
    ranks.run(check_everything_frozen, world_size=2)


def check_adasum(rank, size, way):
    with job():
        models = []
        for data in (0, rank):  # equal steps are averaged, so all ranks step as one would
            model = Model()
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(begin(model, way), 2.0**-10), op=hvd.Adasum)
            train(model, optimizer, way, [data], range(NUM_STEPS))
            models.append(model)
            for each in model.parameters():
                everyone = hvd.allgather(each.detach().reshape(1, -1))
                torch.testing.assert_close(everyone, everyone[:1].expand_as(everyone))
        for mine, other in zip(models[0].parameters(), wanted(way, 1, {}, False).parameters(), strict=True):
            torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("way", ["thawed", "added"])
def test_new_parameters_take_part_in_adasum(ranks, way):
    ranks.run(check_adasum, way, world_size=2)


def check_other_step(rank, size):
    with job():
        model = Model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(begin(model, "thawed"), 0.1), model.named_parameters())
        for step in range(2 + rank):
            model(rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.new.requires_grad_(True)
        model(rank, 9).backward()
        return raised(optimizer.step)


def test_ranks_that_thaw_in_different_steps_are_told(ranks):
    for kind, said in ranks.run(check_other_step, world_size=2):
        assert kind == "HorovodInternalError" and "after 1 steps" in said and "after 2 on another" in said, said
