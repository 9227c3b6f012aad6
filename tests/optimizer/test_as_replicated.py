"""With fp32 both ways, owners give the bits of the same optimizer on every rank: parameters, and what groups have."""

import on_streams
import pytest
import torch
import torch.distributed as dist
from counting import COUNTING
from models import Conv
from owners import (
    Branches,
    Frozen,
    Net,
    Way,
    bf16_net,
    by_data,
    by_new_data,
    flat,
    groups_of,
    loss_of,
    one_step,
    train,
)
from sampling import few

import fusedcomm
from fusedcomm.config import Chunks, Config

WAYS = {
    "adamw": Way(),
    "sgd": Way(kind="sgd"),
    "muon": Way(kind="muon"),
    "two groups": Way(kind="two groups"),
    "named": Way(kind="named"),
    "named groups": Way(kind="named groups"),
    "chunks": Way(config=Config("fp32", sum="two-shot", chunks=Chunks(nbytes=4096, in_flight=2))),
    "channels_last": Way(model=Conv),
    "channels_last sgd": Way(model=Conv, kind="sgd"),
    "frozen": Way(model=Frozen),
    "frozen muon": Way(model=Frozen, kind="muon"),
    "DataParallel": Way(front="parallel"),
    "DataParallel, no_sync": Way(front="parallel", kind="sgd", accumulate=3),
    "no_sync": Way(kind="sgd", accumulate=2),
    "scheduler": Way(scheduled=True),
    "scheduler sgd": Way(kind="sgd", scheduled=True),
    "weighted": Way(config=Config("fp32", sum="two-shot", weighted="mean")),
    "weighted, accumulated": Way(config=Config("fp32", sum="two-shot", weighted="sum"), accumulate=2),
    "unused": Way(model=Branches, find_unused=True),
    "unused muon": Way(model=Branches, find_unused=True, kind="muon"),
    "scaled": Way(scaled=True),
    "scaled, accumulated": Way(scaled=True, kind="sgd", accumulate=2),
    "clipped": Way(kind="sgd", max_norm=0.25),
    "not clipped": Way(max_norm=1000.0),
    "sharpness-aware": Way(kind="sgd", restore=by_data),
    "sharpness-aware, new data": Way(kind="sgd", restore=by_new_data),
    **{f"counts, {kind.__name__}": Way(kind=kind) for kind in COUNTING},
}
BY_HOST = {
    "by host": Way(config=Config("fp32", sum="two-shot", hosts=2)),
    "by host, weighted": Way(config=Config("fp32", sum="two-shot", hosts=2, weighted="mean")),
}


def beside(rank, world_size, name, steps, device="cpu"):
    """(the first step after which owners have other bits, another scale or other values in groups; scales; parameters
    at the end)."""
    way = {**WAYS, **BY_HOST}[name]
    theirs = train(way, rank, world_size, steps, owners=False, device=device)
    ours = train(way, rank, world_size, steps, owners=True, device=device)
    wrong = [
        i
        for i, ((mine, *my_others), (other, *others)) in enumerate(zip(ours, theirs, strict=True))
        if not torch.equal(mine, other) or my_others != others
    ]
    return (wrong or [None])[0], [scale for _, scale, _ in ours], ours[-1][0]


def check(ranks, steps, name, world_size, *device):
    outcomes = ranks.run(beside, name, steps, *device, world_size=world_size)
    for rank, (wrong, scales, parameters) in enumerate(outcomes):
        assert wrong is None, f"rank {rank}, step {wrong}"
        assert torch.equal(parameters, outcomes[0][2]) and parameters.isfinite().all()
        if WAYS.get(name, Way()).scaled:
            assert scales == outcomes[0][1]
            assert scales[2] < scales[1] and scales[5] > scales[4]  # it has shrunk after the Inf, and grown since


@pytest.mark.sampled
@pytest.mark.parametrize("world_size", few([2, 3, 4], 2, 3))
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("steps", few([6, 100], 6))
def test_parameters_are_those_of_a_replicated_optimizer(ranks, name, world_size, steps):
    check(ranks, steps, name, world_size)


@pytest.mark.parametrize("name", BY_HOST)
def test_so_they_are_with_two_ranks_on_each_host(ranks, name):
    check(ranks, 6, name, 4)


# The stand-in for an accelerator has no convolutions.
ON_STREAMS = [name for name in WAYS if "channels_last" not in name]


@pytest.mark.parametrize(
    "name", few(ON_STREAMS, "chunks", "muon", "DataParallel, no_sync", "weighted, accumulated", "scaled")
)
def test_so_they_are_where_everything_is_work_of_an_accelerators_streams(ranks_on_streams, name):
    check(ranks_on_streams, 6, name, 2, on_streams.DEVICE)


# ---- bf16 parameters


def with_masters(rank, world_size, steps, kind):
    """What owners of bf16 parameters do, in plain torch: each rank has all fp32 copies, and steps them by the fp32 mean
    of all ranks' bf16 gradients. Returns the parameters after each step."""
    torch.manual_seed(5)
    model = Net(torch.bfloat16)
    masters = {p: p.detach().float().requires_grad_() for p in model.parameters()}
    groups = groups_of(model, kind)
    optimizers = []
    for group in groups:
        others = {key: value for key, value in group.items() if key not in ("optimizer_class", "params")}
        optimizers.append(group["optimizer_class"]([masters[p] for p in group["params"]], **others))
    seen = []
    for step in range(steps):
        model.zero_grad()
        loss_of(model, rank, step).backward()
        for p, master in masters.items():
            gradients = [torch.empty_like(p.grad) for _ in range(world_size)]
            dist.all_gather(gradients, p.grad)
            total = gradients[0].float()
            for gradient in gradients[1:]:
                total = total + gradient.float()
            master.grad = total * (1.0 / world_size)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for p, master in masters.items():
                p.copy_(master)
        seen.append(flat(model))
    return seen


def bf16_beside_masters(rank, world_size, kind, steps):
    theirs = with_masters(rank, world_size, steps, kind)
    way = Way(model=bf16_net, kind=kind, update="bf16")
    ours = train(way, rank, world_size, steps, owners=True)
    return [torch.equal(mine, other) for (mine, *_), other in zip(ours, theirs, strict=True)]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("world_size", few([2, 3, 4], 2, 3))
def test_bf16_parameters_follow_fp32_copies_at_their_owners(ranks, kind, world_size):
    for same in ranks.run(bf16_beside_masters, kind, 6, world_size=world_size):
        assert same == [True] * 6


# ---- hyperparameters on an accelerator


def with_own_rate(rank, world_size, device, is_at_first):
    """The error of ranks whose rates, tensors on the device, are not the same, and the number of steps before it."""
    model, num_steps = Net().to(device), 0
    reducer = fusedcomm.GradReducer(model, "fp32", quiet=True)
    rate = torch.tensor(0.25 * (1 + rank if is_at_first else 1), device=device)
    with pytest.raises(RuntimeError) as error:
        optimizer = fusedcomm.ShardedOptimizer(reducer, torch.optim.SGD, lr=rate, foreach=False, quiet=True)
        one_step(model, optimizer, rank, 0)
        rate.mul_(1 + rank)
        for num_steps in range(3):
            one_step(model, optimizer, rank, num_steps)
    return str(error.value), num_steps


@pytest.mark.parametrize("is_at_first", [True, False])
def test_rates_on_an_accelerator_are_compared_at_first_and_two_passes_late(ranks_on_streams, is_at_first):
    for error, num_steps in ranks_on_streams.run(with_own_rate, on_streams.DEVICE, is_at_first, world_size=2):
        assert "lr is 0.25 on rank 0 and 0.5 on rank 1" in error and num_steps == (0 if is_at_first else 2)
