"""The older composable replicate(), which is DDP inside, beside what tests/test_like_ddp.py has of it."""

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate

import fusedcomm


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 33), nn.ReLU(), nn.Linear(33, 8))


def _gradients(model: nn.Module, rank: int) -> list[torch.Tensor]:
    torch.manual_seed(rank + 1)
    model.zero_grad()
    model(torch.randn(4, 8)).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def _attached_late(rank: int, world_size: int, when: str) -> tuple[list[bool], int]:
    plain, ours = replicate(_model()), replicate(_model())
    want = _gradients(plain, rank)
    if when == "after a step":
        assert all(map(torch.equal, _gradients(ours, rank), want))
    same = []
    with fusedcomm.attach(torch.compile(ours) if when == "compiled" else ours, "fp32", quiet=True) as comm:
        same.append(all(map(torch.equal, _gradients(ours, rank), want)))
        num_buckets = comm.stats().buckets
    return [*same, all(map(torch.equal, _gradients(ours, rank), want))], num_buckets


@pytest.mark.parametrize("when", ["after a step", "compiled"])
def test_replicate_is_attached_as_ddp(ranks, when):
    assert ranks.run(_attached_late, when, world_size=2) == [([True, True], 1)] * 2
