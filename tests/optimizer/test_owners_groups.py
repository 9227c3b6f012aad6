"""Schedulers set groups of a ShardedOptimizer as those of a plain optimizer."""

import pytest
import torch
from models import reducer_of, refusal
from owners import FP32, Net, one_step
from torch.optim import lr_scheduler

import fusedcomm


def cycled(rank, world_size, kinds, is_refused):
    """(error of a scheduler that cycles momenta, momenta after it)."""
    torch.manual_seed(5)
    model = Net()
    reducer = reducer_of(model, FP32)
    matrices, others = ([p for p in model.parameters() if (p.dim() == 2) is is_matrix] for is_matrix in (True, False))
    groups = [
        {"params": params, "optimizer_class": kind, "lr": 0.01}
        for params, kind in zip((matrices, others), kinds, strict=True)
    ]
    optimizer = fusedcomm.ShardedOptimizer(reducer, torch.optim.AdamW, groups, quiet=True)
    call = lr_scheduler.OneCycleLR, optimizer, 0.1, 9
    text = refusal(*call) if is_refused else str(call[0](*call[1:]) and "")
    momenta = [group["momentum"] if "momentum" in group else group["betas"][0] for group in optimizer.param_groups]
    lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9, cycle_momentum=False)
    one_step(model, optimizer, rank, 0)
    reducer.detach()
    return text, momenta


CLASSES = [
    ((torch.optim.Muon, torch.optim.AdamW), "momentum or beta1", [0.95, 0.9]),
    ((torch.optim.Muon, torch.optim.SGD), "", [0.95, 0.95]),
    ((torch.optim.Adam, torch.optim.AdamW), "", [0.95, 0.95]),
]


@pytest.mark.parametrize(("kinds", "words", "momenta"), CLASSES)
def test_schedulers_cycle_what_all_classes_have(ranks, kinds, words, momenta):
    for text, set_momenta in ranks.run(cycled, kinds, bool(words), world_size=2):
        assert words in text and set_momenta == momenta


# Those that add keys to groups, as they are made at first and when training goes on.
SCHEDULERS = {
    "OneCycleLR": lambda optimizer, last: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9, last_epoch=last),
    "CyclicLR": lambda optimizer, last: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 3, last_epoch=last),
    "SWALR": lambda optimizer, last: torch.optim.swa_utils.SWALR(optimizer, 0.001, 4, last_epoch=last),
}


def going_on(rank, world_size, owners):
    """By scheduler, the groups' values after two steps, loading, and one more; the first group has a key of its own,
    which only one of the two has, and the second one, too."""
    found = {}
    for name, schedule in SCHEDULERS.items():
        state, last = None, -1
        for num_steps, own in ((2, "saved"), (1, "new")):
            torch.manual_seed(5)
            model = Net()
            matrices, others = ([p for p in model.parameters() if (p.dim() == 2) is is_2d] for is_2d in (True, False))
            groups = [{"params": matrices, own: 1.0}, {"params": others, "weight_decay": 0.0}]
            if owners:
                reducer = reducer_of(model, FP32)
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
            if owners:
                reducer.detach()
        found[name] = [
            {k: v for k, v in group.items() if k not in ("params", "new")} for group in state["param_groups"]
        ]
    return found


def test_schedulers_go_on_from_a_loaded_state(ranks):
    ours, theirs = (ranks.run(going_on, owners, world_size=2) for owners in (True, False))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == other and all("saved" in groups[0] and "saved" not in groups[1] for groups in mine.values())
