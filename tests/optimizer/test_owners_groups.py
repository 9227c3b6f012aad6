"""Groups of a ShardedOptimizer are those of the plain optimizer: what it counts in them, their keys, schedulers."""

import pytest
import torch
from models import reducer_of, refusal
from owners import BUCKET_MIB, FP32, Net, flat, made, one_step
from test_owners_state import load, save
from torch.optim import lr_scheduler

import fusedcomm


class Counts(torch.optim.Optimizer):
    """SGD whose rate grows with the number of its steps, which it counts in each group."""

    def __init__(self, params, lr=0.01, **others):
        super().__init__(params, {"lr": lr, **others})

    def count(self, group):
        """Counts a step, and returns the number."""
        group["step"] += 1
        return group["step"]

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            number = self.count(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * number / 8 * p.grad)


class FromTheStart(Counts):
    def __init__(self, params, lr=0.01, step=0):
        super().__init__(params, lr, step=step)


class Lazily(Counts):
    def count(self, group):
        group["step"] = group.get("step", 0) + 1
        return group["step"]


class InATensor(Counts):
    """As with capturable=True, in place."""

    def count(self, group):
        return group.setdefault("step", torch.zeros(())).add_(1).item()


class IfThereAreGradients(Lazily):
    """As optimizers that go on with the next group if one is empty."""

    def count(self, group):
        if all(p.grad is None for p in group["params"]):
            return 0
        return super().count(group)


class InItself(Counts):
    """Not in groups, but of each call."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        return super().step()

    def count(self, group):
        return self.calls


class Later(Counts):
    """Nothing shows in the first steps."""

    calls = 5

    def count(self, group):
        number = group.get("calls", 0) if "calls" in group else 0
        if self.state and any(state.get("n", 0) >= self.calls for state in self.state.values()):
            group["calls"] = number + 1
        for p in group["params"]:
            if p.grad is not None:
                self.state[p]["n"] = self.state[p].get("n", 0) + 1
        return 1


class OfAllGradients(Counts):
    """As those that estimate their rate."""

    def count(self, group):
        group["norm"] = sum(float(p.grad.norm()) for p in group["params"] if p.grad is not None)
        return 1


def groups_of(model):
    """Several ranks own nothing of the second group if parameters are whole."""
    named = list(model.parameters())
    return [
        {"params": [p for p in named if p.dim() == 2]},
        {"params": [model.norm.weight]},
        {"params": [p for p in named if p.dim() == 1 and p is not model.norm.weight], "lr": 0.02},
    ]


def trained(rank, world_size, kind, owners, options):
    """(parameters, groups without their parameters)."""
    torch.manual_seed(5)
    model = Net()
    reducer = reducer_of(model, FP32, bucket_mib=BUCKET_MIB)
    if owners:
        optimizer = fusedcomm.ShardedOptimizer(
            reducer, kind, groups_of(model), update="fp32", quiet=True, lr=0.01, **options
        )
    else:
        optimizer = kind(groups_of(model), lr=0.01)
    for step in range(8):
        one_step(model, optimizer, rank, step)
    reducer.detach()
    return flat(model), [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


KINDS = [FromTheStart, Lazily, InATensor, IfThereAreGradients, InItself]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_one_step_for_optimizers_that_count_them(ranks, kind):
    ((expected, groups), *_) = ranks.run(trained, kind, False, {}, world_size=3)
    for options in ({}, {"overlap": False, "whole": False}):
        for parameters, found in ranks.run(trained, kind, True, options, world_size=3):
            assert found == groups and torch.equal(parameters, expected)


def refused(rank, world_size):
    """Texts of errors, by what is tried."""
    found = {}
    for kind in (Lazily, InItself, OfAllGradients):
        torch.manual_seed(5)
        model = Net()
        reducer = reducer_of(model, FP32)
        overlap = None if kind is OfAllGradients else True
        found[kind] = refusal(fusedcomm.ShardedOptimizer, reducer, kind, overlap=overlap, quiet=True, lr=0.01)
        reducer.detach()
    found[Later] = refusal(trained, rank, world_size, Later, True, {})
    return found


def test_with_overlap_they_are_refused_when_they_are_made_or_when_they_count(ranks):
    for found in ranks.run(refused, world_size=2):
        assert found[Lazily].startswith("ValueError: fusedcomm: Lazily.step() changes param_groups[0]['step']")
        assert found[InItself].startswith("ValueError: fusedcomm: InItself.step() changes calls")
        assert all("leave out overlap=True" in found[kind] for kind in (Lazily, InItself))
        assert found[OfAllGradients].startswith(
            "ValueError: fusedcomm: OfAllGradients computes param_groups[0]['norm']"
        )
        assert "Later.step() has changed calls" in found[Later] and "overlap=False" in found[Later]


# ---- keys


def keys(rank, world_size, kinds, is_refused):
    """(keys of each group, the class's own, error of a scheduler that cycles momenta, momenta after it)."""
    torch.manual_seed(5)
    model = Net()
    reducer = reducer_of(model, FP32)
    matrices, others = ([p for p in model.parameters() if (p.dim() == 2) is is_matrix] for is_matrix in (True, False))
    groups = [
        {"params": params, "optimizer_class": kind, "lr": 0.01}
        for params, kind in zip((matrices, others), kinds, strict=True)
    ]
    optimizer = fusedcomm.ShardedOptimizer(reducer, torch.optim.AdamW, groups, quiet=True)
    plain = [kind([torch.zeros(2, 2)], lr=0.01).param_groups[0] for kind in kinds]
    cycled = (lr_scheduler.OneCycleLR, optimizer, 0.1, 9)
    text = refusal(*cycled) if is_refused else str(cycled[0](*cycled[1:]) and "")
    momenta = [group["momentum"] if "momentum" in group else group["betas"][0] for group in optimizer.param_groups]
    lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9, cycle_momentum=False)
    one_step(model, optimizer, rank, 0)
    reducer.detach()
    scheduled = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
    return [set(group) - scheduled for group in optimizer.param_groups], list(map(set, plain)), text, momenta


KEYS = [
    (torch.optim.Muon, torch.optim.AdamW, "momentum or beta1", [0.95, 0.9]),
    (torch.optim.Muon, torch.optim.SGD, "", [0.95, 0.95]),
    (torch.optim.Adam, torch.optim.AdamW, "", [0.95, 0.95]),
]


@pytest.mark.parametrize(("first", "second", "words", "momenta"), KEYS)
def test_a_group_has_its_own_classs_defaults_and_schedulers_cycle_what_all_have(ranks, first, second, words, momenta):
    for found, plain, text, set_momenta in ranks.run(keys, (first, second), bool(words), world_size=2):
        assert found == plain and words in text
        assert set_momenta == momenta


# Those that add keys to groups, as they are made at first and when training goes on.
SCHEDULERS = {
    "LambdaLR": lambda optimizer, last: lr_scheduler.LambdaLR(optimizer, falling, last),
    "OneCycleLR": lambda optimizer, last: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9, last_epoch=last),
    "CyclicLR": lambda optimizer, last: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 3, last_epoch=last),
    "CosineAnnealingLR": lambda optimizer, last: lr_scheduler.CosineAnnealingLR(optimizer, 9, last_epoch=last),
    "CosineAnnealingWarmRestarts": lambda optimizer, last: lr_scheduler.CosineAnnealingWarmRestarts(
        optimizer, 2, last_epoch=last
    ),
    "SWALR": lambda optimizer, last: torch.optim.swa_utils.SWALR(optimizer, 0.001, 4, last_epoch=last),
}


def falling(epoch):
    return 0.9**epoch


def going_on(rank, world_size, owners):
    """By scheduler, the groups' values after two steps, loading, and one more; the first group has a key of its own,
    which only one of the two has, and the second one, too."""
    found = {}
    for name, schedule in SCHEDULERS.items():
        state, last = None, -1
        for num_steps, own in ((2, "saved"), (1, "new")):
            torch.manual_seed(5)
            model = Net()
            reducer = reducer_of(model, FP32)
            matrices, others = ([p for p in model.parameters() if (p.dim() == 2) is is_2d] for is_2d in (True, False))
            groups = [{"params": matrices, own: 1.0}, {"params": others, "weight_decay": 0.0}]
            if owners:
                optimizer = fusedcomm.ShardedOptimizer(reducer, torch.optim.AdamW, groups, quiet=True, lr=0.05)
            else:
                optimizer = torch.optim.AdamW(groups, lr=0.05)
            if state is not None:
                optimizer.load_state_dict(state)
            scheduler = schedule(optimizer, last)
            for step in range(num_steps):
                one_step(model, optimizer, rank, step)
                scheduler.step()
            state, last = optimizer.state_dict(), scheduler.last_epoch
            reducer.detach()
        found[name] = [
            {k: v for k, v in group.items() if k not in ("params", "new")} for group in state["param_groups"]
        ]
    return found


def test_schedulers_go_on_from_a_loaded_state(ranks):
    ours, theirs = (ranks.run(going_on, owners, world_size=2) for owners in (True, False))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == other and all("saved" in groups[0] and "saved" not in groups[1] for groups in mine.values())


def through_files(rank, world_size, folder):
    """(rates, initial rates) of a scheduler that goes on from files, before and after its step."""
    model, reducer, optimizer = made("two groups")
    scheduler = lr_scheduler.LambdaLR(optimizer, falling)
    one_step(model, optimizer, rank, 0)
    scheduler.step()
    save(model, optimizer, folder)
    reducer.detach()
    model, reducer, optimizer = made("two groups")
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    lr_scheduler.LambdaLR(optimizer, falling)
    load(model, optimizer, folder)
    rates = [(group["lr"], group["initial_lr"]) for group in optimizer.param_groups]
    scheduler = lr_scheduler.LambdaLR(optimizer, falling, last_epoch=scheduler.last_epoch)
    one_step(model, optimizer, rank, 1)
    scheduler.step()
    reducer.detach()
    return rates, [group["lr"] for group in optimizer.param_groups]


def test_they_do_so_from_torchs_checkpoints(ranks, tmp_path):
    for rates, later in ranks.run(through_files, str(tmp_path / "a"), world_size=2):
        # torch makes a scheduler's first step when it is made.
        assert rates == [(pytest.approx(0.009), 0.01), (pytest.approx(0.0027), 0.003)]
        assert later == pytest.approx([0.01 * 0.9**3, 0.003 * 0.9**3])
