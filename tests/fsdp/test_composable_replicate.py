"""The older composable replicate(), which is DDP inside."""

import pytest
import torch
import torch.distributed as dist
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


def _steps(rank: int, world_size: int, when: str) -> tuple[list[bool], int, bool]:
    plain, ours = replicate(_model()), replicate(_model())
    want = _gradients(plain, rank)
    if when == "after a step":
        assert all(map(torch.equal, _gradients(ours, rank), want))
    comm = fusedcomm.attach(torch.compile(ours) if when == "compiled" else ours, "fp32")
    same = [all(map(torch.equal, _gradients(ours, rank), want))]
    ours.set_requires_gradient_sync(False)
    alone = _gradients(ours, rank)
    ours.set_requires_gradient_sync(True)
    same.append(all(map(torch.equal, _gradients(ours, rank), want)))
    num_buckets = comm.stats().buckets
    comm.detach()
    same.append(all(map(torch.equal, _gradients(ours, rank), want)))
    return same, num_buckets, any(map(torch.equal, alone, want))


@pytest.mark.parametrize("when", ["before the first step", "after a step", "compiled"])
def test_replicate_is_attached_as_ddp(ranks, when):
    for same, num_buckets, is_reduced_without_sync in ranks.run(_steps, when, world_size=2):
        assert same == [True] * 3 and num_buckets > 0 and not is_reduced_without_sync


def _refused(rank: int, world_size: int) -> None:
    inner = nn.Sequential(replicate(nn.Linear(2, 2)), nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"0 of this model was given to replicate\(\).*attach on each"):
        fusedcomm.attach(inner, "bf16")
    hooked = replicate(_model())
    hooked.register_comm_hook(None, _no_hook)
    with pytest.raises(RuntimeError, match="hook"):
        fusedcomm.attach(hooked, "bf16")


def _no_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_parts_of_a_model_and_a_second_hook_are_refused(ranks):
    ranks.run(_refused, world_size=2)
