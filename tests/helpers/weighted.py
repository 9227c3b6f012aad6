"""What the tests of weights train: front ends on unequal batches, and one process that has all of them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedcomm

FRONTS = ["ddp", "reducer", "parallel", "fsdp", "hsdp"]
BUCKETS = 1 / 4096


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))


def rows(rank, step, number, count):
    generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    return torch.randn(count, 6, generator=generator), torch.randn(count, 3, generator=generator)


def sum_of_losses(module, x, y):
    return (module(x) - y).square().sum()


def wrapped(front, module, config):
    """(what is called, the handle, what holds back synchronization)"""
    if front == "ddp":
        ddp = DistributedDataParallel(module, bucket_cap_mb=BUCKETS)
        return ddp, fusedcomm.attach(ddp, config, quiet=True), ddp.no_sync
    if front == "reducer":
        reducer = fusedcomm.GradReducer(module, config, bucket_mib=BUCKETS, quiet=True)
        return module, reducer, reducer.no_sync
    if front == "parallel":
        parallel = fusedcomm.DataParallel(module, config=config, bucket_cap_mb=BUCKETS, quiet=True)
        return parallel, parallel.comm, parallel.no_sync
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    if front == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replica", "shard"))
    for layer in (module[0], module[2], module):
        fully_shard(layer, mesh=mesh)
    return module, fusedcomm.attach(module, config, quiet=True), None


def gradients_of(module):
    whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in module.parameters()]
    return torch.cat([gradient.flatten() for gradient in whole])


def one_process(steps, world_size):
    """The gradients of one process that has all rows, in float64."""
    found = []
    for step, counts in enumerate(steps):
        module, total = model().double(), sum(map(sum, counts))
        for number, of_ranks in enumerate(counts):
            for rank, count in enumerate(of_ranks):
                if count:
                    x, y = rows(rank, step, number, count)
                    (sum_of_losses(module, x.double(), y.double()) / total).backward()
        found.append(gradients_of(module))
    return found


ONE_PASS = [[[1000, 1, 7, 30]], [[0, 12, 1000, 3]], [[5, 1, 0, 0]]]
TWO_PASSES = [[[9, 1, 4, 2], [0, 100, 1, 3]], [[2, 2, 2, 2], [1, 0, 5, 9]], [[3, 0, 1, 1]]]


class Given(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self, numel):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, gradient):
        return self.weight @ gradient


def given(rank, numel, step=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank))


NUMEL = 1 << 13
