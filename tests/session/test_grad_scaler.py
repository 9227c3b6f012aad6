"""GradScaler beside torch's on DDP without a hook: the same scales, skipped steps, gradients and parameters."""

import contextlib
import math

import pytest
import torch
from models import Mlp, Sparse, reducer_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedcomm

NUM_STEPS = 8
CLIP = 0.05


def loss_of(forward, rank, step, part):
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
    x, y = torch.randn(8, 10, generator=generator), torch.randn(8, 5, generator=generator)
    return nn.functional.mse_loss(forward(x).float(), y)


def optimizers_of(model, kind):
    parameters = list(model.parameters())
    if kind == "two":
        return [torch.optim.SGD(parameters[:2], 0.1, momentum=0.9), torch.optim.SGD(parameters[2:], 0.1)]
    if kind == "fused":
        return [torch.optim.AdamW(parameters, 0.01, fused=True)]
    return [torch.optim.SGD(parameters, 0.1, momentum=0.9)]


def train(rank, world_size, front_end, kind, init_scale, clips, accumulate):
    """Steps of which one has an Inf on rank 1 and another a NaN. Returns what the ranks may compare."""
    torch.manual_seed(5)
    model = Mlp()
    options = {"init_scale": init_scale, "growth_interval": 3}
    if front_end == "reducer":
        forward, comm = model, reducer_of(model, "fp32", bucket_mib=0.001)
        scaler, no_sync = fusedcomm.GradScaler(comm, "cpu", **options), comm.no_sync
    else:
        forward = DistributedDataParallel(model, bucket_cap_mb=0.001)
        no_sync = forward.no_sync
        if front_end == "hook":
            comm = fusedcomm.attach(forward, wire="fp32", quiet=True)
            scaler = fusedcomm.GradScaler(comm, "cpu", **options)
        else:
            scaler = torch.amp.GradScaler("cpu", **options)
    optimizers = optimizers_of(model, kind)
    seen = []
    for step in range(NUM_STEPS):
        for part in range(accumulate):
            with contextlib.nullcontext() if part == accumulate - 1 else no_sync():
                loss = loss_of(forward, rank, step, part)
                if step in (2, 5) and rank == 1:
                    # Only the first layer's gradient is not finite.
                    first = next(model.parameters())
                    bad = math.inf if step == 2 else math.nan
                    loss = loss + (first * torch.where(torch.arange(first.numel()).view_as(first) == 3, bad, 0.0)).sum()
                scaler.scale(loss).backward()
        if clips:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for optimizer in optimizers:
            scaler.step(optimizer)
        found = [None if p.grad is None else p.grad.to_dense().clone() for p in model.parameters()]
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        seen.append((scaler.get_scale(), found, [p.detach().clone() for p in model.parameters()]))
    if front_end != "torch":
        comm.detach()
    return seen


CASES = {
    "plain": ("one", 2.0**16, False, 1),
    "clipped": ("one", 2.0**16, True, 1),
    "accumulated": ("one", 2.0**10, True, 3),
    "two optimizers": ("two", 2.0**16, False, 1),
    "fused": ("fused", 2.0**16, False, 1),
    "fused and clipped": ("fused", 2.0**16, True, 2),
    "no power of two": ("one", 1000.0, False, 1),
}


@pytest.mark.parametrize("front_end", ["hook", "reducer"])
@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_torchs_scaler_bit_for_bit(ranks, front_end, name):
    theirs = ranks.run(train, "torch", *CASES[name], world_size=2)
    ours = ranks.run(train, front_end, *CASES[name], world_size=2)
    fused = CASES[name][0] == "fused" and not CASES[name][2]
    for mine, other in zip(ours, theirs, strict=True):
        assert len({scale for scale, _, _ in mine}) > 2  # it has grown and shrunk
        for step, ((a, found, parameters), (b, expected, others)) in enumerate(zip(mine, other, strict=True)):
            assert a == b, step
            same = [*zip(parameters, others, strict=True)]
            # Torch's fused optimizers leave the gradients scaled.
            same += [] if fused or step in (2, 5) else [*zip(found, expected, strict=True)]
            for x, y in same:
                if fused:
                    # One division within the step, in place of a multiplication before it.
                    torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)
                else:
                    assert torch.equal(x, y), (step, x, y)
    assert [scale for scale, _, _ in ours[0]] == [scale for scale, _, _ in ours[1]]


def test_sparse_gradients(ranks):
    ranks.run(sparse_steps, world_size=2)


def test_gradients_in_bf16_are_rounded_twice_as_torch_does(ranks):
    ranks.run(bf16_steps, world_size=2)


def sparse_steps(rank, world_size):
    torch.manual_seed(5)
    model = Sparse()
    comm = reducer_of(model, "fp32")
    scaler = fusedcomm.GradScaler(comm, "cpu", init_scale=256.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plain = []
    for scaled in (False, True, True):
        optimizer.zero_grad()
        loss = loss_of(model, rank, 0, 0)
        if not scaled:
            loss.backward()
            plain = [p.grad.to_dense().clone() for p in model.parameters()]
            continue
        scaler.scale(loss).backward()
        for p, expected in zip(model.parameters(), plain, strict=True):
            torch.testing.assert_close(p.grad.to_dense(), expected)
        scaler.unscale_(optimizer)
        scaler.update()
    comm.detach()


def bf16_steps(rank, world_size):
    """The mean is rounded to bf16, and then the unscaled gradient."""
    torch.manual_seed(5)
    model = Mlp(torch.bfloat16)
    comm = reducer_of(model, "bf16")
    scaler = fusedcomm.GradScaler(comm, "cpu", init_scale=1000.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch_scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
    for scales in (False, True):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(rank)
        loss = model(torch.randn(8, 10, generator=generator).bfloat16()).float().square().sum()
        if not scales:
            torch_scaler.scale(loss).backward()
            torch_scaler.unscale_(optimizer)
            plain = [p.grad.clone() for p in model.parameters()]
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            for p, expected in zip(model.parameters(), plain, strict=True):
                assert torch.equal(p.grad, expected)
    comm.detach()


def refusals(rank, world_size):
    model = Mlp()
    comm = reducer_of(model, "fp32")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(TypeError, match="takes what fusedcomm.attach returns, or a GradReducer, not Linear"):
        fusedcomm.GradScaler([comm, nn.Linear(2, 2)], "cpu")
    scaler = fusedcomm.GradScaler(comm, "cpu")
    scaler.scale(loss_of(model, rank, 0, 0)).backward()
    with pytest.raises(RuntimeError, match=r"unscaled already, and no step has used them"):
        scaler.scale(loss_of(model, rank, 0, 1))
    model.zero_grad()
    scaler.scale(loss_of(model, rank, 1, 0)).backward()  # the gradients were dropped
    scaler.step(optimizer)
    scaler.update()
    # Only gradients of this rank, which are still scaled.
    model.zero_grad()
    with comm.no_sync():
        scaler.scale(loss_of(model, rank, 2, 0)).backward()
    scaled = [p.grad.clone() for p in model.parameters()]
    scaler.unscale_(optimizer)
    for p, before in zip(model.parameters(), scaled, strict=True):
        assert torch.equal(p.grad, before / scaler.get_scale())
    scaler.update()
    scaler.release()
    model.zero_grad()
    loss_of(model, rank, 3, 0).backward()
    comm.detach()


def test_gradients_are_never_a_mixture(ranks):
    ranks.run(refusals, world_size=2)


def unscaled_pass(rank, world_size):
    model = Mlp()
    comm = reducer_of(model, "fp32")
    scaler = fusedcomm.GradScaler(comm, "cpu")
    loss = scaler.scale(loss_of(model, rank, 0, 0))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has not scaled since the last pass"):
        loss.backward()


def test_a_pass_without_a_scaled_loss_fails_on_every_rank(ranks):
    ranks.run(unscaled_pass, world_size=2)


def test_a_disabled_scaler_does_nothing(ranks):
    ranks.run(disabled, world_size=2)


def disabled(rank, world_size):
    model = Mlp()
    comm = reducer_of(model, "fp32")
    scaler = fusedcomm.GradScaler(comm, "cpu", enabled=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_of(model, rank, 0, 0).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    scaler.scale(loss_of(model, rank, 0, 0)).backward()
    assert all(map(torch.equal, expected, [p.grad for p in model.parameters()]))
    scaler.step(optimizer)
    scaler.update()
    comm.detach()
