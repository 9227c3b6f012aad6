"""Front ends within torch's pipelines, which know DistributedDataParallel and FSDP2 by their classes: the one's reducer
is prepared, and the other's gradients are reduced after the backward passes, outside of autograd."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from models import whole
from torch import nn
from torch.distributed import pipelining
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
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
    return [whole(parameter.grad) for layer in layers for parameter in layer.parameters()]


def in_data_parallel(layer: nn.Module, mesh: DeviceMesh) -> tuple:
    wrapper = fusedcomm.DataParallel(layer, process_group=mesh.get_group(), config="fp32", quiet=True)
    return wrapper, wrapper.comm


def in_fsdp2(by: Callable) -> Callable[[nn.Module, DeviceMesh], tuple]:
    return lambda layer, mesh: (by(layer, mesh=mesh), fusedcomm.attach(layer, "fp32", quiet=True))


WRAPS = {"DataParallel": in_data_parallel, "FSDP2": in_fsdp2(fully_shard), "replicate": in_fsdp2(replicate)}


def train_pipeline(name: str, front_end: str, mesh: DeviceMesh) -> list[torch.Tensor]:
    """Trains a pipeline on two ranks, of which there are two replicas. Returns the gradients of this rank's stages in
    two steps."""
    place, pipeline = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    layers = layers_of(name)[place::2]
    modules, comms = zip(*(WRAPS[front_end](layer, mesh["dp"]) for layer in layers), strict=True)
    stages = [
        pipelining.PipelineStage(module, place + 2 * i, NUM_STAGES[name], torch.device("cpu"), group=pipeline)
        for i, module in enumerate(modules)
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
    assert all(comm.stats().buckets >= 2 for comm in comms)
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


def same_as_ddp(rank, world_size, name, front_end):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    ours, expected = train_pipeline(name, front_end, mesh), train_in_ddp(name, mesh)
    assert len(ours) == len(expected) and all(map(torch.equal, ours, expected))


@pytest.mark.sampled
@pytest.mark.parametrize("front_end", WRAPS)
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_schedules_have_ddps_bits(ranks, name, front_end):
    ranks.run(same_as_ddp, name, front_end)


def bypassed(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    with pytest.raises(RuntimeError, match="zero-bubble schedules do, bypass it"):
        train_pipeline("InterleavedZeroBubble", "DataParallel", mesh)


def test_a_schedule_that_bypasses_ddp_is_refused(ranks):
    ranks.run(bypassed)
