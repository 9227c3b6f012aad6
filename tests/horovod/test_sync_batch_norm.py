"""SyncBatchNorm on batches of several ranks is batch norm on all of them."""

import itertools

import pytest
import torch
from jobs import job, values

import fusedcomm.horovod as hvd

BATCHES = [3, 1, 0, 4]
SHAPES = [(5,), (5, 2), (5, 2, 3)]


def check(rank, size, shape, affine, momentum):
    torch.manual_seed(0)
    synced = hvd.SyncBatchNorm(5, affine=affine, momentum=momentum).double()
    plain = torch.nn.BatchNorm1d(5, affine=affine, momentum=momentum).double()
    plain._check_input_dim = lambda _: None
    if affine:
        with torch.no_grad():
            plain.weight.copy_(torch.arange(1.0, 6.0))
            plain.bias.copy_(torch.arange(5.0))
        synced.load_state_dict(plain.state_dict())
    batches = BATCHES[:size] if size > 1 else [4]
    own = sum(batches[:rank])
    for step in range(2):
        whole = torch.cat([values(r, (n, *shape), torch.float64, salt=step) for r, n in enumerate(batches)]) / 4
        mine = whole[own : own + batches[rank]].clone().requires_grad_()
        whole.requires_grad_()
        out, wanted = synced(mine), plain(whole)
        torch.testing.assert_close(out, wanted[own : own + batches[rank]])
        grad = values(7, wanted.shape, torch.float64, salt=step)
        wanted.backward(grad)
        out.backward(grad[own : own + batches[rank]])
        torch.testing.assert_close(mine.grad, whole.grad[own : own + batches[rank]])
        torch.testing.assert_close(synced.running_mean, plain.running_mean)
        torch.testing.assert_close(synced.running_var, plain.running_var)
    if affine:
        for name in ("weight", "bias"):
            summed = hvd.allreduce(getattr(synced, name).grad, op=hvd.Sum, name=name)
            torch.testing.assert_close(summed, getattr(plain, name).grad)
    synced.eval(), plain.eval()
    torch.testing.assert_close(synced(mine), plain(whole)[own : own + batches[rank]])


def check_all(rank, size):
    with job():
        for case in itertools.product(SHAPES, [True, False], [0.1, None]):
            check(rank, size, *case)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_it_normalises_over_the_batches_of_all_ranks(ranks, size):
    ranks.run(check_all, world_size=size)
