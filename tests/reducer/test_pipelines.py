"""DataParallel within torch's pipelines, which know DistributedDataParallel by its class and prepare its reducer."""

import contextlib

import pytest
import torch
from sampling import few
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fusedcomm

NUM_STAGES = {"GPipe": 2, "1F1B": 2, "Interleaved1F1B": 4, "InterleavedZeroBubble": 4}
NUM_MICROBATCHES = 4


def layers_of(name: str) -> list[nn.Module]:
    """With small whole numbers, so that every sum is exact in any order."""
    torch.manual_seed(3)
    layers = [nn.Linear(6, 6) for _ in range(NUM_STAGES[name])]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data = torch.randint(-1, 2, parameter.shape).float()
    return layers


def batch(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return tuple(torch.randint(-2, 3, (8, 6), generator=generator).float() for _ in range(2))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * target).sum()


def gradients_of(layers: list[nn.Module]) -> list[torch.Tensor]:
    return [parameter.grad.clone() for layer in layers for parameter in layer.parameters()]


def train_pipeline(name: str, mesh: DeviceMesh) -> list[torch.Tensor]:
    """Trains a pipeline on two ranks, of which there are two replicas. Returns the gradients of this rank's stages in
    two steps."""
    place, pipeline, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group(), mesh["dp"].get_group()
    layers = layers_of(name)[place::2]
    stages = [
        pipelining.PipelineStage(
            fusedcomm.DataParallel(layer, process_group=group, config="fp32", quiet=True),
            place + 2 * i,
            NUM_STAGES[name],
            torch.device("cpu"),
            group=pipeline,
        )
        for i, layer in enumerate(layers)
    ]
    make = getattr(pipelining, f"Schedule{name}")
    schedule = make(stages if len(stages) > 1 else stages[0], NUM_MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.0)
    gradients = []
    for step in range(2):
        x, y = batch(step, mesh["dp"].get_local_rank())
        optimizer.zero_grad()
        schedule.step(*([x] if place == 0 else []), **({"target": y, "losses": []} if place == 1 else {}))
        optimizer.step()
        gradients += gradients_of(layers)
    return gradients


def train_in_ddp(name: str, mesh: DeviceMesh) -> list[torch.Tensor]:
    """The same without a pipeline: in some of these schedules DDP fails when it cuts its buckets again."""
    layers = layers_of(name)
    model = DistributedDataParallel(nn.Sequential(*layers), process_group=mesh["dp"].get_group())
    gradients = []
    for step in range(2):
        x, y = batch(step, mesh["dp"].get_local_rank())
        model.zero_grad()
        parts = list(zip(x.chunk(NUM_MICROBATCHES), y.chunk(NUM_MICROBATCHES), strict=True))
        for i, (inputs, target) in enumerate(parts):
            with model.no_sync() if i + 1 < len(parts) else contextlib.nullcontext():
                loss_of(model(inputs), target).backward()
        for parameter in model.parameters():
            parameter.grad /= NUM_MICROBATCHES
        gradients += gradients_of(layers[mesh["pp"].get_local_rank() :: 2])
    return gradients


def same_as_ddp(rank, world_size, name):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    ours, expected = train_pipeline(name, mesh), train_in_ddp(name, mesh)
    assert len(ours) == len(expected) and all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("name", few(["GPipe", "1F1B", "Interleaved1F1B"], "Interleaved1F1B"))
def test_schedules_have_ddps_bits(ranks, name):
    ranks.run(same_as_ddp, name)


def bypassed(rank, world_size):
    with pytest.raises(RuntimeError, match="zero-bubble schedules do, bypass it"):
        train_pipeline("InterleavedZeroBubble", init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")))


def test_a_schedule_that_bypasses_ddp_is_refused(ranks):
    ranks.run(bypassed)
