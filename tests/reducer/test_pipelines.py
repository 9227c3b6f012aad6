"""DataParallel within torch's pipelines, which know DistributedDataParallel by its class and prepare its reducer."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fusedcomm

NUM_STAGES = {"GPipe": 2, "1F1B": 2, "Interleaved1F1B": 4, "InterleavedZeroBubble": 4}


def train(rank: int, name: str, ours: bool) -> list[torch.Tensor]:
    """The parameters of this rank's stages after some steps, of two replicas of a pipeline on two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place, replica, group = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank(), mesh["dp"].get_group()
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(NUM_STAGES[name])]
    stages, modules = [], []
    for index in range(place, NUM_STAGES[name], 2):
        modules.append(layers[index])
        if ours:
            wrapped = fusedcomm.DataParallel(layers[index], process_group=group, wire="fp32", quiet=True)
        else:
            wrapped = DistributedDataParallel(layers[index], process_group=group)
        device, pipeline = torch.device("cpu"), mesh["pp"].get_group()
        stages.append(pipelining.PipelineStage(wrapped, index, NUM_STAGES[name], device, group=pipeline))
    make = getattr(pipelining, f"Schedule{name}")
    stages = stages if NUM_STAGES[name] == 4 else stages[0]
    schedule = make(stages, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + replica)
        x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)
        optimizer.zero_grad()
        schedule.step(*([x] if place == 0 else []), **({"target": y, "losses": []} if place == 1 else {}))
        optimizer.step()
    own = [p.detach().clone() for module in modules for p in module.parameters()]
    for parameter in own:
        both = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(both, parameter, group=group)
        assert torch.equal(*both), "the replicas have drifted apart"
    return own


def same_as_ddp(rank, world_size, name):
    expected = train(rank, name, ours=False)
    assert all(map(torch.equal, train(rank, name, ours=True), expected))


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_schedules_have_ddps_bits(ranks, name):
    ranks.run(same_as_ddp, name)


def bypassed(rank, world_size):
    with pytest.raises(RuntimeError, match="zero-bubble schedules do, bypass it"):
        train(rank, "InterleavedZeroBubble", ours=True)


def test_a_schedule_that_bypasses_ddp_is_refused(ranks):
    ranks.run(bypassed)
