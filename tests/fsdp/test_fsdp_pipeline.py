"""Pipeline stages that FSDP2 shards: the schedule reduces gradients after its backward passes, outside of autograd."""

import pytest
import torch
from sampling import few
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import fusedcomm


def _stage(index: int, mesh: DeviceMesh, by) -> nn.Module:
    torch.manual_seed(index)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(4)])
    for layer in model:
        by(layer, mesh=mesh)
    by(model, mesh=mesh)
    return model


def _trained(mesh: DeviceMesh, by, wire: str | None) -> tuple[list, int, int]:
    """This rank's parameters after three steps, and the handle's steps and buckets."""
    index, shard = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    model = _stage(index, mesh["dp"], by)
    comm = None if wire is None else fusedcomm.attach(model, wire)
    stage = PipelineStage(model, index, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + shard)
        x, y = (torch.randn(4, 96, generator=generator) for _ in range(2))
        optimizer.zero_grad()
        schedule.step(x) if index == 0 else schedule.step(target=y, losses=[])
        optimizer.step()
    counts = (0, 0) if comm is None else (comm.stats().steps, comm.stats().buckets)
    if comm is not None:
        comm.detach()
    return [parameter.to_local().detach().clone() for parameter in model.parameters()], *counts


def _both(rank, world_size, by):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    want, *_ = _trained(mesh, by, None)
    got, num_steps, num_buckets = _trained(mesh, by, "fp32")
    rounded, *_ = _trained(mesh, by, "int8")
    largest = max((a - b).abs().max().item() for a, b in zip(rounded, want, strict=True))
    return all(map(torch.equal, got, want)), largest, num_steps, num_buckets


@pytest.mark.parametrize("by", few([fully_shard, replicate], fully_shard))
def test_a_pipeline_trains_as_without_fusedcomm(ranks, by):
    for is_same, largest, num_steps, num_buckets in ranks.run(_both, by, world_size=4):
        assert is_same and 0 < largest < 0.01
        assert (num_steps, num_buckets) == (3, 12)
