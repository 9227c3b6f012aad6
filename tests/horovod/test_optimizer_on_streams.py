"""DistributedOptimizer on the simulated accelerator: the bits of gradients on a CPU, and no wait of the host."""

import contextlib

import on_streams
import pytest
import torch
import torch.distributed as dist
from jobs import job, values

import fusedcomm.horovod as hvd
from fusedcomm.ranks import torch_groups


@contextlib.contextmanager
def collectives_of(device):
    """fusedcomm's own groups are those of the device."""
    with pytest.MonkeyPatch.context() as patch:
        if device != "cpu":

            def made(store, name, rank, size, timeout, device):
                gloo = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timeout)
                return on_streams.simulated(gloo)

            patch.setattr(torch_groups, "own_nccl", made)
        yield


def trained(rank, size, device, compression):
    """(the gradients of every step, how often the host has waited in the last steps)"""
    with collectives_of(device), job(HOROVOD_FUSION_THRESHOLD="2000"):
        parameters = [torch.nn.Parameter(torch.zeros(shape).to(device)) for shape in ((40, 30), (7,), (20, 30))]
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        optimizer = hvd.DistributedOptimizer(optimizer, compression=getattr(hvd.Compression, compression))
        found, waits = [], 0
        for step in range(5):
            optimizer.zero_grad()
            factors = [values(rank, tuple(each.shape), salt=step).to(device) for each in parameters]
            before = on_streams.waits()
            sum((each * factor).sum() for each, factor in zip(parameters, factors, strict=True)).backward()
            optimizer.step()
            waits += on_streams.waits() - before if step > 1 else 0
            found.append([each.grad.cpu() for each in parameters])
        return found, waits


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_steps_on_streams_have_the_bits_of_a_cpu_and_the_host_does_not_wait(ranks_on_streams, compression):
    on_device = ranks_on_streams.run(trained, on_streams.DEVICE, compression)
    on_cpu = ranks_on_streams.run(trained, "cpu", compression)
    for (gradients, waits), (wanted, _) in zip(on_device, on_cpu, strict=True):
        assert waits == 0
        for ours, theirs in zip(gradients, wanted, strict=True):
            assert all(map(torch.equal, ours, theirs))
