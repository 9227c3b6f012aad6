"""With fp32 both ways, owners give the bits of the same optimizer on every rank: parameters, and what groups have."""

import contextlib
import threading
from unittest import mock

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
    train,
)
from patience import HANG_S
from sampling import few

import fusedcomm
from fusedcomm.config import Chunks, Config
from fusedcomm.optimizer.exchange import Exchange
from fusedcomm.optimizer.owner import Owner

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
}
# These are not possible with overlap.
LATER_WAYS = {
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
CASES = [(name, overlap) for name in WAYS for overlap in (False, True)] + [(name, False) for name in LATER_WAYS]


def beside(rank, world_size, name, overlap, steps, device="cpu"):
    """(the first step after which owners have other bits, another scale or other values in groups; scales; parameters
    at the end)."""
    way = {**WAYS, **LATER_WAYS, **BY_HOST}[name]
    theirs = train(way, rank, world_size, steps, owners=False, device=device)
    ours = train(way, rank, world_size, steps, owners=True, overlap=overlap, device=device)
    wrong = [
        i
        for i, ((mine, *my_others), (other, *others)) in enumerate(zip(ours, theirs, strict=True))
        if not torch.equal(mine, other) or my_others != others
    ]
    return (wrong or [None])[0], [scale for _, scale, _ in ours], ours[-1][0]


def check(ranks, steps, name, overlap, world_size, *device):
    outcomes = ranks.run(beside, name, overlap, steps, *device, world_size=world_size)
    for rank, (wrong, scales, parameters) in enumerate(outcomes):
        assert wrong is None, f"rank {rank}, step {wrong}"
        assert torch.equal(parameters, outcomes[0][2]) and parameters.isfinite().all()
        if LATER_WAYS.get(name, Way()).scaled:
            assert scales == outcomes[0][1]
            assert scales[2] < scales[1] and scales[5] > scales[4]  # it has shrunk after the Inf, and grown since


@pytest.mark.sampled
@pytest.mark.parametrize("world_size", few([2, 3, 4], 2, 3))
@pytest.mark.parametrize(("name", "overlap"), CASES)
@pytest.mark.parametrize("steps", few([6, 100], 6))
def test_parameters_are_those_of_a_replicated_optimizer(ranks, name, overlap, world_size, steps):
    check(ranks, steps, name, overlap, world_size)


@pytest.mark.parametrize(("name", "overlap"), [("by host", True), ("by host, weighted", False)])
def test_so_they_are_with_two_ranks_on_each_host(ranks, name, overlap):
    check(ranks, 6, name, overlap, 4)


# The stand-in for an accelerator has no convolutions.
ON_STREAMS = [case for case in CASES if "channels_last" not in case[0]]
OF_THEM = ("chunks", True), ("muon", True), ("DataParallel, no_sync", True), ("weighted, accumulated", True)
OF_THEM += (("scaled", False),)


@pytest.mark.parametrize("case", few(ON_STREAMS, *OF_THEM), ids=str)
def test_so_they_are_where_everything_is_work_of_an_accelerators_streams(ranks_on_streams, case):
    check(ranks_on_streams, 6, *case, 2, on_streams.DEVICE)


# ---- what is under way while an owner steps


def begun(rank, world_size, device):
    """What a step of several units has begun, in order: ("sum" or "step" or "send", how many of these before). On a
    CPU, whose owners have a thread, the step of a unit begins when the next unit's sum has."""
    order, changed = [], threading.Condition()

    def noting(kind, call):
        def noted(of, *args):
            with changed:

                def before(what):
                    return sum(each == what for each, _ in order)

                if kind == "step" and device == "cpu" and before("step") + 1 < len(of._exchanges):
                    assert changed.wait_for(lambda: before("sum") > before("step") + 1, HANG_S), order
                order.append((kind, before(kind)))
                changed.notify_all()
            return call(of, *args)

        return noted

    of_classes = (Exchange, "reduce", "sum"), (Owner, "_step_unit", "step"), (Exchange, "send", "send")
    with contextlib.ExitStack() as patched:
        for of, name, kind in of_classes:
            patched.enter_context(mock.patch.object(of, name, noting(kind, getattr(of, name))))
        train(Way(), rank, world_size, 1, owners=True, overlap=True, device=device)
    return order


def test_updates_of_a_unit_are_enqueued_behind_the_sums_of_the_next(ranks_on_streams):
    """All of them are on one wire, which would otherwise be idle while the owner steps."""
    for order in ranks_on_streams.run(begun, on_streams.DEVICE):
        num = len(order) // 3
        expected = [("sum", 0), ("step", 0)]
        for unit in range(1, num):
            expected += [("sum", unit), ("send", unit - 1), ("step", unit)]
        assert num > 2 and order == [*expected, ("send", num - 1)]


def test_on_a_cpu_sums_go_on_while_an_owner_steps(ranks):
    for order in ranks.run(begun, "cpu", world_size=2):
        num = len(order) // 3
        assert num > 2 and all(order.index(("sum", i + 1)) < order.index(("step", i)) for i in range(num - 1))


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


def bf16_beside_masters(rank, world_size, kind, overlap, steps):
    theirs = with_masters(rank, world_size, steps, kind)
    way = Way(model=bf16_net, kind=kind, update="bf16")
    ours = train(way, rank, world_size, steps, owners=True, overlap=overlap)
    return [torch.equal(mine, other) for (mine, *_), other in zip(ours, theirs, strict=True)]


@pytest.mark.sampled
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("world_size", few([2, 3, 4], 2, 3))
def test_bf16_parameters_follow_fp32_copies_at_their_owners(ranks, kind, overlap, world_size):
    for same in ranks.run(bf16_beside_masters, kind, overlap, 6, world_size=world_size):
        assert same == [True] * 6


# ---- hyperparameters on an accelerator


def with_own_rate(rank, world_size, device):
    """The error of ranks whose rates, tensors on the device, are not the same."""
    reducer = fusedcomm.GradReducer(Net().to(device), "fp32", quiet=True)
    rate = torch.tensor(0.25 * (1 + rank), device=device)
    with pytest.raises(RuntimeError) as error:
        fusedcomm.ShardedOptimizer(reducer, torch.optim.SGD, lr=rate, foreach=False, quiet=True)
    return str(error.value)


def test_rates_on_an_accelerator_are_compared_when_the_optimizer_is_made(ranks_on_streams):
    for error in ranks_on_streams.run(with_own_rate, on_streams.DEVICE, world_size=2):
        assert "lr is 0.25 on rank 0 and 0.5 on rank 1" in error
