"""With fp32 both ways, owners give the bits of the same optimizer on every rank: parameters after every step."""

import on_streams
import pytest
import torch
import torch.distributed as dist
from models import Conv
from owners import BUCKET_MIB, FP32, Branches, Frozen, Net, Way, flat, groups_of, loss_of, made, train
from sampling import few

import fusedcomm
from fusedcomm.config import Chunks, Config

FEW_STEPS, MANY_STEPS = 12, 100

WAYS = {
    "adamw": Way(),
    "sgd": Way(kind="sgd"),
    "muon": Way(kind="muon"),
    "two groups": Way(kind="two groups"),
    "chunks": Way(config=Config("fp32", sum="two-shot", chunks=Chunks(nbytes=4096, in_flight=2))),
    "channels_last": Way(model=Conv),
    "channels_last sgd": Way(model=Conv, kind="sgd"),
    "frozen": Way(model=Frozen),
    "frozen muon": Way(model=Frozen, kind="muon"),
    "DataParallel": Way(front="parallel"),
    "DataParallel, no_sync": Way(front="parallel", kind="sgd", accumulate=3),
    "every": Way(accumulate=3, counts=True),
    "no_sync": Way(kind="sgd", accumulate=2),
    "scheduler": Way(scheduled=True),
    "scheduler sgd": Way(kind="sgd", scheduled=True),
    "weighted": Way(config=Config("fp32", sum="two-shot", weighted="mean")),
    "weighted, every": Way(config=Config("fp32", sum="two-shot", weighted="sum"), accumulate=2, counts=True),
    "weighted, accumulated": Way(config=Config("fp32", sum="two-shot", weighted="mean"), accumulate=2),
}
# These are not possible with overlap.
LATER_WAYS = {
    "unused": Way(model=Branches, find_unused=True),
    "unused muon": Way(model=Branches, find_unused=True, kind="muon"),
    "scaled": Way(scaled=True),
    "scaled, accumulated": Way(scaled=True, kind="sgd", accumulate=2),
}
CASES = [
    (name, overlap, world_size)
    for name in (*WAYS, *LATER_WAYS)
    for overlap in ((False, True) if name in WAYS else (False,))
    for world_size in (2, 3, 4)
]


def beside(rank, world_size, name, overlap, steps, device="cpu"):
    """(the first step after which owners have other bits or another scale; scales; parameters at the end)."""
    way = {**WAYS, **LATER_WAYS}[name]
    theirs = train(way, rank, world_size, steps, owners=False, device=device)
    ours = train(way, rank, world_size, steps, owners=True, overlap=overlap, device=device)
    wrong = [
        i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(a[0], b[0]) or a[1] != b[1]
    ]
    return (wrong or [None])[0], [scale for _, scale in ours], ours[-1][0]


def check(ranks, steps, name, overlap, world_size, *device):
    outcomes = ranks.run(beside, name, overlap, steps, *device, world_size=world_size)
    for rank, (wrong, scales, parameters) in enumerate(outcomes):
        assert wrong is None, f"rank {rank}, step {wrong}"
        assert torch.equal(parameters, outcomes[0][2]) and parameters.isfinite().all()
        if LATER_WAYS.get(name, Way()).scaled:
            assert scales == outcomes[0][1]
            assert scales[2] < scales[1] and scales[5] > scales[4]  # it has shrunk after the Inf, and grown since


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "overlap", "world_size"), CASES)
def test_parameters_are_those_of_a_replicated_optimizer(ranks, name, overlap, world_size):
    check(ranks, FEW_STEPS, name, overlap, world_size)


# The stand-in for an accelerator has no convolutions.
ON_STREAMS = [case[:2] for case in CASES if case[2] == 2 and "channels_last" not in case[0]]
OF_THEM = ("chunks", True), ("muon", True), ("DataParallel, no_sync", True), ("weighted, accumulated", True)
OF_THEM += (("scaled", False),)


@pytest.mark.parametrize("case", few(ON_STREAMS, *OF_THEM), ids=str)
def test_so_they_are_where_everything_is_work_of_an_accelerators_streams(ranks_on_streams, case):
    check(ranks_on_streams, 6, *case, 2, on_streams.DEVICE)


@pytest.mark.full
@pytest.mark.parametrize(("name", "overlap", "world_size"), CASES)
def test_a_hundred_steps_give_the_parameters_of_a_replicated_optimizer(ranks, name, overlap, world_size):
    check(ranks, MANY_STEPS, name, overlap, world_size)


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
    return [torch.equal(mine, other) for (mine, _), other in zip(ours, theirs, strict=True)]


def bf16_net():
    return Net(torch.bfloat16)


@pytest.mark.sampled
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("world_size", few([2, 3, 4], 2, 3))
def test_bf16_parameters_follow_fp32_copies_at_their_owners(ranks, kind, overlap, world_size):
    for same in ranks.run(bf16_beside_masters, kind, overlap, 12, world_size=world_size):
        assert same == [True] * 12


# ---- clipping


def clipped(rank, world_size, kind, max_norm):
    """[(our norm, torch's norm, whether the parameters are close)] of each step. Both begin a step with equal ones."""
    model, reducer, optimizer = made(kind, overlap=False, update="fp32")
    torch.manual_seed(5)
    other = Net()
    replicated = fusedcomm.GradReducer(other, FP32, bucket_mib=BUCKET_MIB, quiet=True)
    (plain,) = (group["optimizer_class"] for group in groups_of(other, kind))
    of_group = {key: v for key, v in groups_of(other, kind)[0].items() if key not in ("optimizer_class", "params")}
    plain = plain(other.parameters(), **of_group)
    seen = []
    for step in range(6):
        plain.zero_grad()
        loss_of(other, rank, step).backward()
        theirs = torch.nn.utils.clip_grad_norm_(other.parameters(), max_norm)
        plain.step()
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        if step % 2:
            assert torch.equal(optimizer.grad_norm(), optimizer.grad_norm())  # it changes nothing
        ours = optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
        seen.append((ours, theirs, torch.allclose(flat(model), flat(other), rtol=1e-5, atol=1e-6)))
    before = flat(model)
    optimizer.zero_grad()
    (loss_of(model, rank, 6) * torch.inf).backward()
    with pytest.raises(RuntimeError, match="norm"):
        optimizer.clip_grad_norm_(max_norm, error_if_nonfinite=True)
    optimizer.skip_step()
    assert torch.equal(flat(model), before)
    reducer.detach()
    replicated.detach()
    return seen, before


@pytest.mark.parametrize("max_norm", [0.25, 1000.0])
@pytest.mark.parametrize("world_size", few([2, 3, 4], 3))
def test_clipping_takes_the_norm_of_all_means(ranks, world_size, max_norm):
    outcomes = ranks.run(clipped, "sgd", max_norm, world_size=world_size)
    for seen, parameters in outcomes:
        assert torch.equal(parameters, outcomes[0][1])
        for step, (ours, theirs, is_close) in enumerate(seen):
            assert ours.dtype == torch.float32 and ours.dim() == 0
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
            assert torch.equal(ours, outcomes[0][0][step][0]) and is_close
            assert (ours > 0.25) and (ours < 1000)
