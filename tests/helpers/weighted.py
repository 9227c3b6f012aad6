"""What the tests of weights train: front ends on unequal batches, and one process that has all of them."""

import torch
import torch.distributed as dist
from models import synchronized
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedcomm

BUCKETS = 1 / 4096
TWO_PASSES = [[[9, 1, 4, 2], [0, 100, 1, 3]], [[2, 2, 2, 2], [1, 0, 5, 9]]]
"""Rows by step, pass and rank."""


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))


def rows(rank, step, number, count):
    generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    return torch.randn(count, 6, generator=generator), torch.randn(count, 3, generator=generator)


def sum_of_losses(module, x, y):
    return (module(x) - y).square().sum()


def wrapped(front, module, config):
    """(what is called, the handle, the context of a pass that only adds up). Fronts are those of synchronized(), some
    with an option, and FSDP2 or "HSDP" of each layer, with "own parameters" of the first and the model."""
    name, _, option = front.partition(", ")
    if name in ("FSDP2", "HSDP"):
        size = dist.get_world_size()
        mesh = init_device_mesh("cpu", (size,))
        if name == "HSDP":
            mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replica", "shard"))
        for layer in (module[0], *([] if option else [module[2]]), module):
            fully_shard(layer, mesh=mesh)
        return module, fusedcomm.attach(module, config, quiet=True), None
    if option == "static graph":
        ddp = DistributedDataParallel(module, bucket_cap_mb=BUCKETS, static_graph=True)
        return ddp, fusedcomm.attach(ddp, config, quiet=True), ddp.no_sync
    forward, comm = synchronized(name, module, config, BUCKETS, find_unused=option == "unused")
    return forward, comm, (forward if hasattr(forward, "no_sync") else comm).no_sync


def gradients_of(module):
    """A copy of all of them: [numel]."""
    whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in module.parameters()]
    return torch.cat([gradient.flatten() for gradient in whole])


def one_process(steps, world_size):
    """The gradients of one process that has all rows, in float64; steps[step][pass][rank] rows."""
    found = []
    for step, counts in enumerate(steps):
        module, total = model().double(), sum(sum(of_ranks[:world_size]) for of_ranks in counts)
        for number, of_ranks in enumerate(counts):
            for rank, count in enumerate(of_ranks[:world_size]):
                if count:
                    x, y = rows(rank, step, number, count)
                    (sum_of_losses(module, x.double(), y.double()) / total).backward()
        found.append(gradients_of(module))
    return found


def check_close(found, expected, error=1e-6):
    """Whether gradients are within this part of those of one process."""
    assert (found - expected).norm() <= error * expected.norm()
