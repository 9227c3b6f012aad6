"""Objects, parameters and optimizer states are the root's on every rank."""

import copy

import pytest
import torch
from jobs import job, values

import fusedcomm.horovod as hvd

OPTIMIZERS = {
    "SGD": lambda p, rank: torch.optim.SGD(p, lr=0.1 * (rank + 1)),
    "momentum": lambda p, rank: torch.optim.SGD(p, lr=0.1 * (rank + 1), momentum=0.5 + 0.1 * rank, nesterov=rank == 0),
    "Adam": lambda p, rank: torch.optim.Adam(p, lr=0.01 * (rank + 1), betas=(0.9 - 0.1 * rank, 0.99)),
    "AdamW": lambda p, rank: torch.optim.AdamW(p, lr=0.01 * (rank + 1), amsgrad=True),
    "RMSprop": lambda p, rank: torch.optim.RMSprop(p, lr=0.01 * (rank + 1), centered=True),
    "Adagrad": lambda p, rank: torch.optim.Adagrad(p, lr=0.01 * (rank + 1)),
}

OTHERS = {name: torch.Tensor.double if "Adam" in name else torch.Tensor.flatten for name in OPTIMIZERS}


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def check_objects(rank, size):
    with job():
        for root in range(size):
            roots = {"rank": root, "list": [1, "two", None], "tensor": values(root, (3,))}
            assert same(hvd.broadcast_object(roots if rank == root else None, root, name="object"), roots)
        every = [0, "text" * 1000, {"a": 2}][:size]  # neither types nor sizes are the same
        assert hvd.allgather_object(every[rank]) == every
        assert hvd.broadcast_object(b"" if rank == 0 else "x", 0) == b""


@pytest.mark.parametrize("size", [1, 3])
def test_objects_of_any_type_are_broadcast_and_gathered(ranks, size):
    ranks.run(check_objects, world_size=size)


def model_of(rank: int) -> torch.nn.Module:
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    model.register_buffer("mask", torch.tensor([rank == 0, True]))
    return model


def check_parameters(rank, size):
    with job():
        wanted = model_of(1).state_dict()
        for given in (
            lambda model: model.state_dict(),
            lambda model: list(model.named_parameters()),
            lambda model: list(model.parameters()),
        ):
            model = model_of(rank)
            hvd.broadcast_parameters(params := given(model), root_rank=1)
            found = model.state_dict() if isinstance(params, dict) else dict(model.named_parameters())
            assert all(torch.equal(value, wanted[name]) for name, value in found.items())
        strided = values(rank, (3, 4)).t()
        hvd.broadcast_parameters({"strided": strided}, root_rank=0)
        assert torch.equal(strided, values(0, (3, 4)).t())
        for dtype in (torch.complex64, torch.complex128):
            own, roots = ((1 - 2j) * values(each, (3, 4), dtype) for each in (rank, 1))
            given = [torch.nn.Parameter(own), own.clone().t()]
            hvd.broadcast_parameters(given, root_rank=1)
            assert torch.equal(given[0], roots) and torch.equal(given[1], roots.t())
        hvd.broadcast_parameters({}, root_rank=0)


def test_parameters_and_buffers_are_broadcast(ranks):
    ranks.run(check_parameters, world_size=3)


def trained(name: str, rank: int, steps: int):
    model = model_of(rank)
    optimizer = OPTIMIZERS[name](model.parameters(), rank)
    for step in range(steps):
        optimizer.zero_grad()
        model(values(rank, (6, 3), salt=step)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def check_states(rank, size):
    with job():
        for name, is_wrapped in [*((each, False) for each in OPTIMIZERS), ("momentum", True), ("Adam", True)]:
            # Rank 0 has trained, rank 1 less, rank 2 has no state yet.
            model, optimizer = trained(name, rank, steps=3 - rank if rank < 2 else 0)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            before = copy.deepcopy(model.state_dict())
            if is_wrapped:
                optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
            if rank == 1:  # its tensors are not like the root's, in dtype or in shape
                for values in optimizer.state.values():
                    values.update({key: OTHERS[name](x) for key, x in values.items() if isinstance(x, torch.Tensor)})
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            got, expected = optimizer.state_dict(), trained(name, 0, steps=3)[1].state_dict()
            for group in got["param_groups"]:
                group.pop("initial_lr")  # of the scheduler
            assert same(got["state"], expected["state"]), name
            assert same(got["param_groups"], expected["param_groups"]), name
            assert same(model.state_dict(), before), "a state that was empty does not change the parameters"
            assert scheduler.optimizer.param_groups is optimizer.param_groups, "the scheduler must go on to apply"


def test_an_optimizers_state_and_options_are_broadcast(ranks):
    ranks.run(check_states, world_size=3)
